/* The physical block pool: every block as a cell, how many share it, how full it is, what this step did to it. */

class PoolPanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('pool')); this.grid = null; this.empty = null; }

  forgetLook() { this.surface.forgetSize(); this.empty = null; }

  /* The largest square cells that fill the canvas with `count` of them. */
  layout(count) {
    const { width, height } = this.surface;
    if (this.grid?.count === count && this.grid.width === width && this.grid.height === height) return;
    let best = { worth: 0 };
    for (let columns = 1; columns <= count; columns++) {
      const rows = Math.ceil(count / columns), size = Math.min(46, width / columns, height / rows);
      const worth = size * (count % columns ? 1 : count > 512 ? 1.05 : 1.3) * (columns % 4 ? 1 : 1.03);  // whole rows, easy to count
      if (worth > best.worth) best = { worth, size, columns, rows };
    }
    const { size, columns, rows } = best;
    this.grid = { count, width, height, size, columns, gap: size > 12 ? 2 : size > 5 ? 1 : .5, left: (width - columns * size) / 2, top: (height - rows * size) / 2 };
    this.empty = null;
  }

  corner(block) { const { size, columns, left, top } = this.grid; return [left + (block % columns) * size, top + Math.floor(block / columns) * size]; }

  blockAt(x, y) {
    if (!this.grid) return null;
    const { size, columns, left, top, count } = this.grid, column = Math.floor((x - left) / size), row = Math.floor((y - top) / size);
    const block = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < count ? block : null;
  }

  draw() {
    const { state, store, palette } = this.pane;
    this.surface.setHeight(this.pane.blocksHeight);
    const context = this.surface.begin();
    this.layout(store.start.num_blocks);
    const { size, gap } = this.grid, inner = size - gap, radius = size > 9 ? size * .16 : 0;
    this.drawEmpty(context);
    const fills = store.fills(state), byIdentity = this.pane.colour === 'identity';
    context.textAlign = 'center'; context.textBaseline = 'middle';
    const sizeOfText = Math.round(Math.min(12, size * .38)), labels = [];
    for (let block = 0; block < state.ref.length; block++) {
      const sharers = state.ref[block];
      if (!sharers) continue;
      const [x, y] = this.corner(block), X = x + gap / 2, Y = y + gap / 2;
      const share = (fills.get(block) ?? store.start.block_size) / store.start.block_size;
      context.fillStyle = byIdentity ? identityColour(block) : palette.bySharers(sharers);
      if (share < 1) {
        context.globalAlpha = .3; roundRect(context, X, Y, inner, inner, radius); context.fill(); context.globalAlpha = 1;
        context.save(); context.clip(); context.fillRect(X, Y + inner * (1 - share), inner, inner * share); context.restore();
      } else if (radius) { roundRect(context, X, Y, inner, inner, radius); context.fill(); }
      else context.fillRect(X, Y, inner, inner);
      if (size >= 18) labels.push([block, sharers, x + size / 2, y + size / 2, sizeOfText, share > .6]);
    }
    const moving = this.drawEvents(context);
    for (const label of labels) this.label(context, ...label);  // over the arcs: a line through a number reads as another
    this.drawHover(context);
    return moving;
  }

  drawEmpty(context) {
    const { size, gap, count } = this.grid, ratio = devicePixelRatio || 1;
    if (!this.empty) {
      const element = document.createElement('canvas');
      element.width = this.surface.element.width; element.height = this.surface.element.height;
      const c = element.getContext('2d');
      c.scale(ratio, ratio); c.fillStyle = this.pane.palette.get('share0');
      c.beginPath();
      for (let block = 0; block < count; block++) {
        const [x, y] = this.corner(block);
        if (size > 9) c.roundRect(x + gap / 2, y + gap / 2, size - gap, size - gap, size * .16); else c.rect(x + gap / 2, y + gap / 2, size - gap, size - gap);
      }
      c.fill();
      this.empty = element;
    }
    context.drawImage(this.empty, 0, 0, this.surface.width, this.surface.height);
  }

  label(context, block, sharers, x, y, pixels, isFilled) {
    const { palette, colour } = this.pane, big = this.grid.size >= 34;
    context.textAlign = 'center'; context.textBaseline = 'middle';
    context.fillStyle = !isFilled ? palette.get('ink') : colour === 'identity' ? '#0b1018' : palette.inkOn(sharers);
    context.font = palette.font(pixels, 700);
    context.fillText(colour === 'identity' ? block : `×${sharers}`, x, y + (big ? pixels * .35 : .5));
    if (!big) return;
    context.font = palette.font(9); context.globalAlpha = .8;
    context.fillText(colour === 'identity' ? `×${sharers}` : `#${block}`, x, y - pixels * .72);
    context.globalAlpha = 1;
  }

  /* Rings on what this step allocated, copied and freed; a copy's arc runs from its source. True while it moves. */
  drawEvents(context) {
    const { pane } = this, { palette, state } = pane, age = pane.age(700), { size, gap } = this.grid, radius = size * .18;
    const ring = (block, colour, width, alpha) => {
      const [x, y] = this.corner(block);
      context.globalAlpha = alpha; context.strokeStyle = palette.get(colour); context.lineWidth = Math.min(width, size * .3);
      roundRect(context, x + gap / 2, y + gap / 2, size - gap, size - gap, radius); context.stroke(); context.globalAlpha = 1;
    };
    for (const [kind, a, b] of pane.frame.ev) {
      if (kind === 'free' && !state.ref[a]) ring(a, 'free', 1.5, 1 - age * .6);
      else if (kind === 'alloc' && state.ref[a]) ring(a, 'accent', 2, 1 - age * .5);
      else if (kind === 'cow') { ring(b, 'cow', 2.2, 1 - age * .3); this.drawArc(context, a, b, age); }
    }
    return age < 1;
  }

  drawArc(context, source, target, age) {
    const { size } = this.grid, [x0, y0] = this.corner(source), [x1, y1] = this.corner(target), half = size / 2;
    const edge = size * .1, from = [x0 + half, y0 + edge], to = [x1 + half, y1 + edge];
    const control = [(from[0] + to[0]) / 2, Math.max(2, Math.min(from[1], to[1]) - size * .9 - Math.abs(to[0] - from[0]) * .08)];
    const reach = Math.min(1, .15 + age * 2.2), mix = (a, b) => [a[0] + (b[0] - a[0]) * reach, a[1] + (b[1] - a[1]) * reach];
    const bend = mix(from, control), tip = mix(bend, mix(control, to));
    context.strokeStyle = context.fillStyle = this.pane.palette.get('cow'); context.lineWidth = 1.4; context.globalAlpha = 1 - age * .35;
    context.setLineDash([4, 3]); context.beginPath(); context.moveTo(...from); context.quadraticCurveTo(...bend, ...tip); context.stroke(); context.setLineDash([]);
    context.beginPath(); context.arc(...tip, reach < 1 ? 3 : 2, 0, 7); context.fill(); context.globalAlpha = 1;
  }

  drawHover(context) {
    const { pane } = this, { size } = this.grid, block = pane.hover.block ?? pane.selectedBlock;
    if (block === null || block === undefined) return;
    const [x, y] = this.corner(block);
    context.strokeStyle = pane.palette.get('ink'); context.lineWidth = 2; roundRect(context, x + .5, y + .5, size - 1, size - 1, size * .2); context.stroke();
  }
}
