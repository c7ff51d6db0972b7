/* The one cursor: which step every panel shows, and how it moves. Knows stores, not panels. */

/* Messages may come seldom, each with the steps since the last. Live, they are shown evenly until the next one is due;
   never later than this. */
const LONGEST_LAG_MS = 1200;

class Clock {
  /* `stores()` gives the traces on screen; `onMove(t)` shows a step; `onChange()` shows the buttons. */
  constructor(stores, onMove, onChange) {
    Object.assign(this, { stores, onMove, onChange, t: 0, isLive: true, isPlaying: false, playedAt: 0, speed: 10, paces: new WeakMap() });
  }

  get last() { return Math.max(0, ...this.stores().map(store => store.last)); }
  /* Where "live" stands: at the last step that has branches. The one after it shows only that everything is free. */
  get liveStep() { return Math.max(0, ...this.stores().map(lastShown)); }
  /* Where it stands now: steps that came together are shown one after the other. The cursor never goes back for it. */
  get liveNow() {
    if (!this.isGrowing) return this.liveStep;
    return Math.max(Math.min(this.t, this.liveStep), ...this.stores().map(store => Math.min(lastShown(store), this.paceOf(store))));
  }

  /* New steps are there. */
  arrived() {
    const now = performance.now();
    for (const store of this.stores()) {
      const { start } = store, to = lastShown(store), before = this.paces.get(store);
      if (before?.start !== start) this.paces.set(store, { start, from: to, to, begun: now, gap: 1 });
      else if (before.to !== to) this.paces.set(store, { start, from: this.paceOf(store), to, begun: now, gap: Math.min(LONGEST_LAG_MS, now - before.begun) || 1 });
    }
  }

  /* The step of this trace that is shown live now, where it has not ended. */
  paceOf(store) {
    const pace = this.paces.get(store);
    return pace && !store.end ? Math.floor(pace.from + (pace.to - pace.from) * Math.min(1, (performance.now() - pace.begun) / pace.gap)) : Infinity;
  }

  show(t) {
    if (!this.last) return;
    this.t = Math.max(1, Math.min(this.last, Math.round(t)));
    this.onMove(this.t);
  }
  go(t) { this.isLive = this.isPlaying = false; this.show(t); this.onChange(); }
  step(by) { this.go(this.t + by); }
  goLive() { this.isLive = true; this.isPlaying = false; this.show(this.liveNow); this.onChange(); }
  follow() { if (this.isLive || !this.t) this.show(this.liveNow); }

  toggle() { if (this.isPlaying || this.isFollowing) this.pause(); else this.play(); }
  get isGrowing() { return this.stores().some(store => store.start && !store.end); }
  /* Does it go along with a run that goes on? */
  get isFollowing() { return this.isLive && this.isGrowing; }
  pause() { this.isPlaying = this.isLive = false; this.onChange(); }
  play() {
    if (this.t >= this.liveStep) this.show(1);
    this.isPlaying = true; this.isLive = false; this.playedAt = performance.now(); this.onChange();
  }

  /* Called once a frame while playing. */
  tick(now) {
    const interval = 1000 / this.speed, steps = Math.floor((now - this.playedAt) / interval);
    if (steps <= 0) return;
    this.playedAt += steps * interval;
    const to = Math.min(this.liveStep, this.t + steps);
    if (to >= this.liveStep) { this.isPlaying = false; this.isLive = this.isGrowing; }
    this.show(to); this.onChange();
  }

  nextCow() { const steps = this.cowSteps().filter(t => t > this.t); if (steps.length) this.go(Math.min(...steps)); }
  previousCow() { const steps = this.cowSteps().filter(t => t < this.t); if (steps.length) this.go(Math.max(...steps)); }
  cowSteps() { return this.stores().flatMap(store => store.cowSteps); }
}

function lastShown(store) { return store.lastWithBranches || store.last; }

if (typeof module !== 'undefined') module.exports = { Clock };
