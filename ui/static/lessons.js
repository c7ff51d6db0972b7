/* Lessons over the trace on screen: a tour of captions, a pool too small, an entry that is wrong. */

class Lessons {
  constructor(scope) { this.scope = scope; this.current = null; this.page = 0; }

  async open(name) {
    const { scope } = this;
    if (this.current?.name === name) return this.close();
    this.close();
    if (name === 'tour' && scope.pane.shownRun !== 'example') {
      const example = await scope.server.example({});
      this.left = this.whatIsShown();
      scope.files.openExample(example, { play: false });
    }
    if (!scope.pane.state) return;
    const kinds = { tour: TourLesson, budget: BudgetLesson, whatif: WhatIfLesson };
    this.current = new kinds[name](scope); this.current.name = name; this.page = 0;
    scope.output('lesson').hidden = false; scope.root.dataset.lesson = name;
    this.show();
    scope.root.querySelector(this.current.pages.length > 1 ? '[data-b=lessonnext]' : '[data-b=lessonclose]').focus({ preventScroll: true });
  }

  close() {
    const { scope } = this;
    if (!this.current) return;
    this.current.leave?.(); this.current = null;
    // What is hidden loses the focus to the page, and the keys with it.
    if (scope.output('lesson').contains(document.activeElement)) scope.root.focus({ preventScroll: true });
    scope.output('lesson').hidden = true; delete scope.root.dataset.lesson; this.spotlight(null);
    scope.output('lessonbody').replaceChildren();
    if (this.left) this.comeBack();
  }

  /* The runs on screen, one or two. Of a run that still waits for its turn there is no record yet. */
  whatIsShown() {
    const { scope } = this, { runs } = scope.feed;
    if (!scope.pane.store.start) return null;
    const traces = runs.map((run, side) => ({ run, records: scope.panes[side].run === run && !scope.panes[side].isWaiting ? scope.panes[side].store.records() : [] }));
    return { traces, step: scope.clock.t };
  }

  /* To the runs that the tour took from the screen, unless a newer one has come. */
  comeBack() {
    const { scope } = this, { traces, step } = this.left;
    this.left = null;
    if (scope.pane.run !== 'example') return;
    scope.feed.open(traces); scope.note('');
    if (traces[0].records.length) scope.clock.go(step); else scope.clock.isLive = true;
    const isOver = ({ run, records }) => isImport(run) || records.at(-1)?.type === 'end';
    if (traces.every(isOver)) return;
    delete scope.root.dataset.done;
    traces.forEach((trace, side) => { if (!isOver(trace)) scope.feed.fetchMissing(side); });
  }

  turn(by) {
    if (!this.current) return;
    const to = this.page + by;
    if (to >= this.current.pages.length) return this.close();
    this.page = Math.max(0, to); this.show();
  }

  show() {
    const { scope } = this, { pages, title } = this.current, page = pages[this.page];
    if (page.step) scope.clock.go(page.step);
    setText(scope.output('lessontitle'), page.title ?? title); setText(scope.output('lessontext'), page.text);
    setText(scope.output('lessonpos'), pages.length > 1 ? `${this.page + 1} / ${pages.length}` : '');
    scope.root.dataset.caption = this.page + 1;
    for (const name of ['lessonprev', 'lessonnext']) scope.root.querySelector(`[data-b=${name}]`).hidden = pages.length < 2;
    setText(scope.root.querySelector('[data-b=lessonnext]'), this.page + 1 === pages.length ? 'done' : 'next');
    scope.output('lessonbody').replaceChildren(...(page.body ? [page.body] : []));
    this.spotlight(page.panels ?? null);
  }

  spotlight(panels) {
    for (const panel of this.scope.root.querySelectorAll('[data-panel]')) panel.classList.toggle('lit', panels?.includes(panel.dataset.panel) ?? false);
    this.scope.root.querySelector('[data-panel].lit')?.scrollIntoView({ block: 'center', behavior: this.scope.still.matches ? 'auto' : 'smooth' });
  }

  stepShown() { this.current?.stepShown?.(); }
}
