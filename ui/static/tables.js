/* Block tables: a row a branch, a column a logical block. Neighbours that hold the same block are one shape. */

const TABLE_LEFT = 38, TABLE_TOP = 15, MIN_COLUMN = 25, FOLD_WIDTH = 92;

class TablesPanel {
  constructor(pane) { this.pane = pane; this.surface = new Surface(pane.canvas('tables')); this.shapes = []; this.rows = []; }

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
    const fills = store.fills(state), copied = new Set(pane.frame.ev.filter(event => event[0] === 'cow').map(event => event[2]));
    const age = pane.age(700);
    if (folded) this.drawFold(context, folded);
    for (let j = folded; j < columns; j++) for (let first = 0; first < rows.length;) {
      const block = state.tabs[rows[first]][j];
      let end = first + 1;
      if (block !== undefined) {
        while (end < rows.length && state.tabs[rows[end]][j] === block) end++;
        this.drawShape(context, { block, first, end, j, fills, isCopied: copied.has(block), age });
      }
      first = end;
    }
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

  drawShape(context, { block, first, end, j, fills, isCopied, age }) {
    const { pane, rows } = this, { store, state, palette } = pane, { left, folded, column, row } = this.geometry, gap = row > 9 ? 2 : 1;
    const x = left + (j - folded) * column + gap / 2, y = TABLE_TOP + first * row + gap / 2, width = column - gap, height = (end - first) * row - gap;
    const isLast = state.tabs[rows[first]].length - 1 === j, size = store.start.block_size;
    const share = isLast ? (fills.get(block) ?? size) / size : 1, sharers = state.ref[block];
    this.shapes.push({ x, y, width, height, first, end, from: j, columns: 1, block });
    context.fillStyle = pane.colour === 'identity' ? identityColour(block) : palette.bySharers(sharers);
    const box = [x, y, width, height];
    fillBox(context, box, 4, share, false);
    if (isCopied) { context.globalAlpha = 1 - age * .25; strokeBox(context, box, 4, palette.get('cow'), 2.2); context.globalAlpha = 1; }
    if (block === (pane.hover.block ?? pane.selectedBlock)) strokeBox(context, box, 4, palette.get('ink'), 2);
    if (width < 15 || height < 9) return;
    const pixels = Math.round(Math.min(11, Math.max(8.5, height * .62)));
    context.font = palette.font(pixels, 700); context.textAlign = 'center'; context.textBaseline = 'middle';
    context.fillStyle = share <= .6 ? palette.get('ink') : pane.colour === 'identity' ? '#0b1018' : palette.inkOn(sharers);
    if (textWidth(context, String(block), pixels) < width - 2) context.fillText(block, x + width / 2, y + height / 2 + .5);
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
