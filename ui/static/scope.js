/* The component: messages in, panes on one clock, buttons and keys. Entry point: mountScope. */

/* A model on a CPU may be computing on the cores that draw: one part in 120 of this thread's time goes into pictures that
   nobody asked for then (of new steps, of marks that fade), one in 3 beside a GPU; but there is one at least every
   LONGEST_GAP_MS: two a second. */
const PICTURE_SHARE = { cpu: 120, others: 3 }, SHORTEST_GAP_MS = 33, LONGEST_GAP_MS = 480;

/* Live, what moves a pixel a step or cannot be read in passing (the curves over the steps, the address of the newest
   token) follows this often; what is not in view waits until it is. */
const WHOLE_MS = 1200;

/* Live, the next picture is of a later step: arcs are whole at once. */
const ARC_MS = 300;

class Scope {
  constructor(host, { props, watch, server, trigger }) {
    Object.assign(this, { host, server, trigger, frameRequest: 0, waking: 0, drawn: 0, drawMs: 0, slowest: 0,
                          isBehind: false, textIsDue: false, drawnAt: 0, wholeAt: 0, gap: SHORTEST_GAP_MS, painted: new MessageChannel() });
    this.painted.port1.onmessage = () => this.takeTime();
    this.root = host.querySelector('.kv');
    this.palette = new Palette(this.root);
    this.still = matchMedia('(prefers-reduced-motion: reduce)');
    const first = this.root.querySelector('.pane'), second = first.cloneNode(true);
    second.dataset.side = '1'; second.hidden = true; first.after(second);
    const hooks = { wake: () => this.wake() };
    this.panes = [first, second].map(pane => new Pane(pane, this.palette, hooks));
    this.outputs = new Map([...this.root.querySelectorAll('[data-o]')].filter(e => !e.closest('.pane')).map(e => [e.dataset.o, e]));
    this.clock = new Clock(() => this.stores, t => this.show(t), () => this.showButtons());
    this.timeline = new TimelinePanel(this.root.querySelector('canvas[data-c=time]'), this.palette, this.clock, () => this.stores);
    this.badges = new Badges(this); this.feed = new Feed(this); this.files = new Files(this); this.lessons = new Lessons(this);
    for (const pane of this.panes) { pane.isStill = this.still.matches; pane.memoryHigh = () => this.memoryHigh(); }
    this.listen();
    watch('value', () => this.feed.receiveText(props.value));
  }

  output(name) { return this.outputs.get(name); }
  get shown() { return this.panes.filter(pane => !pane.root.hidden && pane.store.start); }
  get stores() { return this.shown.map(pane => pane.store); }
  get pane() { return this.panes[0]; }
  get surfaces() { return [this.timeline.surface, ...this.panes.flatMap(pane => pane.surfaces)]; }

  /* Two curves are compared on one scale. */
  memoryHigh() { return this.shown.length < 2 ? 0 : Math.max(...this.shown.flatMap(({ store }) => store.frames.map(frame => Math.max(frame.mem.used, frame.mem.copies)))); }

  /* ---- what the feed tells ---- */

  runExpected(run) {
    const { clock, root } = this;
    Object.assign(root.dataset, { run, tail: '0' }); delete root.dataset.done;
    clock.isLive = true; clock.isPlaying = false;
    this.lessons.close(); this.note('');
  }

  runBegun(start, side) {
    this.compare(side === 1);
    if (side === 0) { this.lessons.close(); this.badges.showFacts(start); this.clock.t = 0; this.root.classList.add('stale'); }
    this.badges.forget();
    this.panes[side].measuredCopies = null; this.root.dataset.mode = start.mode;
    this.note(side ? this.ideaOf(start) : `computing the prompt, ${plural(start.prompt_len, 'token')}`); this.namePanes(); this.badges.showMeasured();
  }

  /* The first step is there. */
  runShown() { this.root.classList.remove('stale'); this.note(this.ideaOf(this.pane.store.start)); }

  runEnded(end, isLast) {
    if (end.message || end.reason === 'stopped') this.note(end.message ?? 'stopped');
    if (isLast) this.root.dataset.done = '1';
  }

  ideaOf(start) { return IDEAS[start.prompt] ?? ''; }

  /* The prompt in the form: one of the examples is told what it shows. */
  idea(prompt) { if (IDEAS[prompt]) this.note(`${IDEAS[prompt]} Press Generate.`); }

  /* On a narrow page the picture is below the form: whoever pressed Generate wants to see it. */
  comeIntoView() {
    const { top } = this.root.getBoundingClientRect();
    if (top > innerHeight / 3) this.root.scrollIntoView({ block: 'start', behavior: this.still.matches ? 'auto' : 'smooth' });
  }

  /* The settings of what is on screen, or others, as runs of this server. */
  runAgain(searches = this.stores.map(({ start }) => start.settings)) { this.trigger('rerun', searches); }

  traceOpened() { this.clock.isLive = false; this.root.dataset.done = '1'; this.framesTaken(); }

  /* Every step is in the trace at once; it is shown with the next picture. */
  framesTaken() {
    const { clock } = this;
    this.root.dataset.tail = this.pane.isWaiting ? 0 : clock.last;
    if (!clock.last) return;
    clock.arrived();
    if (clock.t && clock.isGrowing) { this.isBehind = true; this.wakeInTime(); } else this.catchUp();
  }

  catchUp() {
    const { clock } = this;
    this.isBehind = clock.isFollowing && clock.liveNow < clock.liveStep;
    const isPassing = clock.isFollowing && performance.now() < this.wholeAt + WHOLE_MS;
    if (!isPassing) this.wholeAt = performance.now();
    for (const pane of this.shown) Object.assign(pane, { isPassing, isLive: clock.isFollowing });
    put(this.output('seek'), 'max', String(Math.max(1, clock.last)));
    if (clock.isLive || !clock.t) clock.follow();
    else if (this.shown.some(pane => pane.store.last && !pane.state)) this.show(clock.t);
    else { this.showPosition(); for (const pane of this.shown) pane.mark('memory'); }
    this.showButtons();
    if (!isPassing) { this.markTime(); this.badges.show(); }
  }

  /* What passing steps left out, as soon as the cursor stays. */
  showRest() {
    if (this.clock.isFollowing || !this.panes.some(pane => pane.isLive)) return;
    for (const pane of this.shown) { pane.isLive = pane.isPassing = false; pane.showRest(); }
    this.markTime(); this.badges.show();
  }

  /* ---- what is shown ---- */

  show(t) {
    const isLive = this.clock.isFollowing;
    for (const pane of this.shown) { pane.headStart = isLive ? ARC_MS : 0; pane.isLive = isLive; pane.isPassing &&= isLive; pane.show(isLive ? Math.min(t, this.clock.paceOf(pane.store)) : t); }
    this.textIsDue = this.pane.isPassing && !this.pane.isTreeDue;
    if (!this.pane.isPassing) { this.showTexts(); this.markTime(); }
  }

  /* While steps pass, after the picture is drawn: text on a canvas lays out the document that was written to before. */
  showTexts() {
    const { root, clock: { t } } = this, [pane] = this.shown;
    this.textIsDue = false;
    put(this.output('seek'), 'value', String(t)); this.showPosition();
    if (!pane?.state) return;
    const breaches = this.shown.map(p => p.state && p.store.check(p.state)).filter(Boolean);
    Object.assign(root.dataset, { step: t, used: pane.store.stats[pane.state.t - 1].used, invariant: breaches[0] ?? 'ok' });
    const isVersus = this.shown.length > 1 && this.shown.every(p => p.state);
    put(this.output('versus'), 'hidden', !isVersus);
    if (isVersus) setText(this.output('versus'), comparisonSentence(this.shown));
    if (this.root.querySelector('.kv-table').open) this.output('table').replaceChildren(stepTable(this.shown));
    this.lessons.stepShown();
  }

  showPosition() { setText(this.output('pos'), `${this.clock.t} / ${this.clock.last}`); put(this.output('seek'), 'ariaValueText', `step ${this.clock.t} of ${this.clock.last}`); }

  showButtons() {
    const { clock } = this, press = (name, on) => { for (const b of this.root.querySelectorAll(`[data-b=${name}]`)) put(b, 'ariaPressed', String(on)); };
    press('live', clock.isLive); press('fit', this.pane.fitAll); press('log', this.pane.logScale);
    const play = this.root.querySelector('[data-b=play]'), runs = clock.isPlaying || clock.isFollowing;
    setText(play, runs ? 'pause' : 'play'); put(play, 'ariaLabel', runs ? 'Pause' : 'Play');
    put(this.root.dataset, 'playing', clock.isPlaying ? '1' : '0');
    this.showRest(); this.wake();
  }

  /* A sentence above the picture; `actions` are buttons after it: [label, what it does]. */
  note(text, ...actions) {
    const note = this.output('note');
    note.hidden = !text; note.replaceChildren(text);
    for (const [label, act] of actions) { const button = make('button', '', label); button.addEventListener('click', act); note.append(' ', button); }
  }
  say(text) { setText(this.output('sr'), text); }

  sayStep() {
    const { pane } = this, stat = pane.store.stats[pane.state.t - 1];
    this.say(`Step ${pane.state.t}: ${plural(stat.cow, 'copy-on-write')}, ${stat.prune} pruned, ${stat.used} blocks in use`);
  }

  compare(on) {
    const [first, second] = this.panes;
    second.root.hidden = !on; this.root.classList.toggle('compared', on);
    if (!on) second.leave();
    for (const name of ['tables', 'tree']) for (const pane of this.panes) pane.canvas(name).style.height = '';
    first.forgetLook(); second.forgetLook();
  }

  namePanes() {
    const starts = this.panes.map(pane => pane.store.start), name = start => `${start.mode} · ${start.width} branches · blocks of ${start.block_size}`;
    this.panes.forEach((pane, side) => setText(pane.output('panename'), starts[0] && starts[1] ? name(starts[side]) : ''));
  }

  /* ---- drawing ---- */

  markTime() { this.timeIsDirty = true; this.wake(); }
  wake() { if (!this.frameRequest) this.frameRequest = requestAnimationFrame(now => this.drawFrame(now)); }

  /* With the next picture that is due. */
  wakeInTime() {
    const due = this.drawnAt + this.gap - performance.now();
    if (due <= 0) this.wake(); else this.waking ||= setTimeout(() => this.wake(), due);
  }

  drawFrame(now) {
    cancelAnimationFrame(this.frameRequest); clearTimeout(this.waking); this.waking = 0;
    if (!this.host.isConnected) return;
    try { this.drawPicture(now); } finally { this.frameRequest = 0; }  // not before: what the picture marked itself is drawn
    if (this.clock.isPlaying) this.wake();
    else if (this.isDirty || this.isBehind) this.wakeInTime();
  }

  get isDirty() { return this.timeIsDirty || this.shown.some(pane => pane.dirty.size); }

  drawPicture(now) {
    this.drawnAt = performance.now();
    if (this.clock.isPlaying) this.clock.tick(now);
    if (this.isBehind) this.catchUp();
    const begun = performance.now(), wasDirty = this.isDirty;
    for (const pane of this.shown) pane.draw();
    if (this.timeIsDirty) { this.timeIsDirty = false; if (this.stores.length) this.timeline.draw(); }
    if (this.textIsDue) { for (const pane of this.shown) pane.showTexts(); this.showTexts(); }
    if (!wasDirty) return;
    const took = performance.now() - begun; this.drawn++; this.drawMs += took; this.slowest = Math.max(this.slowest, took);
    this.painted.port2.postMessage(null);
  }

  /* The browser has laid out and painted: how long must this thread be left alone? */
  takeTime() {
    const took = performance.now() - this.drawnAt, share = PICTURE_SHARE[this.pane.store.start?.device] ?? PICTURE_SHARE.others;
    this.gap = (this.gap + Math.min(LONGEST_GAP_MS, Math.max(SHORTEST_GAP_MS, share * took))) / 2;
  }

  restyle() {
    this.palette.forget(); this.timeline.forgetLook();
    for (const pane of this.panes) pane.forgetLook();
    this.markTime();
  }

  /* ---- buttons and keys ---- */

  get actions() {
    const { clock } = this, all = change => { for (const pane of this.panes) change(pane); this.showButtons(); };
    return {
      home: () => clock.go(1), prev: () => clock.step(-1), next: () => clock.step(1), play: () => clock.toggle(), live: () => clock.goLive(),
      ncow: () => { clock.nextCow(); this.pane.showCopy(); }, pcow: () => { clock.previousCow(); this.pane.showCopy(); },
      fit: () => all(pane => { pane.fitAll = !pane.fitAll; pane.panels.tree.heights.clear(); pane.mark('tree'); }),
      log: () => all(pane => { pane.logScale = !pane.logScale; pane.mark('memory'); }),
      tour: () => this.lessons.open('tour'), budget: () => this.lessons.open('budget'), whatif: () => this.lessons.open('whatif'),
      lessonprev: () => this.lessons.turn(-1), lessonnext: () => this.lessons.turn(1), lessonclose: () => this.lessons.close(),
      export: () => this.files.save(), import: () => this.output('file').click(), picture: () => this.files.savePicture(),
      link: () => this.files.copyLink(), check: () => this.badges.check(), theme: () => document.body.classList.toggle('dark'),
    };
  }

  listen() {
    this.host.addEventListener('click', e => {
      const button = e.target.closest('button[data-b]');
      if (!button) return;
      if (button.dataset.b === 'unpin') return this.panes[+button.closest('.pane').dataset.side].unpin();
      this.actions[button.dataset.b]();
      if (['prev', 'next', 'ncow', 'pcow', 'home'].includes(button.dataset.b) && this.pane.state) this.sayStep();
    });
    this.output('seek').addEventListener('input', e => this.clock.go(+e.target.value));
    this.output('speed').addEventListener('change', e => { this.clock.speed = +e.target.value; });
    this.output('file').addEventListener('change', e => { this.files.open(e.target.files[0]); e.target.value = ''; });
    this.root.querySelector('.kv-table').addEventListener('toggle', () => { if (this.pane.state) this.output('table').replaceChildren(stepTable(this.shown)); });
    this.host.addEventListener('keydown', e => this.key(e));
    this.still.addEventListener('change', () => { for (const pane of this.panes) pane.isStill = this.still.matches; });
    const resized = new ResizeObserver(() => { if (this.surfaces.some(surface => surface.isOutgrown)) this.restyle(); });
    for (const { element } of this.surfaces) resized.observe(element);
    new MutationObserver(() => this.restyle()).observe(document.body, { attributes: true, attributeFilter: ['class'] });
    document.fonts?.ready.then(() => this.restyle());
  }

  key(e) {
    const isField = /^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName) && !e.target.matches('[data-o=seek]');
    if (isField || e.ctrlKey || e.metaKey || e.altKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    const name = { ' ': 'play', Home: 'home', End: 'live', f: 'fit', l: 'log', c: 'ncow', C: 'pcow', t: 'tour', m: 'budget', w: 'whatif', d: 'theme', Escape: 'lessonclose' }[e.key];
    if (!step && !name || e.key === ' ' && /^(BUTTON|SUMMARY)$/.test(e.target.tagName)) return;
    e.preventDefault();
    if (step) this.clock.step(step * (e.shiftKey ? 10 : 1)); else this.actions[name]();
    if (this.pane.state) this.sayStep();
  }
}

/* The style sheet's rules are of this component only, and go with it. */
function putInPlace(host) {
  const style = make('style', '', `#${host.id} { ${STYLE} }`);
  host.innerHTML = TEMPLATE; host.prepend(style);
}

function mountScope(host, gradio) {
  putInPlace(host);
  const scope = new Scope(host, gradio);
  window.cowbeam = scope;  // for tests and for the curious
  scope.root.dataset.ready = '1';
  if (gradio.props.value) scope.feed.receiveText(gradio.props.value);
  else gradio.server.example({}).then(example => { if (scope.pane.run === null && example) scope.files.openExample(example); });
}
