/* The panels that are text: key figures, branches, events, the table of a step. Text goes in by textContent only. */

function make(tag, className, text) { const e = document.createElement(tag); if (className) e.className = className; if (text !== undefined) e.textContent = text; return e; }

function choice(value, text) { const option = make('option', '', text); option.value = value; return option; }

/* A text node that keeps its place: nothing but its words is laid out again. */
function setText(target, text) {
  const node = target.firstChild;
  if (node?.nodeType !== Node.TEXT_NODE || node.nextSibling) { if (target.textContent !== text) target.textContent = text; }
  else if (node.data !== text) node.data = text;
}

/* What is set again to what it is makes work for the browser, and for all that watch the document. */
function put(target, name, value) { if (target[name] !== value) target[name] = value; }

const saved = (ours, theirs) => theirs > 0 ? `${ours <= theirs ? '−' : '+'}${Math.abs(100 * (1 - ours / theirs)).toFixed(0)} %` : '–';

/* The tiles. `mem` is in bytes; the numbers are those of the trace, none is made up here. */
function showFigures(pane) {
  const { store, state, frame } = pane, { start } = store, { mem } = frame, stat = store.stats[state.t - 1], write = (name, text) => setText(pane.output(name), text);
  const entries = state.tabs.reduce((sum, table) => sum + table.length, 0);
  write('step', String(state.t)); write('stepsub', occupied(state).length ? timeOf(frame) : 'the search is over');
  write('used', inEnglish(stat.used)); write('usedof', `of ${inEnglish(start.num_blocks)}`);
  write('usedsub', `${formatBytes(mem.used)} · peak ${inEnglish(stat.peak)}`);
  write('share', stat.used ? `${(entries / stat.used).toFixed(2)}×` : '–');
  write('copies', saved(mem.used, mem.copies)); write('copiessub', `${formatBytes(mem.copies)} with copies`);
  write('reserve', saved(mem.used, mem.contiguous)); write('reservesub', `${formatBytes(mem.contiguous)} reserved`);
  write('cows', inEnglish(stat.cowTotal)); write('cowsnow', `${stat.cow} now`); write('cowssub', `${formatBytes(stat.copiedTotal * start.bytes_per_token)} carried over`);
}

function timeOf({ t, ms }) { return ms === undefined ? 'of a recorded run' : t === 1 ? `${ms.toFixed(0)} ms, prompt included` : `${ms.toFixed(1)} ms for this step`; }

function branchRow(pane) {
  const row = make('li');
  row.append(make('span', 'id'), make('span', 'score'), make('span', 'text'));
  row.lastChild.append(make('bdi', 'same'), make('bdi', 'own'), make('bdi', 'new'));
  row.addEventListener('pointerenter', () => {
    row.title = visibleText(row.wholeText());  // made when it is wanted: it may be long
    pane.setHover(row.dataset.place === undefined ? {} : { place: +row.dataset.place });
  });
  row.addEventListener('pointerleave', () => pane.setHover({}));
  row.addEventListener('click', () => { if (row.dataset.place !== undefined) pane.select(+row.dataset.place, Infinity, true); });
  return row;
}

function showBranches(pane) {
  const { store, state } = pane, list = pane.output('branches'), places = store.bestFirst(state), wanted = places.length + state.finished.length;
  while (list.children.length > wanted) list.lastChild.remove();
  while (list.children.length < wanted) list.append(branchRow(pane));
  const best = places.length ? store.path(state.live[places[0]]) : [];
  places.forEach((place, i) => showLive(pane, list.children[i], place, i, best));
  const bestText = best.length ? store.text(best) : state.finished[0]?.[1] ?? '';
  state.finished.forEach((end, i) => showEnded(list.children[places.length + i], end, i, bestText));
}

/* As much as a row of a wide screen holds: more would be laid out at every step and never seen. */
const TOKENS_SHOWN = 60, CHARACTERS_SHOWN = 140;

/* Where the end of a path that is shown begins. */
function tailOf(store, path) {
  let from = path.length, characters = 0;
  while (from > 0 && path.length - from < TOKENS_SHOWN && characters < CHARACTERS_SHOWN) characters += store.nodes[path[--from]].text.length;
  return from;
}

function showLive(pane, row, place, rank, best) {
  const { store, state } = pane, path = store.path(state.live[place]);
  let shared = 0;
  while (rank > 0 && shared < path.length && path[shared] === best[shared]) shared++;
  put(row, 'className', rank === 0 ? 'best' : ''); put(row.dataset, 'place', String(place)); put(row.dataset, 'testid', `branch-${rank}`);
  setText(row.children[0], `${rank === 0 ? '★' : ''}b${place}`); setText(row.children[1], state.scores[place].toFixed(2));
  put(row.children[1], 'title', 'sum of log-probs'); row.wholeText = () => store.text(path);
  const from = tailOf(store, path), part = (a, b) => visibleText(store.text(path.slice(Math.max(from, a), Math.max(from, b))));
  const last = path.length - 1;
  showParts(row, part(0, Math.min(shared, last)), part(shared, last), visibleText(store.nodes[path[last]].text));
}

function showEnded(row, [, text, score, reason], i, bestText) {
  put(row, 'className', 'ended'); delete row.dataset.place; put(row.dataset, 'testid', `ended-${i}`);
  setText(row.children[0], reason); setText(row.children[1], score.toFixed(2));
  put(row.children[1], 'title', 'score: sum of log-probs ÷ length to the power of the length penalty'); row.wholeText = () => text;
  let shared = 0;
  while (i > 0 && shared < text.length && text[shared] === bestText[shared]) shared++;
  const from = Math.max(0, text.length - CHARACTERS_SHOWN);
  showParts(row, visibleText(text.slice(from, Math.max(from, shared))), visibleText(text.slice(Math.max(from, shared))), '');
}

function showParts(row, ...texts) { texts.forEach((text, i) => setText(row.lastChild.children[i], text)); }

const EVENT_ORDER = ['cow', 'alloc', 'fork', 'finish', 'prune', 'free'], EVENTS_SHOWN = 200;

function describeEvent(store, [kind, a, b, c, d]) {
  switch (kind) {
    case 'cow': return `#${a}→#${b} b${c} ${d} tok`;
    case 'alloc': return `#${a}  b${b}`;
    case 'fork': return `b${a} → b${b}`;
    case 'prune': return `b${a}`;
    case 'free': return `#${a}`;
    default: return `${b} “${tokenLabel(store.nodes[a].text)}”`;
  }
}

function eventRow(pane) {
  const row = make('li');
  row.append(make('b'), make('span'));
  row.addEventListener('pointerenter', () => pane.setHover(row.block === undefined ? {} : { block: row.block }));
  row.addEventListener('pointerleave', () => pane.setHover({}));
  return row;
}

function showEvents(pane) {
  const { store, state, frame } = pane, stat = store.stats[state.t - 1];
  const sorted = [...frame.ev].sort((x, y) => EVENT_ORDER.indexOf(x[0]) - EVENT_ORDER.indexOf(y[0])).slice(0, EVENTS_SHOWN);
  const log = pane.output('log');
  while (log.children.length > sorted.length) log.lastChild.remove();
  while (log.children.length < sorted.length) log.append(eventRow(pane));
  sorted.forEach((event, i) => {
    const row = log.children[i];
    put(row, 'className', event[0]); row.block = { cow: event[2], alloc: event[1], free: event[1] }[event[0]];
    setText(row.firstChild, event[0].padEnd(6)); setText(row.lastChild, ' ' + describeEvent(store, event));
  });
  setText(pane.output('evsum'), EVENT_ORDER.filter(kind => stat[kind]).map(kind => `${stat[kind]} ${kind}`).join(' · ') || 'written in place');
}

/* The same state for those who cannot see the canvases. */
function stepTable(panes) {
  const table = make('table'), head = table.createTHead().insertRow();
  for (const title of ['branch', 'sum of log-probs', 'newest token', 'tokens', 'block table: block (sharers)']) head.append(make('th', '', title));
  const body = table.createTBody();
  for (const pane of panes.filter(p => p.state)) for (const place of pane.store.bestFirst(pane.state)) {
    const { state, store } = pane, row = body.insertRow(), cells = state.tabs[place].map(block => `${block} (${state.ref[block]})`).join(', ');
    for (const text of [`b${place}`, state.scores[place].toFixed(3), tokenLabel(store.nodes[state.live[place]].text), String(state.len[place]), cells]) row.insertCell().textContent = text;
  }
  return table;
}

/* What a cell's colour, its ring and its fill say. */
function showLegend(pane) {
  const swatch = (name, ring, text) => {
    const item = make('span'), square = make('i', ring ? 'ring' : '');
    square.style[ring ? 'borderColor' : 'background'] = pane.palette.get(name); item.append(square, text);
    return item;
  };
  const shares = [[0, 'free'], [1, '1 branch'], [2, '2'], [3, '3–4'], [4, '5–8'], [5, '9+ share it']].filter(([level]) => level <= sharingLevel(pane.store.start?.width ?? 16));
  const scale = pane.colour === 'identity' ? [make('span', '', 'a colour per block')] : shares.map(([level, text]) => swatch('share' + level, false, text));
  pane.output('legend').replaceChildren(...scale, make('span', '', 'in this step:'), swatch('cow', true, 'copied'), swatch('accent', true, 'new'), swatch('free', true, 'freed'));
}

/* Two searches on one clock, in one sentence: their greatest memory up to here, and what they copied. */
function comparisonSentence(panes) {
  const [first, second] = panes.map(({ store, state }) => {
    const { peak, copiedTotal } = store.stats[state.t - 1];
    return { bytes: peak * store.bytesPerBlock, copied: copiedTotal * store.start.bytes_per_token };
  });
  const less = Math.abs(1 - first.bytes / second.bytes), which = first.bytes < second.bytes ? 'less' : 'more';
  const difference = less < .005 ? ', as much' : `: the first ${(100 * less).toFixed(0)} % ${which}`;
  return `Up to this step the first search has held ${formatBytes(first.bytes)} at most, the second ${formatBytes(second.bytes)}${difference}. `
    + `Copied on write: ${formatBytes(first.copied)} against ${formatBytes(second.copied)}.`;
}
