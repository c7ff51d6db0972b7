/* One entry of a block table points to the wrong block: a real decoder is led to this step and asked. */
class WhatIfLesson {
  constructor(scope) {
    this.scope = scope; this.title = 'What if an entry were wrong?';
    this.place = make('select'); this.column = make('select'); this.block = make('select'); this.answer = make('div', 'answer');
    const labelled = (text, control) => { const label = make('label', 'sel', text + ' '); label.append(control); return label; };
    this.ask = make('button', 'main', 'corrupt it'); this.ask.dataset.testid = 'corrupt'; this.ask.addEventListener('click', () => this.corrupt());
    this.place.addEventListener('change', () => this.fillColumns()); this.column.addEventListener('change', () => this.fillBlocks());
    const row = make('div', 'lesson-row'); row.append(labelled('in the table of', this.place), labelled('let entry', this.column), labelled('point to block', this.block), this.ask);
    const body = make('div'); body.append(row, this.answer);
    this.hasDecoder = !scope.pane.isImported;
    if (!this.hasDecoder) { this.pages = [this.importedPage()]; return; }
    const text = 'The kernel finds a token’s keys and values only through the block table. Change one entry: a real decoder is led up to '
      + 'this step, computes the next tokens with the right and with the wrong entry, and its integrity check is asked.';
    this.pages = [{ panels: ['tables'], body, text }];
    this.stepShown();
  }

  importedPage() {
    const { scope } = this, { settings } = scope.pane.store.start, body = make('div', 'lesson-row');
    if (settings) { const again = make('button', 'main', 'run its settings here'); again.addEventListener('click', () => { scope.lessons.close(); scope.runAgain(); }); body.append(again); }
    const text = 'A what-if leads the decoder that made a run up to this step and asks it for its next tokens. This trace came from a file: '
      + 'it can be replayed, but there is no decoder behind it to ask.';
    return { body, text: settings ? `${text} The same settings can be run here; then ask again.` : `${text} It tells no settings either.` };
  }

  options(select, values, wanted) {
    select.replaceChildren(...values.map(([value, text]) => choice(value, text)));
    if (values.some(([value]) => value === wanted)) select.value = wanted;
  }

  stepShown() {
    const { store, state } = this.scope.pane, places = store.byRank(state);
    if (!this.hasDecoder || this.step === state.t) return;
    this.step = state.t; this.answer.replaceChildren(); this.ask.disabled = !places.length;
    if (!places.length) return;
    this.options(this.place, places.map(place => [place, `b${place}`]), places[0]); this.fillColumns();
  }

  /* Proposed is what shows most: the entry of the prompt's first tokens, at which every token looks, whatever else it
     reads, and the newest block for it. */
  fillColumns() {
    const table = this.scope.pane.state.tabs[+this.place.value];
    this.options(this.column, table.map((block, i) => [i, `[${i}] → ${block}`]), 0); this.fillBlocks();
  }

  fillBlocks() {
    const { state, store } = this.scope.pane, table = state.tabs[+this.place.value], own = table[+this.column.value];
    const blocks = [...new Set(state.tabs.flat())].filter(block => block !== own).sort((a, b) => a - b);
    const fills = store.fills(state), size = store.start.block_size, name = block => fills.has(block) ? `${block} (${size - fills.get(block)} of ${size} slots empty)` : String(block);
    this.options(this.block, blocks.map(block => [block, name(block)]), table.findLast(block => block !== own));
    this.ask.disabled = !blocks.length;
  }

  async corrupt() {
    const { scope } = this, { pane } = scope, { store, state } = pane, places = store.byRank(state), column = +this.column.value, other = store.whereIs(state, +this.block.value);
    if (!other) return;
    this.ask.disabled = true; this.answer.replaceChildren(make('p', '', 'the decoder is led up to this step …'));
    const request = { run: pane.shownRun, step: state.t, rank: state.rank[+this.place.value], column, other_rank: state.rank[other.place], other_column: other.column };
    const answer = await scope.server.what_if(request).catch(() => ({ error: 'the server did not answer' }));
    this.ask.disabled = false;
    if (pane.state.t !== request.step || scope.lessons.current !== this) return;
    if (answer.error) return this.answer.replaceChildren(make('p', 'bad', answer.error));
    this.show(answer, places, column);
  }

  show(answer, places, column) {
    const { scope } = this, { pane } = scope, ids = new Map();
    answer.tables.forEach((table, rank) => table.forEach((block, j) => ids.set(block, pane.state.tabs[places[rank]]?.[j])));
    const isSame = answer.tables.length === places.length && new Set(ids.values()).size === ids.size && ![...ids.values()].includes(undefined);
    if (!isSame) return this.answer.replaceChildren(make('p', 'bad', 'on this machine the search comes out differently at this step: press Generate and ask again'));
    // Another run of the same search has the same sharing under other block ids: they are told in this run's.
    const sentence = answer.integrity.replace(/\bblock (\d+)/g, (all, id) => ids.has(+id) ? `block ${ids.get(+id)}` : all);
    const affected = places.filter((_, rank) => answer.tokens[rank].is_affected), changed = answer.tokens.filter(token => token.token_before !== token.token_after).length;
    pane.wrongEntry = { column, block: +this.block.value }; pane.wrongPlaces = new Set(affected); pane.mark('tables');
    const readers = `${affected.length} of ${places.length} branches ${affected.length === 1 ? 'reads' : 'read'} through this entry (${affected.map(place => `b${place}`).join(', ')})`;
    const most = Math.max(...answer.tokens.map(token => token.logit_change)), rest = affected.length < places.length ? ' The others do not change.' : '';
    const nothing = `${readers}, and all of them would still choose the same token: the model leans little on these words here, though logits move by `
      + `up to ${most.toFixed(2)}.${rest} Try the first entry, a block with empty slots, or another step.`;
    const summary = make('p', '', changed ? `${readers}; ${changed} of them would now choose another token.${rest}` : nothing);
    summary.dataset.testid = 'summary';
    const check = make('p', 'bad'); check.append(make('b', '', 'integrity check: '), sentence); check.dataset.testid = 'integrity';
    this.answer.replaceChildren(summary, this.tokenTable(answer, places), check);
    scope.root.dataset.whatif = `${affected.length},${changed}`;
  }

  tokenTable(answer, places) {
    const table = make('table'), head = table.createTHead().insertRow(), body = table.createTBody();
    for (const title of ['branch', 'next token', 'with the wrong entry', 'greatest change of a logit']) head.append(make('th', '', title));
    answer.tokens.forEach((token, rank) => {
      const row = body.insertRow(), percent = p => `${(100 * p).toFixed(0)} %`;
      row.className = token.token_before !== token.token_after ? 'bad' : token.is_affected ? '' : 'aside';
      const before = `“${tokenLabel(token.token_before)}” ${percent(token.probability_before)}`, after = `“${tokenLabel(token.token_after)}” ${percent(token.probability_after)}`;
      const change = token.logit_change < 1e-3 ? 'none' : token.logit_change.toFixed(2);
      for (const text of [`b${places[rank]}`, before, after, change]) row.insertCell().textContent = text;
    });
    return table;
  }

  leave() { const { pane } = this.scope; pane.wrongEntry = pane.wrongPlaces = null; pane.mark('tables'); delete this.scope.root.dataset.whatif; }
}
