/* KV bytes over the steps: what cowbeam holds beside three other ways to keep the same tokens. */

const CURVES = [
  { key: 'contiguous', colour: 'c-reserve', name: 'contiguous reserve', dash: [6, 4], width: 1.6 },
  { key: 'copies', colour: 'c-copies', name: 'a copy per branch', dash: [], width: 1.8 },
  { key: 'used', colour: 'c-used', name: 'shared blocks, CoW', dash: [], width: 2.8 },
  { key: 'ideal', colour: 'c-ideal', name: 'unique tokens', dash: [2, 3], width: 1.6 },
];

class MemoryPanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('memory'), pane.palette); }

  forgetLook() { this.surface.forgetSize(); }

  /* Frames worth drawing: the last one only says that nothing is left. */
  get frames() { const { store } = this.pane; return store.frames.slice(0, Math.max(1, store.lastWithBranches)); }

  draw() {
    const { pane } = this, context = this.surface.begin(), frames = this.frames, axes = this.axes(frames);
    this.drawAxes(context, axes);
    this.drawSaving(context, frames, axes);
    for (const curve of CURVES) this.drawCurve(context, frames, axes, curve);
    if (pane.budget) this.drawBudget(context, axes, pane.budget);
    this.drawCursor(context, frames, axes);
    return false;
  }

  axes(frames) {
    const { pane } = this, { store } = pane, last = frames.at(-1).mem, highest = Math.max(...frames.map(frame => Math.max(frame.mem.copies, frame.mem.used)));
    const isOff = !pane.logScale && last.contiguous > 1.6 * highest;
    const curves = isOff ? highest : Math.max(highest, last.contiguous), budget = pane.budget ? Math.min(pane.budget, highest * 1.6) : 0;
    const high = Math.max(pane.memoryHigh?.() ?? 0, curves, budget) * (pane.logScale ? 1.2 : 1.1);
    const low = pane.logScale ? Math.max(1, frames[0].mem.ideal * .7) : 0;
    const left = 48, top = 14, width = Math.max(60, this.surface.width - left - 138), height = this.surface.height - top - 20;
    const steps = Math.max(frames.length, store.end ? frames.length : store.start.steps - 1, 2);
    const unit = value => pane.logScale ? (Math.log(Math.max(value, low)) - Math.log(low)) / (Math.log(high) - Math.log(low)) : value / high;
    return { isOff, high, low, left, top, width, height, steps, x: t => left + width * (t - 1) / (steps - 1), y: value => value > high ? 5 : top + height * (1 - unit(value)) };
  }

  drawAxes(context, { high, low, left, top, width, height, steps, x, y }) {
    const { palette, logScale } = this.pane;
    context.font = palette.font(9.5); context.lineWidth = 1; context.strokeStyle = palette.get('line'); context.fillStyle = palette.get('muted');
    context.textAlign = 'right'; context.textBaseline = 'middle';
    for (const value of ticks(low, high, logScale)) {
      context.beginPath(); context.moveTo(left, y(value)); context.lineTo(left + width, y(value)); context.stroke();
      context.fillText(formatBytes(value).replace(/\.0+ | /, ' ').replace('iB', ''), left - 5, y(value));
    }
    context.textAlign = 'center'; context.textBaseline = 'top';
    const every = [1, 2, 5, 10, 20, 50, 100, 200].find(n => steps / n <= 7) ?? 500;
    for (let t = every; t <= steps; t += every) context.fillText(t, x(t), top + height + 6);
  }

  drawSaving(context, frames, { x, y }) {
    context.beginPath();
    frames.forEach((frame, i) => context.lineTo(x(i + 1), y(frame.mem.copies)));
    for (let i = frames.length - 1; i >= 0; i--) context.lineTo(x(i + 1), y(frames[i].mem.used));
    context.closePath(); context.globalAlpha = .1; context.fillStyle = this.pane.palette.get('c-copies'); context.fill(); context.globalAlpha = 1;
  }

  drawCurve(context, frames, { x, y }, { key, colour, dash, width }) {
    context.strokeStyle = this.pane.palette.get(colour); context.lineWidth = width; context.lineJoin = 'round'; context.setLineDash(dash);
    context.beginPath(); frames.forEach((frame, i) => context.lineTo(x(i + 1), y(frame.mem[key]))); context.stroke(); context.setLineDash([]);
  }

  drawBudget(context, { left, width, y }, budget) {
    const { palette } = this.pane;
    context.strokeStyle = palette.get('bad'); context.lineWidth = 1.5; context.setLineDash([8, 3, 2, 3]);
    context.beginPath(); context.moveTo(left, y(budget)); context.lineTo(left + width, y(budget)); context.stroke(); context.setLineDash([]);
    context.fillStyle = palette.get('bad'); context.textAlign = 'left'; context.textBaseline = 'bottom'; context.font = palette.font(10, 700);
    context.fillText(`pool ${formatBytes(budget)}`, left + 4, y(budget) - 2);
  }

  drawCursor(context, frames, axes) {
    const { palette, state } = this.pane, { left, top, width, height, isOff, x, y } = axes, t = Math.min(state.t, frames.length), mem = frames[t - 1].mem;
    context.strokeStyle = palette.get('ink'); context.globalAlpha = .5; context.lineWidth = 1;
    context.beginPath(); context.moveTo(x(t), top - 6); context.lineTo(x(t), top + height); context.stroke(); context.globalAlpha = 1;
    const labels = CURVES.map(curve => ({ ...curve, value: mem[curve.key], at: y(mem[curve.key]) })).sort((a, b) => a.at - b.at || b.value - a.value);
    for (const { colour, at } of labels) { context.fillStyle = palette.get(colour); context.beginPath(); context.arc(x(t), at, 3.2, 0, 7); context.fill(); }
    spread(labels, 26, 12, this.surface.height - 12);
    context.textAlign = 'left'; context.textBaseline = 'middle';
    for (const { colour, name, key, value, label } of labels) {
      context.font = palette.font(10.5, 700); context.fillStyle = palette.get(colour); context.fillText(formatBytes(value), left + width + 10, label - 6);
      context.font = palette.font(9.5); context.fillStyle = palette.get('muted');
      context.fillText(key === 'contiguous' && isOff ? '↑ reserve, off scale' : name, left + width + 10, label + 6);
    }
  }
}

/* Labels at least `gap` apart within [low, high], as near to their points as that allows. */
function spread(labels, gap, low, high) {
  let least = low;
  for (const item of labels) { item.label = Math.max(item.at, least); least = item.label + gap; }
  let most = high;
  for (const item of [...labels].reverse()) { item.label = Math.min(item.label, most); most = item.label - gap; }
}

function ticks(low, high, isLog) {
  const values = [];
  if (isLog) { for (let value = 2 ** Math.ceil(Math.log2(low)); value <= high; value *= 2) values.push(value); return values.filter((_, i) => i % Math.ceil(values.length / 6) === 0); }
  const step = [1, 2, 5].flatMap(n => [10, 13, 17, 20, 23, 27, 30, 33].map(power => n * 2 ** power)).sort((a, b) => a - b).find(size => high / size <= 6) ?? high;
  for (let value = 0; value < high; value += step) values.push(value);
  return values;
}

if (typeof module !== 'undefined') module.exports = { spread, ticks };
