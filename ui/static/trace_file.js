/* Traces from a file. A file may hold anything: every number that becomes an index or a size is checked here. Pure. */

const TRACE_VERSION = 1, MAX_TRACE_BYTES = 64 * 2 ** 20, MAX_TRACE_STEPS = 4096;

/* {records} of one search, {records, compared} of two on one clock, as text. */
function traceFile([records, compared]) { return JSON.stringify(compared ? { records, compared } : { records }); }

/* One or two lists of records. Throws an Error whose message says what is wrong with the file. */
function parseTraces(text) {
  let file;
  try { file = JSON.parse(text); } catch { throw new Error('this file is no JSON'); }
  if (Array.isArray(file)) return [checkRecords(file)];
  return [checkRecords(file?.records), ...(file?.compared ? [checkRecords(file.compared)] : [])];
}

/* Of one search, without what is not a record. */
function checkRecords(records) {
  if (!Array.isArray(records) || !records.length) throw new Error('this file holds no list of trace records');
  checkStart(records[0]);
  const steps = records.filter(record => record?.type === 'step');
  if (!steps.length || steps.length > MAX_TRACE_STEPS) throw new Error(`a trace has 1 to ${MAX_TRACE_STEPS} steps, this one ${steps.length}`);
  const lengths = new Array(records[0].width).fill(0);
  let nodes = 0;
  steps.forEach((step, i) => { nodes = checkStep(step, i + 1, records[0], nodes, lengths); });
  const end = records.at(-1)?.type === 'end' ? records.at(-1) : null;
  if (end && end.stats !== null && typeof end.stats !== 'object') throw new Error('the end record is broken');
  return [records[0], ...steps, ...(end ? [end] : [])];
}

const isCount = (value, below) => Number.isInteger(value) && value >= 0 && value < below;

function demand(condition, what) { if (!condition) throw new Error(`this trace is broken: ${what}`); }

function checkStart(start) {
  demand(start && start.type === 'start', 'its first record is no start');
  if (start.v !== TRACE_VERSION) throw new Error(`this trace has version ${String(start.v).slice(0, 20)}; version ${TRACE_VERSION} is read here`);
  const limits = { width: 257, num_blocks: 65537, block_size: 1025, prompt_len: 1e6, max_len: 2e6, steps: 1e6 };
  for (const [name, below] of Object.entries(limits)) demand(isCount(start[name], below) && start[name] > 0, name);
  demand(start.bytes_per_token > 0 && Number.isFinite(start.bytes_per_token), 'bytes_per_token');
  for (const name of ['prompt', 'mode', 'model', 'dtype', 'device']) demand(typeof start[name] === 'string', name);
  demand(Array.isArray(start.prompt_tokens) && start.prompt_tokens.every(t => typeof t === 'string'), 'prompt_tokens');
  demand(start.layout && typeof start.layout === 'object', 'layout');
  for (const value of Object.values(start.layout)) demand(value === null || Number.isFinite(value), 'layout');
}

/* Returns the number of nodes after the step; `lengths` are those of the tables. */
function checkStep(step, t, start, nodes, lengths) {
  const { width, num_blocks } = start, where = what => `${what} of step ${t}`;
  demand(step.t === t, `step ${t} is missing`);
  for (const name of ['nodes', 'live', 'len', 'scores', 'rank', 'tabs', 'ref', 'ev']) demand(Array.isArray(step[name]), where(name));
  for (const [id, parent, text, logprob, cumulative] of step.nodes) {
    demand(id === nodes && Number.isInteger(parent) && parent >= -1 && parent < nodes, where('nodes'));
    demand(typeof text === 'string' && Number.isFinite(logprob) && Number.isFinite(cumulative), where('nodes'));
    nodes++;
  }
  for (const name of ['live', 'len', 'scores', 'rank']) demand(step[name].length === width, where(name));
  step.live.forEach((node, place) => {
    demand(node === null || isCount(node, nodes), where('live'));
    demand(isCount(step.len[place], 2e6), where('len'));
    demand(node === null || (isCount(step.rank[place], width) && Number.isFinite(step.scores[place])), where('rank'));
  });
  for (const [place, keep, tail] of step.tabs) {
    demand(isCount(place, width) && isCount(keep, lengths[place] + 1) && Array.isArray(tail), where('tabs'));
    demand(tail.every(block => isCount(block, num_blocks)), where('tabs'));
    lengths[place] = keep + tail.length;
  }
  step.live.forEach((node, place) => demand((node === null) === (lengths[place] === 0), where('tabs')));
  for (const [block, sharers] of step.ref) demand(isCount(block, num_blocks) && isCount(sharers, width + 1), where('ref'));
  for (const event of step.ev) checkEvent(event, start, nodes, where('events'));
  for (const name of ['used', 'ideal', 'copies', 'contiguous']) demand(Number.isFinite(step.mem?.[name]), where('mem'));
  demand(step.ms === undefined || Number.isFinite(step.ms), where('ms'));
  for (const end of step.finished ?? []) demand(Array.isArray(end) && typeof end[1] === 'string' && Number.isFinite(end[2]) && isCount(end[4], nodes), where('finished'));
  return nodes;
}

function checkEvent(event, { width, num_blocks }, nodes, where) {
  demand(Array.isArray(event), where);
  const [kind, a, b, c, d] = event, place = value => isCount(value, width), block = value => isCount(value, num_blocks);
  const ok = { alloc: () => block(a) && place(b), cow: () => block(a) && block(b) && place(c) && isCount(d, 1025), fork: () => place(a) && place(b),
               prune: () => place(a), free: () => block(a), finish: () => isCount(a, nodes) && typeof b === 'string' };
  demand(Object.hasOwn(ok, kind) && ok[kind](), where);
}

if (typeof module !== 'undefined') module.exports = { parseTraces, traceFile };
