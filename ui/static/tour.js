/* Six captions. Each finds its step in the trace, so another recording needs no new text. */
class TourLesson {
  constructor(scope) {
    this.title = 'Tour'; this.store = scope.pane.store;
    const { start, frames, lastWithBranches: last } = this.store, { mem } = frames[last - 1];
    const full = Math.floor(start.prompt_len / start.block_size), rest = start.prompt_len % start.block_size;
    const copying = this.find(stat => stat.cow, 2), allocating = this.find(stat => stat.alloc > 1, 2);
    const pruning = this.find(stat => stat.prune && stat.free, Math.floor(last / 3));
    const [, source, copy, , carried] = frames[copying - 1].ev.find(event => event[0] === 'cow') ?? ['cow', 0, 0, 0, 0];
    const page = (step, panels, title, ...sentences) => ({ step, panels, title, text: sentences.join(' ') });
    this.pages = [
      page(1, ['tables'], 'One prompt, computed once',
        `The prompt has ${plural(start.prompt_len, 'token')}. It was computed once and lies in ${plural(full + (rest ? 1 : 0), 'block')}.`,
        `All ${start.width} branches’ block tables point at the same ${plural(full, 'full block')}: each tall shape on the right is one`,
        'block of memory, and its height is who shares it.'),
      page(copying, ['pool', 'tables'], 'Copy-on-write',
        'A branch wants to write into a block that another branch holds too. So it takes a fresh block, carries over the',
        `${plural(carried, 'token')} that are there, and writes into its own: block #${source} → #${copy}. The shape splits.`,
        'Nothing else is ever copied.'),
      page(allocating, ['pool', 'tables'], 'Full blocks need no copy',
        'The last blocks are full, so each branch simply gets a new one that follows. Blocks behind it are never written again:',
        'they can be shared for ever.'),
      page(pruning, ['tree', 'pool'], 'Branches die, blocks come back',
        `Beam search keeps the ${start.width} best candidates. A branch without a child among them is pruned (the crosses); a block`,
        'that nobody holds any more is free at once (green rings) and will be used again.'),
      page(Math.max(1, Math.floor(last * .85)), ['tree', 'branches'], 'Why sharing works',
        'Look at the gold path and the line above the tree: the branches that are left descend from a few ancestors, so they',
        'agree on nearly everything but their last words. What they agree on is stored once.'),
      page(last, ['memory', 'tables'], 'What it saves',
        `At step ${last} the shared blocks take ${formatBytes(mem.used)}. A full copy per branch, as transformers keeps, takes`,
        `${formatBytes(mem.copies)}; reserving each branch’s greatest length at the start, ${formatBytes(mem.contiguous)}. The dotted`,
        'line is the least possible: every distinct token once. The gap to it is the last blocks’ empty slots.'),
    ];
  }

  /* The first step from `from` on that passes, or the last one. */
  find(test, from) {
    const { stats, frames, lastWithBranches: last } = this.store;
    for (let t = from; t < last; t++) if (test(stats[t - 1], frames[t - 1])) return t;
    return last;
  }
}
