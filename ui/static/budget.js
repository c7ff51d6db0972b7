/* The same tokens in a smaller pool: which way of keeping them runs out, and when. */
class BudgetLesson {
  constructor(scope) {
    this.scope = scope; this.title = 'Out of memory';
    const { store } = scope.pane, { start } = store;
    this.peak = store.stats.at(-1).peak;
    this.worstCase = Math.floor(start.prompt_len / start.block_size) + start.width * Math.ceil((start.prompt_len % start.block_size + start.steps) / start.block_size);
    const reserve = Math.ceil(store.frames[0].mem.contiguous / store.bytesPerBlock);
    this.slider = make('input'); Object.assign(this.slider, { type: 'range', min: 1, max: Math.max(start.num_blocks, reserve), value: Math.min(start.num_blocks, this.worstCase) });
    this.slider.setAttribute('aria-label', 'Blocks in the pool'); this.slider.addEventListener('input', () => this.show());
    this.size = make('b', 'mono'); this.list = make('ul', 'verdicts');
    const run = make('button', 'main', 'run it with this pool'); run.dataset.testid = 'run-budget';
    run.addEventListener('click', () => this.run()); run.disabled = !start.settings;
    const row = make('div', 'lesson-row'); row.append(this.slider, this.size, run);
    const body = make('div'); body.append(row, this.list);
    const text = 'Shrink the pool. The red line is what there is; see which way of keeping the same tokens still fits. '
      + 'cowbeam takes a request only if its worst case fits, so that it never has to stop half-way.';
    this.pages = [{ panels: ['memory'], body, text }];
    this.show();
  }

  show() {
    const { pane } = this.scope, { store } = pane, { start } = store, blocks = +this.slider.value, bytes = blocks * store.bytesPerBlock;
    setText(this.size, `${plural(blocks, 'block')}, ${formatBytes(bytes)}`);
    pane.budget = bytes; pane.mark('memory');
    const frames = store.frames.slice(0, store.lastWithBranches), first = frames[0].mem.contiguous, over = frames.find(frame => frame.mem.copies > bytes);
    const reserved = Math.floor(bytes / (start.max_len * start.bytes_per_token)), needed = `its worst case is ${plural(this.worstCase, 'block')}`;
    const luck = this.peak <= blocks ? ` (this run happened to need ${this.peak})` : '';
    const lines = [
      [first <= bytes, 'contiguous reserve', first <= bytes ? 'fits' : `fails before the first token: ${reserved} of ${start.width} branches fit`],
      [!over, 'a copy per branch', over ? `runs out at step ${over.t} of ${frames.length}` : 'fits'],
      [this.worstCase <= blocks, 'shared blocks, CoW',
       this.worstCase <= blocks ? `goes on to the end; at its peak it holds ${plural(this.peak, 'block')}` : `refused before it starts: ${needed}${luck}`],
    ];
    this.list.replaceChildren(...lines.map(([ok, name, text]) => {
      const row = make('li', ok ? 'good' : 'bad');
      row.append(make('b', '', `${ok ? 'fits' : 'fails'} · ${name}`), make('span', '', text));
      return row;
    }));
    this.scope.root.dataset.budget = lines.map(([ok]) => ok ? 'fits' : 'fails').join();
  }

  run() {
    const { scope } = this;
    scope.runAgain([{ ...scope.pane.store.start.settings, num_blocks: +this.slider.value }]);
    scope.lessons.close();
  }

  leave() { const { pane } = this.scope; pane.budget = 0; pane.mark('memory'); delete this.scope.root.dataset.budget; }
}
