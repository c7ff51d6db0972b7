/* What test_ui_store.py asks of the browser's replay. */

const TINY = { width: 1, num_blocks: 4, block_size: 1, bytes_per_token: 1 };

/* Every step, in an order that jumps about: its tables in tree order, and what is wrong with it. */
function replay([start, records]) {
  const store = new TraceStore(8);
  store.reset(start);
  const refused = records.filter(record => !store.push(record)).length;
  const steps = records.map(record => record.t).sort((a, b) => (a * 7919) % 101 - (b * 7919) % 101);
  const tables = [], breaches = [];
  for (const t of steps) {
    const state = store.at(t), ordered = store.treeOrder(state).map(place => state.tabs[place]);
    tables.push([t, ordered]);
    breaches.push(store.check(state), splitBlock(ordered, t));
    for (const place of occupied(state))
      if (store.path(state.live[place]).some(id => !store.isAlive(store.nodes[id], t))) breaches.push(`a live path is dead at ${t}`);
  }
  const total = store.stats.at(-1);
  return { refused, breaches: breaches.filter(Boolean), tables, cows: total.cowTotal, peak: total.peak };
}

/* In tree order the rows that share a block are neighbours. */
function splitBlock(tables, t) {
  const columns = Math.max(0, ...tables.map(table => table.length));
  for (let j = 0; j < columns; j++) {
    const seen = new Set();
    let last;
    for (const table of tables) {
      if (table[j] !== last && seen.has(table[j])) return `block ${table[j]} is split in tree order at ${t}`;
      seen.add(last = table[j]);
    }
  }
  return null;
}

/* "read", or the sentence that refuses the file; an exception after that is a fault of the check. */
function readFile(text) {
  let records;
  try { [records] = parseTraces(text); } catch (error) { return error.message; }
  const store = new TraceStore();
  store.reset(records[0]);
  for (const record of records.slice(1)) if (record.type === 'step') store.push(record);
  for (let t = 1; t <= store.last; t++) {
    const state = store.at(t);
    store.check(state); store.treeOrder(state); store.bestFirst(state).map(place => store.text(store.path(state.live[place])));
  }
  return 'read';
}

function firstBreach() {
  const store = new TraceStore();
  store.reset(TINY);
  store.push({ t: 1, nodes: [[0, -1, 'a', 0, 0]], live: [0], len: [1], scores: [0], rank: [0], tabs: [[0, 0, [2]]], ref: [[2, 2]], ev: [], mem: { used: 1 } });
  return [store.check(store.at(1)), store.breach];
}

function pushAfterGap() {
  const store = new TraceStore();
  store.reset(TINY);
  return [store.push({ t: 2 }), store.last, store.nodes.length];
}

function spreadLabels(ats) {
  const labels = ats.map(at => ({ at }));
  spread(labels, 26, 12, 194);
  return labels.map(({ label }) => label);
}

/* A clock over one trace that grows; `at(time)` sets the time of day. */
function growingTrace() {
  const store = { start: {}, end: null, last: 0, lastWithBranches: 0 }, clock = new Clock(() => [store], () => {}, () => {});
  const at = now => { performance.now = () => now; };
  const arrive = (now, last) => { at(now); store.last = store.lastWithBranches = last; clock.arrived(); };
  return { store, clock, at, arrive };
}

/* Messages as [time, newest step]: [time, live step, newest step] at theirs and some other times. */
function livePace(messages) {
  const { clock, at, arrive } = growingTrace(), seen = [];
  for (const now of [0, 50, 100, 150, 200, 1000, 1100, 1600, 2100, 9000]) {
    const message = messages.find(([time]) => time === now);
    if (message) arrive(...message); else at(now);
    seen.push([now, clock.liveNow, clock.liveStep]);
  }
  delete performance.now;
  return seen;
}

function liveAfter({ end = null, t = 0 }) {
  const { store, clock, arrive } = growingTrace();
  arrive(0, 10); arrive(1000, 30); Object.assign(store, { end }); clock.t = t;
  const step = clock.liveNow;
  delete performance.now;
  return step;
}
