/* From a token to its bytes: (logical block, offset) → block table → (physical block, slot) → byte offset. */

class Inspector {
  constructor(pane) {
    this.pane = pane; this.place = null; this.position = null; this.isPinned = false; this.isHeld = false;
    this.spark = new Surface(pane.canvas('spark'), pane.palette);
    pane.output('atplace').addEventListener('change', e => pane.select(+e.target.value, this.position, true));
    pane.output('atposition').addEventListener('input', e => { if (e.target.value !== '') pane.select(this.place, +e.target.value, true); });
  }

  forgetLook() { this.spark.forgetSize(); }

  /* A pinned token stays as far as it exists at this step, a held one (pointed at) until the step changes; else the
     newest token of the best branch. */
  settle() {
    const { store, state } = this.pane, best = store.best(state);
    if (best === undefined) { this.place = null; return; }
    const isChosen = this.isPinned || this.isHeld;
    if (!isChosen || this.place === null || state.live[this.place] === null) this.place = best;
    if (!isChosen) this.position = Infinity;
    this.shown = Math.max(0, Math.min(state.len[this.place] - 1, this.position ?? Infinity));
  }

  get block() { return this.place === null ? null : this.pane.state.tabs[this.place][Math.floor(this.shown / this.pane.store.start.block_size)]; }

  show() {
    this.settle();
    const { pane } = this, button = pane.button('unpin');
    setText(button, this.isPinned ? 'unpin' : 'pin'); put(button, 'ariaPressed', String(this.isPinned));
    if (this.place === null) return this.showNothing();
    const { store, state } = pane, { start } = store, { place, shown: position } = this, size = start.block_size;
    const logical = Math.floor(position / size), offset = position % size, block = this.block, slot = block * size + offset;
    this.showChoices();
    const write = (name, text) => setText(pane.output(name), text);
    write('atokenkey', this.likelihood(place, position)); write('atokensub', `b${place}, position ${position}`);
    write('atoken', `“${shorten(tokenLabel(store.tokenAt(state, place, position)), 16)}”`);
    write('alogical', `${logical}, ${offset}`); write('alogicalsub', `${position} = ${logical} × ${size} + ${offset}`);
    write('atablek', `block table of b${place}`); write('atable', `[${logical}] → ${block}`); write('atablesub', `entry ${logical + 1} of ${state.tabs[place].length}`);
    write('aslot', String(slot)); write('aslotsub', `${block} × ${size} + ${offset}`);
    this.showBytes(block, offset);
    this.showBlock(block, logical, offset);
  }

  /* How likely the model held it. */
  likelihood(place, position) {
    const { store, state } = this.pane, generated = position - store.start.prompt_len;
    return generated < 0 ? 'token of the prompt' : `token, p = ${(100 * Math.exp(store.nodes[store.nodeAt(state.live[place], generated)].logprob)).toFixed(1)} %`;
  }

  showNothing() {
    for (const name of ['atoken', 'alogical', 'atable', 'aslot', 'abytes']) setText(this.pane.output(name), '–');
    for (const name of ['atokensub', 'alogicalsub', 'atablesub', 'aslotsub', 'abytessub', 'ablock', 'alife']) setText(this.pane.output(name), ' ');
    this.pane.output('aholders').replaceChildren(); this.pane.output('acells').replaceChildren(); this.spark.begin();
  }

  showChoices() {
    const { pane } = this, list = pane.output('atplace'), places = occupied(pane.state), key = places.join();
    if (list.dataset.key !== key) { list.dataset.key = key; list.replaceChildren(...places.map(place => choice(place, `b${place}`))); }
    put(list, 'value', String(this.place));
    const input = pane.output('atposition');
    put(input, 'max', String(pane.state.len[this.place] - 1));
    if (document.activeElement !== input) put(input, 'value', String(this.shown));
  }

  /* A layer's pool is [blocks, 2, kv_heads, block_size, head_dim]; the offsets are of head 0. */
  showBytes(block, offset) {
    const { start } = this.pane.store, { kv_heads, head_dim, item_bytes, layers } = start.layout, write = (name, text) => setText(this.pane.output(name), text);
    if (!kv_heads) { write('abytes', 'differs by layer'); write('abytessub', ' '); return; }
    const row = head_dim * item_bytes, head = start.block_size * row, key = block * 2 * kv_heads * head + offset * row;
    write('abytes', `K ${inEnglish(key)}`);
    write('abyteskey', `byte offset in the pool of each of ${plural(layers, 'layer')}`);
    write('abytessub', `V +${inEnglish(kv_heads * head)} · each of ${plural(kv_heads, 'head')} +${inEnglish(head)}`);
  }

  showBlock(block, logical, offset) {
    const { pane } = this, { store, state } = pane, holders = occupied(state).filter(place => state.tabs[place][logical] === block);
    setText(pane.output('ablock'), `block ${block}`);
    this.showHolders(holders);
    setText(pane.output('alife'), this.lifeText(block));
    this.showCells(block, logical, offset);
    this.drawSpark(block);
  }

  showHolders(places) {
    const list = this.pane.output('aholders');
    while (list.children.length > places.length) list.lastChild.remove();
    while (list.children.length < places.length) list.append(make('span'));
    places.forEach((place, i) => setText(list.children[i], `b${place}`));
  }

  lifeText(block) {
    const { store, state } = this.pane, life = store.lifeAt(block, state.t);
    if (!life) return '';
    const isCopy = life.how === 'cow', when = `at step ${life.born} for b${life.place}`;
    const birth = isCopy ? `copied from block ${life.source} ${when} (${plural(life.copied, 'token')} carried over)` : `allocated ${when}`;
    const lives = store.lives.get(block).filter(other => other.born <= state.t).length;
    return `${birth} · ${life.freed === Infinity ? 'still held' : `freed at step ${life.freed}`}${lives > 1 ? ` · life ${lives} of this block` : ''} · held by:`;
  }

  showCells(block, logical, offset) {
    const { store, state } = this.pane, size = store.start.block_size, filled = Math.min(size, state.len[this.place] - logical * size), cells = this.pane.output('acells');
    while (cells.children.length > size) cells.lastChild.remove();
    while (cells.children.length < size) {
      const cell = make('li'), at = cells.children.length;
      cell.addEventListener('click', () => this.pane.select(this.place, this.first + at, true));
      cells.append(cell);
    }
    this.first = logical * size;
    for (let i = 0; i < size; i++) {
      const cell = cells.children[i];
      put(cell, 'className', i === offset ? 'here' : i < filled ? this.first + i < store.start.prompt_len ? 'prompt' : '' : 'unwritten');
      setText(cell, i < filled ? shorten(tokenLabel(store.tokenAt(state, this.place, this.first + i)), 12) : ' ');
      put(cell, 'title', i < filled ? `slot ${block * size + i}` : 'not written yet');
    }
  }

  drawSpark(block) {
    const { pane } = this, { store, state, palette } = pane, context = this.spark.begin(), life = store.lifeAt(block, state.t), { width, height } = this.spark;
    if (!life) return;
    const end = Math.min(life.freed, store.last), x = t => 2 + (width - 4) * (t - life.born) / Math.max(1, end - life.born), y = n => height - 2 - (height - 5) * n / store.start.width;
    context.beginPath(); let n = 0;
    for (const [t, sharers] of life.counts) { if (t > end) break; context.lineTo(x(t), y(n)); context.lineTo(x(t), y(sharers)); n = sharers; }
    context.lineTo(x(end), y(n)); context.strokeStyle = palette.get('accent'); context.lineWidth = 1.4; context.stroke();
    context.fillStyle = palette.get('ink'); context.fillRect(x(state.t) - .75, 1, 1.5, height - 2);
  }
}
