/* The one cursor: which step every panel shows, and how it moves. Knows stores, not panels. */

class Clock {
  /* `stores()` gives the traces on screen; `onMove(t)` shows a step; `onChange()` shows the buttons. */
  constructor(stores, onMove, onChange) {
    Object.assign(this, { stores, onMove, onChange, t: 0, isLive: true, isPlaying: false, playedAt: 0, speed: 10 });
  }

  get last() { return Math.max(0, ...this.stores().map(store => store.last)); }
  /* Where "live" stands: at the last step that has branches. The one after it shows only that everything is free. */
  get liveStep() { return Math.max(0, ...this.stores().map(store => store.lastWithBranches || store.last)); }

  show(t) {
    if (!this.last) return;
    this.t = Math.max(1, Math.min(this.last, Math.round(t)));
    this.onMove(this.t);
  }
  go(t) { this.isLive = this.isPlaying = false; this.show(t); this.onChange(); }
  step(by) { this.go(this.t + by); }
  goLive() { this.isLive = true; this.isPlaying = false; this.show(this.liveStep); this.onChange(); }
  follow() { if (this.isLive || !this.t) this.show(this.liveStep); }

  toggle() { if (this.isPlaying || this.isLive && this.isGrowing) this.pause(); else this.play(); }
  get isGrowing() { return this.stores().some(store => store.start && !store.end); }
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

if (typeof module !== 'undefined') module.exports = { Clock };
