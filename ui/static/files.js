/* Traces and pictures in and out of this page, and links to its settings. Nothing is stored in the browser. */

class Files {
  constructor(scope) { this.scope = scope; this.imported = 0; }

  /* The recorded run that the page opens with. */
  openExample({ records, note }, { play = true } = {}) {
    const { scope } = this;
    scope.feed.open([{ run: 'example', records }]); scope.note(note, ...(play ? [['take the tour', () => scope.lessons.open('tour')]] : []));
    if (play && !scope.still.matches) scope.clock.play(); else scope.clock.go(Math.ceil(scope.clock.liveStep * .6));
  }

  save() {
    const stores = this.scope.stores.filter(store => store.last), [first, second] = stores;
    if (!first) return;
    const name = second ? 'comparison' : 'trace';
    this.download(new Blob([traceFile(stores.map(store => store.records()))], { type: 'application/json' }), `cowbeam-${name}-${first.start.width}x${first.last}.json`);
  }

  async open(file) {
    const { scope } = this;
    if (!file) return;
    try {
      if (file.size > MAX_TRACE_BYTES) throw new Error(`this file has ${formatBytes(file.size)}; at most ${formatBytes(MAX_TRACE_BYTES)} are read`);
      const traces = parseTraces(await file.text()).map(records => ({ run: `imported-${++this.imported}`, records }));
      scope.feed.open(traces); this.tellOfImport(null, file.name);
    } catch (error) { scope.note(error.message); }
  }

  /* What a trace from a file can do here and what not; `wanted` is what was asked of it in vain. */
  tellOfImport(wanted, name) {
    const { scope } = this, again = scope.stores.every(({ start }) => start.settings);
    const reason = 'needs the decoder that made the run, and this trace came from a file';
    const sentence = wanted ? `${wanted} ${reason}.` : `Opened ${name}: replay, addresses, memory and export work. What-if and the comparison with transformers do not: each ${reason}.`;
    scope.note(sentence, ...(again ? [['run its settings here', () => scope.runAgain()]] : []));
  }

  savePicture() {
    const { scope } = this, canvas = paintPicture(scope.root, scope.palette);
    canvas.toBlob(blob => this.download(blob, `cowbeam-step-${scope.clock.t}.png`), 'image/png');
  }

  download(blob, name) {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(blob); link.download = name; link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    this.scope.root.dataset.saved = name;
  }

  get link() {
    const url = new URL(location.href), { settings } = this.scope.pane.store.start, { comparison } = this;
    url.search = ''; url.hash = '';
    for (const [name, value] of Object.entries(settings ?? {})) if (value !== null) url.searchParams.set(name, value);
    if (comparison) url.searchParams.set('compare', comparison);
    return url.href;
  }

  /* What the form calls the change that the second run makes; undefined where there is none, or none of the form's. */
  get comparison() {
    const [first, second] = this.scope.stores.map(({ start }) => start.settings);
    if (!first || !second) return undefined;
    const isSecond = changes => Object.entries({ ...first, ...changes }).every(([name, value]) => second[name] === value);
    return Object.keys(COMPARISONS).find(name => Object.keys(COMPARISONS[name]).length && isSecond(COMPARISONS[name]));
  }

  async copyLink() {
    const { scope, link } = this;
    if (!scope.pane.store.start?.settings) return scope.note('this trace tells no settings to link to');
    scope.root.dataset.link = link;
    try { await navigator.clipboard.writeText(link); scope.note('a link to these settings is in the clipboard'); }
    catch { scope.note(`a link to these settings: ${link}`); }
  }
}
