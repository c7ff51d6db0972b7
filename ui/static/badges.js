/* The line above the picture: what runs here, whether the picture obeys its own law, whether transformers agrees. */

class Badges {
  constructor(scope) { this.scope = scope; this.verdict = null; }

  /* A new trace: nothing is known of it yet. */
  forget() { this.verdict = null; }

  showFacts(start) {
    const { scope } = this, kind = start.mode.includes('beam') ? 'beam' : start.width > 1 ? 'sample' : 'branch';
    const where = [...(scope.pane.isImported ? ['from a file'] : []), start.model, start.dtype, start.device];
    const what = [start.mode, plural(start.width, kind), `prompt of ${plural(start.prompt_len, 'token')}`, `blocks of ${start.block_size}`];
    const facts = [...where, ...what];
    scope.output('facts').replaceChildren(...facts.map(fact => make('span', '', fact)));
    const prompt = visibleText(start.prompt);
    setText(scope.output('prompt'), `“${shorten(prompt, 110)}”`); scope.output('prompt').title = shorten(prompt, 2000);
  }

  show() {
    const { scope } = this, badge = scope.output('invariant'), check = scope.output('check');
    const breach = scope.stores.map(store => store.breach).find(Boolean), stats = scope.pane.store.end?.stats;
    put(badge, 'className', `badge ${breach ? 'bad' : 'good'}`);
    setText(badge, breach ?? `sharers = table entries at all ${plural(scope.clock.last, 'step')}`);
    if (stats && !breach) this.agreeWithStats(badge, scope.pane.store, stats);
    put(check, 'hidden', !stats);
    if (!this.verdict) { put(check, 'className', 'badge'); setText(check, 'compare with transformers'); }
  }

  /* The page's own numbers, summed from events, against what the decoder reports. */
  agreeWithStats(badge, store, stats) {
    const mine = store.stats.at(-1), pairs = [['copy-on-writes', mine.cowTotal, stats.cow_copies], ['peak blocks', mine.peak, stats.peak_blocks], ['steps', store.last, stats.steps]];
    const wrong = pairs.find(([, ours, theirs]) => ours !== theirs);
    if (wrong) { badge.className = 'badge bad'; setText(badge, `${wrong[0]}: ${wrong[1]} on this page, ${wrong[2]} in DecodeStats`); }
    else badge.title = 'At every step, each block’s sharers are counted again from the block tables; copies, peak and steps equal DecodeStats';
    this.scope.root.dataset.stats = wrong ? 'wrong' : 'ok';
  }

  /* Both runs of a comparison, one after the other; the sentence of the first that differs, else of the last. */
  async check() {
    const { scope } = this, badge = scope.output('check'), panes = scope.shown;
    if (scope.pane.isImported) return scope.files.tellOfImport('Comparing with transformers');
    this.verdict = 'asked'; badge.className = 'badge'; setText(badge, 'transformers is decoding …');
    const answers = [];
    for (const pane of panes) {
      const answer = await scope.server.check({ run: pane.shownRun }).catch(() => ({ error: 'the server did not answer' }));
      pane.measuredCopies = answer.cache_bytes ?? null; answers.push(answer);
      if (!answer.ok) break;
    }
    if (this.verdict !== 'asked') return;  // another run is on screen by now
    const answer = this.verdict = answers.at(-1);
    badge.className = `badge ${answer.ok ? 'good' : 'bad'}`;
    setText(badge, answer.error ?? answers.map(({ sentence }) => sentence).join('; '));
    this.showMeasured();
  }

  /* Bytes that torch holds, beside those counted in tokens. */
  showMeasured() {
    for (const pane of this.scope.shown) {
      const { start } = pane.store, counted = (start.num_blocks + 1) * pane.store.bytesPerBlock, held = start.layout.pool_bytes;
      const theirs = pane.measuredCopies ? ` · transformers’ cache held ${formatBytes(pane.measuredCopies)}` : '';
      setText(pane.output('measured'), `whole pool: torch holds ${formatBytes(held)}, ${held === counted ? 'as counted' : `counted ${formatBytes(counted)}`}${theirs}`);
    }
  }
}
