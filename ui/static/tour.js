/* Six captions. Each finds its step in the trace, so another recording needs no new text. */
class TourLesson {
  constructor(scope) {
    this.title = 'Tour';
    const { store } = scope.pane, { start, stats, frames } = store, find = (test, from = 1) => { for (let t = from; t < store.lastWithBranches; t++) if (test(stats[t - 1], frames[t - 1])) return t; return store.lastWithBranches; };
    const full = Math.floor(start.prompt_len / start.block_size), rest = start.prompt_len % start.block_size;
    const copying = find(stat => stat.cow, 2), allocating = find(stat => stat.alloc > 1, 2), pruning = find(stat => stat.prune && stat.free, Math.floor(store.lastWithBranches / 3));
    const last = store.lastWithBranches, mem = frames[last - 1].mem, cow = frames[copying - 1].ev.find(event => event[0] === 'cow') ?? ['cow', 0, 0, 0, 0];
    this.pages = [
      { step: 1, panels: ['tables'], title: 'One prompt, computed once', text: `The prompt has ${plural(start.prompt_len, 'token')}. It was computed once and lies in ${plural(full + (rest ? 1 : 0), 'block')}. All ${start.width} branches’ block tables point at the same ${plural(full, 'full block')}: each tall shape on the right is one block of memory, and its height is who shares it.` },
      { step: copying, panels: ['pool', 'tables'], title: 'Copy-on-write', text: `A branch wants to write into a block that another branch holds too. So it takes a fresh block, carries over the ${plural(cow[4], 'token')} that are there, and writes into its own: block #${cow[1]} → #${cow[2]}. The shape splits. Nothing else is ever copied.` },
      { step: allocating, panels: ['pool', 'tables'], title: 'Full blocks need no copy', text: `The last blocks are full, so each branch simply gets a new one that follows. Blocks behind it are never written again: they can be shared for ever.` },
      { step: pruning, panels: ['tree', 'pool'], title: 'Branches die, blocks come back', text: `Beam search keeps the ${start.width} best candidates. A branch without a child among them is pruned (the crosses); a block that nobody holds any more is free at once (green rings) and will be used again.` },
      { step: Math.max(1, Math.floor(last * .85)), panels: ['tree', 'branches'], title: 'Why sharing works', text: 'Look at the gold path and the line above the tree: the branches that are left descend from a few ancestors, so they agree on nearly everything but their last words. What they agree on is stored once.' },
      { step: last, panels: ['memory', 'tables'], title: 'What it saves', text: `At step ${last} the shared blocks take ${formatBytes(mem.used)}. A full copy per branch, as transformers keeps, takes ${formatBytes(mem.copies)}; reserving each branch’s greatest length at the start, ${formatBytes(mem.contiguous)}. The dotted line is the least possible: every distinct token once. The gap to it is the last blocks’ empty slots.` },
    ];
  }
}
