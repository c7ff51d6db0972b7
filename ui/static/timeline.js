/* The strip under the cursor: copies up, prunes down, one bar a step. A transparent slider lies on it. */

class TimelinePanel {
  constructor(canvas, palette, clock, stores) { Object.assign(this, { palette, clock, stores, surface: new Surface(canvas, palette) }); }

  forgetLook() { this.surface.forgetSize(); }

  draw() {
    const context = this.surface.begin(), { palette, clock } = this, { width, height } = this.surface, last = Math.max(2, clock.last);
    const x = t => 4 + (width - 8) * (t - 1) / (last - 1), middle = Math.round(height * .55), stores = this.stores().filter(store => store.last);
    context.fillStyle = palette.get('faint'); roundRect(context, 0, 0, width, height, 5); context.fill();
    const bar = Math.max(1, Math.min(7, (width - 8) / last - 1.2)), share = bar / stores.length;
    const most = { cow: 1, prune: 1 };
    for (const store of stores) for (const stat of store.stats) { most.cow = Math.max(most.cow, stat.cow); most.prune = Math.max(most.prune, stat.prune); }
    stores.forEach((store, side) => {
      for (const past of [true, false]) for (const [kind, colour, up] of [['cow', side ? 'fork' : 'cow', true], ['prune', 'dead', false]]) {
        context.fillStyle = palette.get(colour); context.globalAlpha = past ? .95 : .38;
        store.stats.forEach((stat, i) => {
          if ((i + 1 <= clock.t) !== past || !stat[kind]) return;
          const tall = 3 + (up ? middle - 6 : height - middle - 6) * stat[kind] / most[kind];
          context.fillRect(x(i + 1) - bar / 2 + side * share, up ? middle - tall : middle + 2, Math.max(1, share), tall);
        });
      }
    });
    context.globalAlpha = 1; context.fillStyle = palette.get('line'); context.fillRect(4, middle, width - 8, 1.5);
    context.fillStyle = palette.get('accent'); context.fillRect(4, middle, Math.max(0, x(clock.t) - 4), 1.5);
    context.fillStyle = palette.get('ink'); roundRect(context, x(clock.t) - 1.5, 1, 3, height - 2, 1.5); context.fill();
    return false;
  }
}
