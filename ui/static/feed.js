/* From messages to traces. Steps number themselves, so a message that was lost shows as a gap, and one that comes
   twice changes nothing; what is missing is fetched, since the server keeps the records of a run. */

class Feed {
  constructor(scope) { Object.assign(this, { scope, sides: 1, past: new Set(), isFetching: false, hasMissed: false }); }

  receiveText(text) { if (text) try { this.receive(JSON.parse(text)); } catch (error) { console.error('cowbeam', error); } }

  receive({ runs, side, frames }) {
    if (this.past.has(runs[0])) return;  // a stream that was left for a newer one
    const pane = this.scope.panes[side];
    if (pane.run !== runs[side]) { this.expect(pane, runs[side], side); if (side === 0) this.scope.comeIntoView(); }
    this.sides = runs.length;
    if (!frames.every(frame => this.take(pane, side, frame))) this.fetchMissing(pane, side);
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
      scope.runEnded(record, side === this.sides - 1);
      return true;
    }
    if (pane.isWaiting) return false;
    return record.t <= pane.store.last || pane.store.push(record);
  }

  async fetchMissing(pane, side) {
    this.hasMissed = true;
    if (this.isFetching) return;
    this.isFetching = true;
    try {
      while (this.hasMissed) {
        this.hasMissed = false;
        const { run } = pane, answer = await this.scope.server.fetch_records({ run, from: pane.isWaiting ? 0 : 1 + pane.store.last });
        if (pane.run !== run) break;
        if (answer.error) { this.scope.note(answer.error); break; }
        for (const line of answer.lines) this.take(pane, side, JSON.parse(line));
        this.scope.root.dataset.fetched = 1 + Number(this.scope.root.dataset.fetched ?? 0);
        this.scope.framesTaken();
      }
    } finally { this.isFetching = false; }
  }

  /* A whole trace from elsewhere: the recorded run, a file. */
  open(run, records) {
    const [pane] = this.scope.panes;
    this.sides = 1; this.expect(pane, run, 0);
    for (const record of records) this.take(pane, 0, record);
    this.scope.traceOpened();
  }
}
