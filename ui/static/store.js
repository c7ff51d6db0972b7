/* A trace and its replay. Pure: no DOM; runs in the browser and in node.
   Records are those of decoder/trace.py. Steps count from 1; `frames[t - 1]` is the record of step t. */

class TraceStore {
  constructor(every = 16) { this.every = every; this.reset(null); }

  reset(start) {
    this.start = start; this.end = null; this.frames = []; this.nodes = []; this.stats = []; this.cowSteps = [];
    this.keyframes = []; this.lives = new Map(); this.finishedNodes = new Set(); this.lastWithBranches = 0;
    this.breach = null;
    if (!start) return;
    const empty = () => new Array(start.width).fill(null);
    this.tail = { t: 0, ref: new Uint16Array(start.num_blocks), tabs: empty().map(() => []), live: empty(), len: empty().fill(0),
                  scores: empty(), rank: empty(), finished: [] };
  }

  get last() { return this.frames.length; }

  /* The next step's record. False, changing nothing, where a step is missing before it: fetch that one first. */
  push(frame) {
    if (!this.start || frame.t !== this.last + 1) return false;
    const before = this.tail.live.filter(node => node !== null);
    applyFrame(this.tail, frame);
    this.breach ??= this.check(this.tail);  // of every step, whether it is ever shown or not
    this.frames.push(frame);
    if (frame.live.some(node => node !== null)) this.lastWithBranches = frame.t;
    if ((frame.t - 1) % this.every === 0) this.keyframes.push(cloneState(this.tail));
    this.growTree(frame, before);
    this.followBlocks(frame);
    this.countEvents(frame);
    return true;
  }

  /* A node lives from its step until nothing that is live or returned descends from it: it counts what does. */
  growTree(frame, before) {
    for (const [id, parent, text, logprob, cumulative] of frame.nodes) {
      this.nodes[id] = { id, parent, text, logprob, cumulative, t: frame.t, dead: Infinity, holders: 0, finish: null };
      if (parent >= 0) this.nodes[parent].holders++;
    }
    for (const event of frame.ev) if (event[0] === 'finish') this.nodes[event[1]].finish = event[2];
    const live = new Set(frame.live);
    for (const node of before) if (!live.has(node)) this.release(node, frame.t);
    if (frame.finished) {
      const now = new Set(frame.finished.map(entry => entry[4]));
      for (const node of this.finishedNodes) if (!now.has(node)) this.release(node, frame.t);
      this.finishedNodes = now;
    }
  }

  release(id, t) {
    for (let node = this.nodes[id]; node && node.holders === 0 && node.dead === Infinity; node = this.nodes[node.parent]) {
      node.dead = t;
      if (node.parent >= 0) this.nodes[node.parent].holders--;
    }
  }

  followBlocks(frame) {
    for (const [kind, a, b, c, d] of frame.ev) {
      if (kind === 'alloc') this.bear(a, { born: frame.t, how: 'alloc', source: null, place: b, copied: 0 });
      else if (kind === 'cow') this.bear(b, { born: frame.t, how: 'cow', source: a, place: c, copied: d });
      else if (kind === 'free') { const life = this.lives.get(a)?.at(-1); if (life) life.freed = frame.t; }
    }
    for (const [block, sharers] of frame.ref) this.lives.get(block)?.at(-1).counts.push([frame.t, sharers]);
  }

  bear(block, life) {
    if (!this.lives.has(block)) this.lives.set(block, []);
    this.lives.get(block).push({ ...life, freed: Infinity, counts: [] });
  }

  countEvents(frame) {
    const before = this.stats.at(-1), count = { cow: 0, prune: 0, alloc: 0, free: 0, fork: 0, finish: 0, copied: 0 };
    for (const event of frame.ev) { count[event[0]]++; if (event[0] === 'cow') count.copied += event[4]; }
    const used = frame.mem.used / this.bytesPerBlock;
    this.stats.push({ ...count, used, cowTotal: (before?.cowTotal ?? 0) + count.cow, copiedTotal: (before?.copiedTotal ?? 0) + count.copied,
                      peak: Math.max(before?.peak ?? 0, used) });
    if (count.cow) this.cowSteps.push(frame.t);
  }

  get bytesPerBlock() { return this.start.block_size * this.start.bytes_per_token; }

  /* The state after step t, as a copy: it stays what it is while the trace grows. */
  at(t) {
    if (t === this.last) return cloneState(this.tail);
    const state = cloneState(this.keyframes[Math.floor((t - 1) / this.every)]);
    while (state.t < t) applyFrame(state, this.frames[state.t]);
    return state;
  }

  /* What the picture must obey: a block's sharers are the table entries that hold it. The first breach, or null. */
  check(state) {
    const entries = new Uint16Array(state.ref.length);
    for (const table of state.tabs) for (const block of table) entries[block]++;
    for (let block = 0; block < entries.length; block++)
      if (entries[block] !== state.ref[block]) return `block ${block}: ${state.ref[block]} sharers but ${entries[block]} table entries at step ${state.t}`;
    return null;
  }

  isAlive(node, t) { return node.t <= t && t < node.dead; }

  /* Node ids from the first generated token to `leaf`. */
  path(leaf) { const path = []; for (let n = leaf; n !== null && n >= 0; n = this.nodes[n].parent) path.push(n); return path.reverse(); }

  text(path) { let text = ''; for (const n of path) text += this.nodes[n].text; return text; }

  /* The node at generated position `index` (from 0) of the branch that ends in `leaf`. All live leaves are equally deep. */
  nodeAt(leaf, index) { let n = leaf; for (let depth = this.nodes[leaf].t - 1; depth > index; depth--) n = this.nodes[n].parent; return n; }

  /* Places that hold a branch, so that those which share a block are neighbours (depth-first by the tree). */
  treeOrder(state) {
    const places = occupied(state);
    if (places.length < 2) return places;
    const fork = this.commonAncestor(state), keys = new Map();
    for (const place of places) { const key = []; for (let n = state.live[place]; n !== fork && n >= 0; n = this.nodes[n].parent) key.push(n); keys.set(place, key.reverse()); }
    return places.sort((a, b) => { const A = keys.get(a), B = keys.get(b); for (let i = 0; i < A.length && i < B.length; i++) if (A[i] !== B[i]) return A[i] - B[i]; return a - b; });
  }

  /* The last token that all live branches agree on; -1 if not even the first. */
  commonAncestor(state) {
    let level = new Set(occupied(state).map(place => state.live[place]));
    while (level.size > 1) level = new Set([...level].map(n => n < 0 ? -1 : this.nodes[n].parent));
    return level.size ? [...level][0] : -1;
  }

  /* Places in the decoder's order: beams best first, samples by index. */
  byRank(state) { return occupied(state).sort((a, b) => state.rank[a] - state.rank[b]); }

  /* Places, likeliest first: for beams the same. All live branches are equally long. */
  bestFirst(state) { return occupied(state).sort((a, b) => state.scores[b] - state.scores[a] || state.rank[a] - state.rank[b]); }

  best(state) { return this.bestFirst(state)[0]; }

  /* Tokens in each live block that is not full, by block. */
  fills(state) {
    const size = this.start.block_size, fills = new Map();
    for (const place of occupied(state)) {
      const table = state.tabs[place], block = table.at(-1), filled = state.len[place] - (table.length - 1) * size;
      if (filled < size) fills.set(block, Math.max(fills.get(block) ?? 0, filled));
    }
    return fills;
  }

  /* The text of the token at `position` of the branch at `place`, prompt included. */
  tokenAt(state, place, position) {
    const prompt = this.start.prompt_len;
    if (position < prompt) return this.start.prompt_tokens?.[position] ?? '';
    return this.nodes[this.nodeAt(state.live[place], position - prompt)].text;
  }

  /* The life of `block` that step t falls into, or null where it was free. */
  lifeAt(block, t) { return this.lives.get(block)?.findLast(life => life.born <= t && t < life.freed) ?? null; }

  /* Where a block is found in the tables: {place, column}, or null. */
  whereIs(state, block) {
    for (const place of occupied(state)) { const column = state.tabs[place].indexOf(block); if (column >= 0) return { place, column }; }
    return null;
  }

  records() { return [{ ...this.start }, ...this.frames, ...(this.end ? [this.end] : [])]; }
}

function occupied(state) { const places = []; state.live.forEach((node, place) => { if (node !== null) places.push(place); }); return places; }

function cloneState(s) {
  return { t: s.t, ref: s.ref.slice(), tabs: s.tabs.map(table => table.slice()), live: s.live.slice(), len: s.len.slice(), scores: s.scores.slice(),
           rank: s.rank.slice(), finished: s.finished };
}

function applyFrame(state, frame) {
  for (const [block, sharers] of frame.ref) state.ref[block] = sharers;
  for (const [place, keep, tail] of frame.tabs) { const table = state.tabs[place]; table.length = keep; for (const block of tail) table.push(block); }
  state.t = frame.t; state.live = frame.live; state.len = frame.len; state.scores = frame.scores; state.rank = frame.rank;
  if (frame.finished) state.finished = frame.finished;
}

if (typeof module !== 'undefined') module.exports = { TraceStore, occupied };
