/* One search on screen: its trace, the step shown, its panels. A comparison has two panes on one clock. */

/* A panel of which the window shows less than this, a heading, is not seen. */
const EDGE = '-48px 0px';

/* Lists that are not in view are laid out this long after the cursor has come to rest: they are half of the page's boxes. */
const LATER_MS = 60;

class Pane {
  constructor(root, palette, hooks) {
    Object.assign(this, { root, palette, hooks, store: new TraceStore(), state: null, run: null, shownRun: null, isWaiting: true, hover: {}, colour: 'sharers', rowOrder: 'tree',
                          fitAll: false, logScale: false, isStill: false, shownAt: 0, headStart: 0, isLive: false, isPassing: false, isTreeDue: false, budget: 0, wrongEntry: null, wrongPlaces: null, dirty: new Set(), inView: new Set() });
    this.outputs = new Map([...root.querySelectorAll('[data-o]')].map(e => [e.dataset.o, e]));
    this.panels = { pool: new PoolPanel(this), tables: new TablesPanel(this), tree: new TreePanel(this), memory: new MemoryPanel(this) };
    this.inspector = new Inspector(this);
    this.listen();
  }

  output(name) { return this.outputs.get(name); }
  button(name) { return this.root.querySelector(`[data-b=${name}]`); }
  canvas(name) { return this.root.querySelector(`canvas[data-c=${name}]`); }

  get surfaces() { return [...Object.values(this.panels).map(panel => panel.surface), this.inspector.spark]; }
  get frame() { return this.store.frames[this.state.t - 1]; }
  /* Pool and tables stand side by side: one height, room for every branch's row. */
  get blocksHeight() { return Math.max(216, 16 + this.store.start.width * 17); }
  /* From a file: the server knows nothing of this run. */
  get isImported() { return isImport(this.shownRun); }
  get selectedBlock() { return this.inspector.isPinned ? this.inspector.block : null; }

  begin(start) {
    this.store.reset(start); this.state = null; this.wrongEntry = this.wrongPlaces = null; this.budget = 0; this.hover = {};
    this.inspector.isPinned = false; this.inspector.position = Infinity; this.panels.tree.heights.clear();
    this.root.style.setProperty('--rows', start.width);
    showLegend(this);
  }

  /* Nothing is shown here any more. */
  leave() { this.store.reset(null); this.state = null; this.hover = {}; this.dirty.clear(); }

  /* Shows step t, or the last step before it that there is. */
  show(t) {
    if (!this.store.last) return;
    const step = Math.max(1, Math.min(this.store.last, t));
    if (this.isPassing && this.state?.t === step) return;
    if (this.state?.t !== step) this.wrongEntry = this.wrongPlaces = null;
    this.state = this.store.at(step); this.shownAt = performance.now() - this.headStart;
    this.inspector.isHeld = false;
    if (!this.isPassing) return this.showRest();
    this.inspector.settle();
    this.isTreeDue = !this.isTreeDue;
    this.markSeen('pool', 'tables', ...(this.isTreeDue ? ['tree'] : []));
  }

  /* All of it. While steps pass, address and memory follow more slowly; neither the tree's words nor numbers can be read
     in passing, so that the one and the others are in every second picture in turn. While the run grows, what is not in view waits until it is. */
  showRest() {
    if (!this.state) return;
    this.showTexts();
    if (this.sees('address')) this.inspector.show(); else this.inspector.settle();
    this.markSeen('pool', 'tables', 'tree', 'memory');
  }

  showTexts() {
    if (!this.state) return;
    if (this.sees('tiles')) showFigures(this);
    this.showLists(part => this.inView.has(part));
    clearTimeout(this.later);
    if (!this.isLive) this.later = setTimeout(() => { if (this.state && !this.isLive) this.showLists(part => !this.inView.has(part)); }, LATER_MS);
  }

  showLists(isDue) {
    if (isDue('branches')) showBranches(this);
    if (isDue('events')) showEvents(this);
  }

  sees(part) { return !this.isLive || this.inView.has(part); }

  /* How far the marks of this step have faded: 0 to 1. */
  age(milliseconds) { return this.isStill ? 1 : Math.min(1, (performance.now() - this.shownAt) / milliseconds); }

  markSeen(...panels) { this.mark(...panels.filter(name => this.sees(name))); }
  mark(...panels) { for (const panel of panels) this.dirty.add(panel); this.hooks.wake(); }

  /* Draws what is marked; what still moves stays marked. */
  draw() {
    if (!this.state) return this.dirty.clear();
    const marked = [...this.dirty];
    this.dirty.clear();
    for (const name of marked) if (this.panels[name].draw()) this.dirty.add(name);
    if (marked.includes('tree')) this.showTrunk();  // last: text on a canvas lays out the document that was written to before it
  }

  forgetLook() {
    for (const panel of Object.values(this.panels)) panel.forgetLook();
    this.inspector.forgetLook();
    if (this.state) { showLegend(this); this.inspector.show(); this.mark('pool', 'tables', 'tree', 'memory'); }
  }

  setHover(hover) {
    if (hover.block === this.hover.block && hover.place === this.hover.place) return;
    this.hover = hover;
    if (!this.state) return;
    const block = hover.block;
    for (const row of this.output('branches').children) {
      const place = row.dataset.place;
      row.classList.toggle('linked', place !== undefined && (block !== undefined ? this.state.tabs[place]?.includes(block) ?? false : +place === hover.place));
    }
    this.mark('pool', 'tables', 'tree');
  }

  /* Shows where a token lies; `pin` keeps it. */
  select(place, position, pin) {
    if (!this.state || this.state.live[place] == null || this.inspector.isPinned && !pin) return;
    Object.assign(this.inspector, { place, position, isHeld: true, isPinned: pin || this.inspector.isPinned });
    this.inspector.show();
    this.mark('pool', 'tables');
  }

  /* The address panel tells of the block that this step copied. */
  showCopy() {
    const copy = this.state && this.frame.ev.find(event => event[0] === 'cow');
    if (copy) this.select(copy[3], Infinity, false);
  }

  unpin() {
    const { inspector } = this;
    inspector.isPinned = !inspector.isPinned;
    if (inspector.isPinned) inspector.position = inspector.shown;
    inspector.show(); this.mark('pool', 'tables');
  }

  showTrunk() {
    const { store, state } = this, ancestor = this.fitAll ? -1 : store.commonAncestor(state);
    let tokens = 0, text = '';
    if (ancestor >= 0) { const path = store.path(ancestor); tokens = path.length; text = visibleText(store.text(path)); }
    const branches = occupied(state).length;
    const agreed = branches > 1 ? `agreed by all ${branches} branches, ${plural(tokens, 'token')}: ` : `${plural(tokens, 'token')}: `;
    setText(this.output('trunkhint'), tokens ? agreed : branches > 1 && !this.fitAll ? 'not one token agreed by all branches yet' : ' ');
    const { width } = this.panels.tree.surface, room = Math.floor((width > 560 ? width - 250 : width) / 6.95);  // below the hint where it is narrow
    setText(this.output('trunk'), text.length > room ? '…' + text.slice(1 - room) : text);
  }

  listen() {
    const seen = new IntersectionObserver(entries => {
      for (const { target: { dataset }, isIntersecting } of entries) this.inView[isIntersecting ? 'add' : 'delete'](dataset.panel);
      if (this.isLive && entries.some(entry => entry.isIntersecting)) this.showRest();
    }, { rootMargin: EDGE });
    for (const part of this.root.querySelectorAll('[data-panel]')) seen.observe(part);
    const pool = this.canvas('pool'), tables = this.canvas('tables'), tree = this.canvas('tree');
    const on = (canvas, find) => {
      const use = (e, pin) => {
        if (!this.state) return;
        const found = find(e.offsetX, e.offsetY);
        this.setHover(found ? { block: found.block, place: found.block === undefined ? found.place : undefined } : {});
        if (found && found.place !== undefined) this.select(found.place, found.position, pin);
      };
      canvas.addEventListener('pointermove', e => use(e, false));
      canvas.addEventListener('click', e => use(e, true));
      canvas.addEventListener('pointerleave', () => { this.setHover({}); this.inspector.isHeld = false; if (this.state) this.inspector.show(); });
    };
    on(pool, (x, y) => this.inBlock(this.panels.pool.blockAt(x, y)));
    on(tables, (x, y) => this.panels.tables.at(x, y));
    on(tree, (x, y) => {
      const node = this.panels.tree.at(x, y);
      tree.title = node ? `“${tokenLabel(node.text)}” · probability ${(100 * Math.exp(node.logprob)).toFixed(1)} % · sum of log-probs ${node.cumulative.toFixed(2)}` : '';
      return this.atNode(node);
    });
    this.output('colour').addEventListener('change', e => { this.colour = e.target.value; showLegend(this); this.mark('pool', 'tables'); });
    this.output('order').addEventListener('change', e => { this.rowOrder = e.target.value; this.mark('tables'); });
  }

  /* A token of the block, to show an address of: its last written one. */
  inBlock(block) {
    if (block === null) return null;
    const where = this.store.whereIs(this.state, block), size = this.store.start.block_size;
    return where ? { block, place: where.place, position: Math.min(this.state.len[where.place], (where.column + 1) * size) - 1 } : { block };
  }

  atNode(node) {
    if (!node) return null;
    const { store, state } = this, position = store.start.prompt_len + node.t - 1;
    const place = occupied(state).find(p => node.t <= store.nodes[state.live[p]].t && store.nodeAt(state.live[p], node.t - 1) === node.id);
    return place === undefined ? null : { place, position };
  }
}

function isImport(run) { return run?.startsWith('imported-') ?? false; }
