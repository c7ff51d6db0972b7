/* The token tree: what every branch generated, where they part, which were pruned, which ended. */

// TIP_ROOM: a tip's word of up to 11 characters, its branch and its score; the branch is left out where that is too wide.
const STEP_WIDTH = 66, FADE_STEPS = 14, LABEL_ROW = 14, TIP_ROOM = 148, TIP_ROOM_NARROW = 122, NARROW = 440, LABELLED = 30, GLIDE_MS = 60;

class TreePanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('tree'), pane.palette); this.heights = new Map(); this.arrangedAt = 0; this.placed = []; }

  forgetLook() { this.surface.forgetSize(); this.heights.clear(); }

  draw() {
    const { pane } = this, { store } = pane;
    this.surface.setHeight(Math.min(440, Math.max(230, 60 + store.start.width * 22)));
    const context = this.surface.begin();
    this.view = this.chooseView();
    const nodes = this.visibleNodes(), moving = this.arrange(nodes);
    this.best = new Set(this.bestPath());
    this.marked = this.markedPath();
    this.drawEdges(context, nodes);
    this.drawDots(context, nodes);
    this.drawLabels(context, nodes);
    this.drawScores(context);
    this.placed = nodes;
    return moving;
  }

  chooseView() {
    const { pane } = this, t = pane.state.t, steps = pane.fitAll ? t : Math.max(3, Math.floor(this.surface.width / STEP_WIDTH));
    const from = Math.max(1, t - steps), isNarrow = this.surface.width < NARROW;
    const widthBeside = room => Math.min(STEP_WIDTH * 1.5, (this.surface.width - 14 - room) / Math.max(1, t - from)), room = isNarrow ? TIP_ROOM_NARROW : TIP_ROOM;
    const right = widthBeside(room) < LABELLED ? 24 : room, width = widthBeside(right);  // room for words only where there are any
    return { from, to: t, left: 14, width, isNarrow, isLabelled: right === room, end: 14 + (t - from) * width + right - 2, x: step => 14 + (step - from) * width };
  }

  visibleNodes() {
    const { pane } = this, { store, state: { t } } = pane, nodes = [], byId = this.byId = new Map();
    for (let step = this.view.from; step <= t; step++) for (const [id] of store.frames[step - 1].nodes) {
      const node = store.nodes[id], alive = store.isAlive(node, t);
      if (!alive && !pane.fitAll && t - node.dead >= FADE_STEPS) continue;
      const item = { node, alive, children: [], y: 0 };
      byId.set(id, item); nodes.push(item);
    }
    for (const item of nodes) byId.get(item.node.parent)?.children.push(item);
    return nodes;
  }

  /* Leaves get rows, parents the middle of their children. Heights glide from step to step. True while they do. */
  arrange(nodes) {
    let rows = 0;
    const height = this.surface.height - 24, tips = nodes.filter(item => !item.children.length), alive = tips.filter(item => item.alive).length;
    // Live tips keep room for their words; the dead share what is left.
    const dead = Math.max(.08, Math.min(.4, (height / LABEL_ROW - alive) / Math.max(1, tips.length - alive)));
    const place = item => {
      if (!item.children.length) { const share = item.alive ? 1 : dead; rows += share; item.row = rows - share / 2; }
      else { for (const child of item.children) place(child); item.row = item.children.reduce((sum, child) => sum + child.row, 0) / item.children.length; }
    };
    for (const item of nodes.filter(item => !this.byId.has(item.node.parent)).sort((a, b) => this.byAncestry(a.node, b.node))) place(item);
    const row = Math.min(36, height / Math.max(1, rows)), top = 12 + (height - row * rows) / 2;
    this.row = row;
    const now = performance.now(), glide = 1 - Math.exp((this.arrangedAt - now) / GLIDE_MS);  // alike in few pictures and in many
    let moving = false;
    this.arrangedAt = now;
    const before = this.heights; this.heights = new Map();
    for (const item of nodes) {
      const target = top + item.row * row, old = before.get(item.node.id) ?? before.get(item.node.parent) ?? target;
      const near = Math.abs(target - old) < .5 || this.pane.isStill;
      item.y = near ? target : old + (target - old) * glide; moving ||= !near;
      item.x = this.view.x(item.node.t);
      this.heights.set(item.node.id, item.y);
    }
    return moving;
  }

  /* Rows as in the block tables, whatever part of the tree is in view: by the tokens at which two paths part. */
  byAncestry(a, b) {
    const { nodes } = this.pane.store;
    while (a.t > b.t) a = nodes[a.parent];
    while (b.t > a.t) b = nodes[b.parent];
    while (a.parent !== b.parent) { a = nodes[a.parent]; b = nodes[b.parent]; }
    return a.id - b.id;
  }

  bestPath() {
    const { store, state } = this.pane, place = store.best(state);
    if (place !== undefined) return store.path(state.live[place]);
    return state.finished.length ? store.path(state.finished[0][4]) : [];
  }

  markedPath() {
    const { state, store, hover } = this.pane;
    return hover.place !== undefined && state.live[hover.place] != null ? new Set(store.path(state.live[hover.place])) : null;
  }

  colour(item) {
    const { palette } = this.pane, id = item.node.id;
    return palette.get(this.marked?.has(id) ? 'ink' : !item.alive ? 'dead' : this.best.has(id) ? 'gold' : item.node.finish ? 'free' : 'accent');
  }

  alpha(item) { return item.alive ? 1 : this.pane.fitAll ? .3 : Math.max(.1, .7 * (1 - (this.pane.state.t - item.node.dead) / FADE_STEPS)); }

  drawEdges(context, nodes) {
    context.lineCap = 'round';
    this.drawDeadEdges(context, nodes.filter(item => !item.alive));
    const bent = this.view.width > 6, isBest = item => this.best.has(item.node.id);
    for (const wanted of [false, true]) for (const item of nodes) {
      if (!item.alive || isBest(item) !== wanted) continue;
      context.strokeStyle = this.colour(item); context.lineWidth = bent ? 1.1 + 3.2 * Math.exp(item.node.logprob) : 1.4;
      context.beginPath(); this.edge(context, item, bent); context.stroke();
    }
  }

  /* All edges that faded alike in one stroke: there are many of them. */
  drawDeadEdges(context, dead) {
    const bent = this.view.width > 6, byAlpha = Map.groupBy(dead, item => this.alpha(item));
    context.strokeStyle = this.pane.palette.get('dead'); context.lineWidth = 1; context.setLineDash(bent ? [2, 3] : []);
    for (const [alpha, items] of byAlpha) {
      context.globalAlpha = alpha; context.beginPath();
      for (const item of items) this.edge(context, item, false);
      context.stroke();
    }
    context.setLineDash([]); context.globalAlpha = 1;
  }

  edge(context, item, bent) {
    const parent = this.byId.get(item.node.parent), middle = parent && (item.x - parent.x) / 2;
    if (!parent) return;
    context.moveTo(parent.x, parent.y);
    if (bent) context.bezierCurveTo(parent.x + middle, parent.y, item.x - middle, item.y, item.x, item.y);
    else if (this.view.width > 12) { context.lineTo(parent.x + middle * .7, item.y); context.lineTo(item.x, item.y); }
    else context.lineTo(item.x, item.y);
  }

  drawDots(context, nodes) {
    if (this.view.width < 5) return;
    context.lineWidth = 1.2;
    for (const item of nodes) {
      const { x, y, node } = item, isTip = !item.children.length;
      context.globalAlpha = this.alpha(item); context.fillStyle = context.strokeStyle = this.colour(item);
      if (node.finish) context.fillRect(x - 3.5, y - 3.5, 7, 7);
      else if (item.alive) { context.beginPath(); context.arc(x, y, isTip ? 3.6 : 2.4, 0, 7); context.fill(); }
      else if (isTip) { context.beginPath(); context.moveTo(x - 3, y - 3); context.lineTo(x + 3, y + 3); context.moveTo(x + 3, y - 3); context.lineTo(x - 3, y + 3); context.stroke(); }
      else context.fillRect(x - 1.2, y - 1.2, 2.4, 2.4);
    }
    context.globalAlpha = 1;
  }

  /* Words where there is room: tips first, then the best path, then the rest; none over another. */
  drawLabels(context, nodes) {
    const { palette } = this.pane, taken = this.labels = [];
    if (!this.view.isLabelled) return;
    const weight = item => (item.alive ? 4 : 0) + (item.children.length ? 0 : 2) + (this.best.has(item.node.id) ? 1 : 0);
    const sorted = nodes.filter(item => item.alive || this.row > 13 && this.alpha(item) > .4 && this.isClear(item, nodes)).sort((a, b) => weight(b) - weight(a) || b.node.t - a.node.t);
    const large = Math.round(2 * Math.min(11.5, Math.max(9, this.row * .75))) / 2;
    context.textBaseline = 'middle'; context.textAlign = 'left';
    let font = '';
    for (const item of sorted) {
      const isTip = !item.children.length, pixels = item.alive ? large : 9;
      const room = isTip && item.node.t === this.view.to ? 11 : Math.floor((this.view.width - 12) / (pixels * .61));
      const text = shorten(this.label(item.node), Math.max(2, room));
      const wanted = palette.font(pixels, isTip && item.alive ? 700 : 400);
      if (font !== wanted) context.font = font = wanted;
      const x = item.x + (isTip ? 8 : 5), y = item.y - (isTip ? 0 : pixels * .72), width = textWidth(context, text, pixels);
      const box = [x, y - pixels * .5, x + width, y + pixels * .5];
      if (taken.some(t => box[0] < t[2] + 2 && t[0] < box[2] + 2 && box[1] < t[3] && t[1] < box[3])) continue;
      taken.push(box);
      context.globalAlpha = this.alpha(item);
      if (item.alive && !isTip) { context.lineWidth = 3; context.strokeStyle = palette.get('panel'); context.strokeText(text, x, y); }
      context.fillStyle = palette.get(!item.alive ? 'dead' : isTip && this.best.has(item.node.id) ? 'gold' : 'ink'); context.fillText(text, x, y);
    }
    context.globalAlpha = 1;
  }

  /* No other node of its step is so near that a word between them could belong to either. */
  isClear(item, nodes) { return !nodes.some(other => other !== item && other.node.t === item.node.t && Math.abs(other.y - item.y) < 10); }

  /* Behind the newest words: the branch and its sum of log-probs. Where tips are too close, the best keep theirs. */
  drawScores(context) {
    const { store, state, palette } = this.pane, { end, isNarrow } = this.view, taken = [];
    if (!this.view.isLabelled) return;
    context.font = palette.font(9.5); context.textAlign = 'right'; context.textBaseline = 'middle'; context.fillStyle = palette.get('muted');
    for (const place of store.bestFirst(state)) {
      const item = this.byId.get(state.live[place]);
      if (!item || taken.some(y => Math.abs(y - item.y) < 10)) continue;
      const score = state.scores[place].toFixed(2).replace('-', '−');
      taken.push(item.y); context.fillText(isNarrow ? score : `b${place} ${score.padStart(7)}`, end, item.y);
    }
    context.textAlign = 'left';
  }

  label(node) { return node.finish === 'eos' && !node.text.trim() ? 'end' : tokenLabel(node.text); }

  /* The node under the pointer, or null. */
  at(x, y) {
    let best = null, least = 14 ** 2;
    for (const item of this.placed) { const d = (item.x - x) ** 2 + (item.y - y) ** 2; if (d < least) { least = d; best = item; } }
    return best?.node ?? null;
  }
}
