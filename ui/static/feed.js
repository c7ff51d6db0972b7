/* From messages to traces. Steps number themselves, so a message that was lost shows as a gap, and one that comes
   twice changes nothing; what is missing is fetched, since the server keeps the records of a run. */

class Feed {
  constructor(scope) { Object.assign(this, { scope, runs: [], past: new Set(), isFetching: false, gaps: new Set() }); }

  receiveText(text) { if (text) try { this.receive(JSON.parse(text)); } catch (error) { console.error('cowbeam', error); } }

  receive({ runs, side, frames }) {
    if (this.past.has(runs[0])) return;  // a stream that was left for a newer one
    const pane = this.scope.panes[side];
    if (pane.run !== runs[side]) { this.expect(pane, runs[side], side); if (side === 0) this.scope.comeIntoView(); }
    this.runs = runs;
    if (!frames.every(frame => this.take(pane, side, frame))) this.fetchMissing(side);
    this.scope.framesTaken();
  }

  /* A new run: what is on screen stays until its first record comes. */
  expect(pane, run, side) {
    if (side === 0) this.past.add(pane.run).delete(run);
    pane.run = run; pane.isWaiting = true;
    if (side === 0) this.scope.runExpected(run);
  }

  /* One record. False where one before it is missing. */
  take(pane, side, record) {
    const { scope } = this;
    if (record.type === 'start') { pane.isWaiting = false; pane.shownRun = pane.run; pane.begin(record); scope.runBegun(record, side); return true; }
    if (record.type === 'queued') { scope.note(record.ahead ? `waiting: ${plural(record.ahead, 'run')} ahead of you` : side ? 'the second run starts' : 'starting'); return true; }
    if (record.type === 'end') {
      if (!pane.isWaiting) pane.store.end = record;
      scope.runEnded(record, side === this.runs.length - 1);
      return true;
    }
    if (pane.isWaiting) return false;
    if (record.t <= pane.store.last) return true;
    const isTaken = pane.store.push(record);
    if (isTaken && record.t === 1 && side === 0) scope.runShown();
    return isTaken;
  }

  /* Of the pane on this side; the other side's gaps wait their turn. */
  async fetchMissing(side) {
    this.gaps.add(side);
    if (this.isFetching) return;
    this.isFetching = true;
    try {
      for (const next of this.gaps) { this.gaps.delete(next); await this.fetch(next); }
    } finally { this.isFetching = false; }
  }

  async fetch(side) {
    const { scope } = this, pane = scope.panes[side], { run } = pane;
    const answer = await scope.server.fetch_records({ run, from: pane.isWaiting ? 0 : 1 + pane.store.last })
      .catch(() => ({ error: 'the server did not answer' }));
    if (pane.run !== run) return;
    if (answer.error) return scope.note(answer.error);
    for (const line of answer.lines) this.take(pane, side, JSON.parse(line));
    scope.root.dataset.fetched = 1 + Number(scope.root.dataset.fetched ?? 0);
    scope.framesTaken();
  }

  /* Whole traces from elsewhere: the recorded run, a file, what a lesson took from the screen. One or two of
     {run, records}. */
  open(traces) {
    const { scope } = this;
    this.runs = traces.map(({ run }) => run);
    traces.forEach(({ run, records }, side) => {
      const pane = scope.panes[side];
      this.expect(pane, run, side);
      for (const record of records) this.take(pane, side, record);
    });
    scope.traceOpened();
  }
}
