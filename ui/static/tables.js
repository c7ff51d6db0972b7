/* Block tables: a row a branch, a column a logical block. Neighbours that hold the same block are one shape. */

const TABLE_LEFT = 38, TABLE_TOP = 15, MIN_COLUMN = 25, FOLD_WIDTH = 92;

class TablesPanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('tables'), pane.palette); this.shapes = []; this.rows = []; }

  forgetLook() { this.surface.forgetSize(); }

  order() {
    const { store, state, rowOrder } = this.pane;
    return rowOrder === 'tree' ? store.treeOrder(state) : rowOrder === 'rank' ? store.bestFirst(state) : occupied(state);
  }

  /* Leading columns that every row shares fold into one where the width does not show all columns. */
  fold(rows, columns, width) {
    const { tabs } = this.pane.state;
    if (columns * MIN_COLUMN <= width || rows.length === 0) return 0;
    let shared = 0;
    while (shared < columns && rows.every(place => tabs[place][shared] !== undefined && tabs[place][shared] === tabs[rows[0]][shared])) shared++;
    return shared > 2 ? shared : 0;
  }

  draw() {
    const { pane } = this, { store, state, palette } = pane;
    const rows = this.rows = this.order();
    this.surface.setHeight(pane.blocksHeight);
    const context = this.surface.begin();
    this.shapes = [];
    if (!rows.length) return this.drawNothing(context);
    const columns = Math.max(4, ...rows.map(place => state.tabs[place].length)), width = this.surface.width - TABLE_LEFT;
    const folded = this.fold(rows, columns, width), left = TABLE_LEFT + (folded ? FOLD_WIDTH : 0);
    const column = Math.min(66, (this.surface.width - left) / Math.max(1, columns - folded));
    this.geometry = { left, folded, column, row: Math.min(28, (this.surface.height - TABLE_TOP) / rows.length) };
    this.drawLabels(context, columns);
    const fills = store.fills(state), age = pane.age(700);
    for (let j = folded; j < columns; j++) for (let first = 0; first < rows.length;) {
      const block = state.tabs[rows[first]][j];
      let end = first + 1;
      if (block !== undefined) {
        while (end < rows.length && state.tabs[rows[end]][j] === block) end++;
        this.shapes.push(this.shape(block, first, end, j, fills));
      }
      first = end;
    }
    this.fillShapes(context);
    this.ringShapes(context, age);
    this.numberShapes(context);
    if (folded) this.drawFold(context, folded);
    if (pane.wrongEntry) this.drawWrong(context);
    return age < 1;
  }

  drawNothing(context) {
    context.fillStyle = this.pane.palette.get('muted'); context.font = this.pane.palette.font(12); context.textAlign = 'center'; context.textBaseline = 'middle';
    context.fillText('the search is over: no branch, no table, every block is free', this.surface.width / 2, this.surface.height / 2);
    return false;
  }

  drawLabels(context, columns) {
    const { pane } = this, { palette, state } = pane, { left, folded, column, row } = this.geometry;
    context.textBaseline = 'middle'; context.textAlign = 'center'; context.font = palette.font(9.5); context.fillStyle = palette.get('muted');
    const every = Math.ceil(24 / column);
    for (let j = folded; j < columns; j += every) context.fillText(j, left + (j - folded) * column + column / 2, 6);
    context.textAlign = 'right'; context.font = palette.font(Math.min(11, row * .66), 700);
    const best = pane.store.best(state);
    this.rows.forEach((place, i) => {
      const isBest = place === best, isWrong = pane.wrongPlaces?.has(place);
      context.fillStyle = palette.get(isWrong ? 'bad' : place === pane.hover.place ? 'accent' : isBest ? 'gold' : 'muted');
      context.fillText(`${isBest ? '★' : isWrong ? '≠' : ''}b${place}`, TABLE_LEFT - 6, TABLE_TOP + i * row + row / 2);
    });
  }

  drawFold(context, folded) {
    const { pane, rows } = this, { palette, state } = pane, { row } = this.geometry, height = rows.length * row - 2, middle = TABLE_TOP + 1 + height / 2;
    const width = FOLD_WIDTH - 6, table = state.tabs[rows[0]];
    context.fillStyle = palette.bySharers(rows.length);
    for (const inset of [4, 2, 0]) { context.globalAlpha = inset ? .35 : 1; roundRect(context, TABLE_LEFT + inset, TABLE_TOP + 1, width - inset, height, 4); context.fill(); }
    context.globalAlpha = 1; context.fillStyle = palette.inkOn(rows.length); context.textAlign = 'center'; context.textBaseline = 'middle';
    const lines = [[`0–${folded - 1}`, 700, 12], [plural(folded, 'block'), 400, 9.5], [rows.length > 1 ? 'shared by all' : 'of one branch', 400, 9.5]];
    const isTall = height > 40;
    lines.slice(0, isTall ? 3 : 1).forEach(([text, weight, size], i) => {
      context.font = palette.font(size, weight); context.fillText(text, TABLE_LEFT + width / 2, isTall ? middle + (i - 1) * 14 : middle);
    });
    this.shapes.push({ x: TABLE_LEFT, y: TABLE_TOP, width, height, first: 0, end: rows.length, from: 0, columns: folded, block: table[0] });
  }

  shape(block, first, end, j, fills) {
    const { store, state } = this.pane, { left, folded, column, row } = this.geometry, gap = row > 9 ? 2 : 1, size = store.start.block_size;
    const isLast = state.tabs[this.rows[first]].length - 1 === j, share = isLast ? (fills.get(block) ?? size) / size : 1;
    return { block, first, end, from: j, columns: 1, share, sharers: state.ref[block],
             x: left + (j - folded) * column + gap / 2, y: TABLE_TOP + first * row + gap / 2, width: column - gap, height: (end - first) * row - gap };
  }

  /* All of one colour at once: a colour or a font costs more to set than to use, and there may be a thousand shapes. */
  fillShapes(context) {
    const { palette, colour } = this.pane, paint = shape => colour === 'identity' ? identityColour(shape.block) : palette.bySharers(shape.sharers);
    for (const [fill, shapes] of Map.groupBy(this.shapes, paint)) {
      context.fillStyle = fill; context.beginPath();
      for (const { x, y, width, height, share } of shapes) if (share >= 1) context.roundRect(x, y, width, height, Math.min(4, width / 2, height / 2));
      context.fill();
      for (const { x, y, width, height, share } of shapes) if (share < 1) fillBox(context, [x, y, width, height], 4, share, false);
    }
  }

  ringShapes(context, age) {
    const { pane } = this, { palette } = pane, copied = new Set(pane.frame.ev.filter(event => event[0] === 'cow').map(event => event[2]));
    const pointed = pane.hover.block ?? pane.selectedBlock, ring = ({ x, y, width, height }, colour, line) => strokeBox(context, [x, y, width, height], 4, palette.get(colour), line);
    context.globalAlpha = 1 - age * .25;
    for (const shape of this.shapes) if (copied.has(shape.block)) ring(shape, 'cow', 2.2);
    context.globalAlpha = 1;
    for (const shape of this.shapes) if (shape.block === pointed) ring(shape, 'ink', 2);
  }

  numberShapes(context) {
    const { palette, colour } = this.pane, sizeOf = ({ height }) => Math.round(Math.min(11, Math.max(8.5, height * .62)));
    const ink = ({ share, sharers }) => share <= .6 ? palette.get('ink') : colour === 'identity' ? '#0b1018' : palette.inkOn(sharers);
    context.textAlign = 'center'; context.textBaseline = 'middle';
    for (const [pixels, shapes] of Map.groupBy(this.shapes.filter(shape => shape.width >= 15 && shape.height >= 9), sizeOf)) {
      context.font = palette.font(pixels, 700);
      for (const shape of shapes) {
        if (textWidth(context, String(shape.block), pixels) >= shape.width - 2) continue;
        context.fillStyle = ink(shape); context.fillText(shape.block, shape.x + shape.width / 2, shape.y + shape.height / 2 + .5);
      }
    }
  }

  /* The entry that the what-if lesson changed, in every row that reads it: the wrong block instead of its own. */
  drawWrong(context) {
    const { column: j, block } = this.pane.wrongEntry, { left, folded, column, row } = this.geometry, { palette } = this.pane;
    if (j < folded) return;
    context.font = palette.font(Math.min(11, row * .6), 700); context.textAlign = 'center'; context.textBaseline = 'middle';
    this.rows.forEach((place, i) => {
      if (!this.pane.wrongPlaces.has(place)) return;
      const box = [left + (j - folded) * column + 2, TABLE_TOP + i * row + 1, column - 4, row - 2];
      context.fillStyle = palette.get('panel'); fillBox(context, box, 3, 1, false); strokeBox(context, box, 3, palette.get('bad'), 1.5);
      context.fillStyle = palette.get('bad'); context.fillText(`≠${block}`, box[0] + box[2] / 2, box[1] + box[3] / 2 + .5, box[2] - 2);
    });
  }

  /* The token under the pointer: {block, place, position}, or null. */
  at(x, y) {
    const shape = this.shapes.find(s => x >= s.x && x <= s.x + s.width && y >= s.y && y <= s.y + s.height);
    if (!shape) return null;
    const { state, store } = this.pane, size = store.start.block_size, row = Math.floor((y - TABLE_TOP) / this.geometry.row);
    const place = this.rows[Math.max(shape.first, Math.min(shape.end - 1, row))];
    const tokens = shape.columns * size, offset = Math.min(tokens - 1, Math.floor((x - shape.x) / shape.width * tokens));
    const position = Math.min(state.len[place] - 1, shape.from * size + offset);
    return { block: state.tabs[place][Math.floor(position / size)], place, position };
  }
}
