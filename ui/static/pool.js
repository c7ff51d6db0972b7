/* The physical block pool: every block as a cell, how many share it, how full it is, what this step did to it. */

class PoolPanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('pool'), pane.palette); this.grid = null; this.empty = null; }

  forgetLook() { this.surface.forgetSize(); this.empty = null; }

  /* The largest cells that fill the canvas with `count` of them: square, or wider where a number needs the room. */
  layout(count) {
    const { width, height } = this.surface;
    if (this.grid?.count === count && this.grid.width === width && this.grid.height === height) return;
    let best = { worth: 0 };
    for (let columns = 1; columns <= count; columns++) {
      const rows = Math.ceil(count / columns), tall = Math.min(40, height / rows, width / columns), wide = Math.min(1.7 * tall, width / columns);
      const worth = Math.sqrt(wide * tall) * (count % columns ? 1 : count > 512 ? 1.05 : 1.3) * (columns % 4 ? 1 : 1.03);  // whole rows, easy to count
      if (worth > best.worth) best = { worth, wide, tall, columns, rows };
    }
    const { wide, tall, columns, rows } = best;
    this.grid = { count, width, height, wide, tall, columns, gap: tall > 12 ? 2 : tall > 5 ? 1 : .5, left: (width - columns * wide) / 2, top: (height - rows * tall) / 2 };
    this.empty = null;
  }

  corner(block) { const { wide, tall, columns, left, top } = this.grid; return [left + (block % columns) * wide, top + Math.floor(block / columns) * tall]; }

  /* The visible part of a cell. */
  inner(block) { const { wide, tall, gap } = this.grid, [x, y] = this.corner(block); return [x + gap / 2, y + gap / 2, wide - gap, tall - gap]; }

  blockAt(x, y) {
    if (!this.grid) return null;
    const { wide, tall, columns, left, top, count } = this.grid, column = Math.floor((x - left) / wide), row = Math.floor((y - top) / tall);
    const block = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < count ? block : null;
  }

  draw() {
    const { state, store, palette } = this.pane;
    this.surface.setHeight(this.pane.blocksHeight);
    const context = this.surface.begin();
    this.layout(store.start.num_blocks);
    const { tall } = this.grid, radius = tall > 9 ? tall * .16 : 0, byIdentity = this.pane.colour === 'identity', fills = store.fills(state), labels = [];
    this.drawEmpty(context);
    for (let block = 0; block < state.ref.length; block++) {
      const sharers = state.ref[block];
      if (!sharers) continue;
      const box = this.inner(block), share = (fills.get(block) ?? store.start.block_size) / store.start.block_size;
      context.fillStyle = byIdentity ? identityColour(block) : palette.bySharers(sharers);
      if (share < 1 || radius) fillBox(context, box, radius, share, true); else context.fillRect(...box);
      if (tall >= 15) labels.push([block, sharers, share]);
    }
    const moving = this.drawEvents(context);
    this.drawLabels(context, labels);  // over the arcs: a line through a number reads as another
    this.drawHover(context);
    return moving;
  }

  drawEmpty(context) {
    const { tall, count } = this.grid, ratio = devicePixelRatio || 1;
    if (!this.empty) {
      const element = document.createElement('canvas');
      element.width = this.surface.element.width; element.height = this.surface.element.height;
      const c = element.getContext('2d');
      c.scale(ratio, ratio); c.fillStyle = this.pane.palette.get('share0');
      c.beginPath();
      for (let block = 0; block < count; block++) {
        if (tall > 9) c.roundRect(...this.inner(block), tall * .16); else c.rect(...this.inner(block));
      }
      c.fill();
      this.empty = element;
    }
    context.drawImage(this.empty, 0, 0, this.surface.width, this.surface.height);
  }

  /* How many share it and, where there is room, which block it is. Ink by what is behind it: written slots or empty
     ones. One font after the other: a font costs more to set than to use. */
  drawLabels(context, labels) {
    const { palette, colour } = this.pane, { wide, tall } = this.grid, isBig = tall >= 21 && wide >= 27;
    const pixels = Math.round(2 * Math.min(11.5, tall * (isBig ? .42 : .5), wide * .4)) / 2, ink = palette.get('ink');
    const write = (at, size, weight, text) => {
      context.font = palette.font(size, weight);
      for (const [block, sharers, share] of labels) {
        const [x, y] = this.corner(block), written = colour === 'identity' ? '#0b1018' : palette.inkOn(sharers);
        context.fillStyle = share > 1 - at ? written : ink; context.fillText(text(block, sharers), x + wide / 2, y + tall * at + .5);
      }
    };
    if (!labels.length) return;
    context.textAlign = 'center'; context.textBaseline = 'middle';
    if (isBig) write(.27, Math.min(9, wide * .3), 400, block => `#${block}`);
    write(isBig ? .67 : .5, pixels, 700, (_, sharers) => `×${sharers}`);
  }

  /* Rings on what this step allocated, copied and freed; a copy's arc runs from its source. True while it moves. */
  drawEvents(context) {
    const { pane } = this, { palette, state } = pane, age = pane.age(700), { tall } = this.grid;
    const ring = (block, colour, width, alpha) => {
      context.globalAlpha = alpha; strokeBox(context, this.inner(block), tall * .18, palette.get(colour), Math.min(width, tall * .3)); context.globalAlpha = 1;
    };
    for (const [kind, a, b] of pane.frame.ev) {
      if (kind === 'free' && !state.ref[a]) ring(a, 'free', 1.5, 1 - age * .6);
      else if (kind === 'alloc' && state.ref[a]) ring(a, 'accent', 2, 1 - age * .5);
      else if (kind === 'cow') { ring(b, 'cow', 2.2, 1 - age * .3); this.drawArc(context, a, b, age); }
    }
    return age < 1;
  }

  /* From edge to edge, over the cells or, where there is no room above them, under. */
  drawArc(context, source, target, age) {
    const { wide, tall } = this.grid, [x0, y0] = this.corner(source), [x1, y1] = this.corner(target), rise = tall * .8 + Math.abs(x1 - x0) * .08;
    const isOver = Math.min(y0, y1) - rise > 0, edge = isOver ? tall * .1 : tall * .9, from = [x0 + wide / 2, y0 + edge], to = [x1 + wide / 2, y1 + edge];
    const control = [(from[0] + to[0]) / 2, isOver ? Math.min(from[1], to[1]) - rise : Math.max(from[1], to[1]) + rise];
    const reach = Math.min(1, .15 + age * 2.2), mix = (a, b) => [a[0] + (b[0] - a[0]) * reach, a[1] + (b[1] - a[1]) * reach];
    const bend = mix(from, control), tip = mix(bend, mix(control, to));
    context.strokeStyle = context.fillStyle = this.pane.palette.get('cow'); context.lineWidth = 1.4; context.globalAlpha = 1 - age * .35;
    context.setLineDash([4, 3]); context.beginPath(); context.moveTo(...from); context.quadraticCurveTo(...bend, ...tip); context.stroke(); context.setLineDash([]);
    context.beginPath(); context.arc(...tip, reach < 1 ? 3 : 2, 0, 7); context.fill(); context.globalAlpha = 1;
  }

  drawHover(context) {
    const { pane } = this, { wide, tall } = this.grid, block = pane.hover.block ?? pane.selectedBlock;
    if (block === null || block === undefined) return;
    const [x, y] = this.corner(block);
    strokeBox(context, [x + .5, y + .5, wide - 1, tall - 1], tall * .2, pane.palette.get('ink'), 2);
  }
}
