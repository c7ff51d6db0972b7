"""One batch job on Ray, by one worker and by two: lines and output tokens a second, and what the second one adds.

    python scripts/bench_ray.py                                     # llama-1b, 3072 prompts x 8 samples; two GPUs
    python scripts/bench_ray.py --workers 1 2 0                     # … and the same job without Ray, in this process
    python scripts/bench_ray.py --shape tiny --case 400x4-samples@40+24 --warm-up 16 --dtype float32    # on a CPU

What runs is `cowbeam batch --ray` on a cluster of this machine, with random weights and prompts (`--case`: prompts x
branches, kind, prompt + new tokens). Every run starts its workers anew, and has these times:

start      until all workers are ready: Ray, the model from the disk, its layers compiled
warm-up    a job of other prompts, --warm-up lines a worker, in which kernels are built and graphs captured
job        from the first line read to the last result written, by workers that are warm: "the rate" is of this
steady     the job's part from a tenth of the results to nine tenths, without the first lines and the last

"busy" is the workers' time in turns over the job's: what is missing, they waited for lines, or for each other's last.
Results must have the same lines, ids and counts whoever made them. The same tokens too in float32; in bfloat16 who
decodes beside whom decides ties, so there it is only counted. The last line is JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from bench_header import print_header
from bench_models import SHAPES, random_model
from serve_load import Load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cowbeam.decoder import Decoder
from cowbeam.decoder.batch_job import BatchJob, LineDefaults, PairDecoder
from cowbeam.decoder.counters import Counters
from cowbeam.decoder.garbage import old_objects_left_alone
from cowbeam.decoder.outputs import Outcome
from cowbeam.decoder.params import Params
from cowbeam.decoder.ray_batch import RayDecoders
from cowbeam.decoder.request_maker import Prompt

SEED = 1000


class Watched:
    """A decoder, or many, whose results are noted as they come: ``times``, in seconds of the clock."""

    def __init__(self, decoder: PairDecoder) -> None:
        self._decoder = decoder
        self.counters = decoder.counters
        self.times: list[float] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._decoder.tokenizer

    def generate_pairs(self, pairs: Iterable[tuple[Prompt, Params]]) -> Iterator[Outcome]:
        for outcome in self._decoder.generate_pairs(pairs):
            self.times.append(time.perf_counter())
            yield outcome


@dataclass(frozen=True)
class Row:
    """One run. ``workers`` 0: without Ray."""

    workers: int
    start_seconds: float
    warm_up_seconds: float
    job_seconds: float
    lines_per_second: float
    tokens_per_second: float
    steady_lines_per_second: float
    whole_lines_per_second: float
    busy: float
    tokens_per_turn: float
    preemptions: int

    @classmethod
    def of(cls, workers: int, load: Load, clock: list[float], times: list[float], did: list[Counters]) -> "Row":
        """``clock``: at the start, with workers ready, warm, and with all done; ``did``: before the job and after."""
        start, warm_up, job = (after - before for before, after in pairwise(clock))
        before, after = did
        first, last = load.prompts // 10, load.prompts * 9 // 10
        return cls(
            workers, start, warm_up, job,
            lines_per_second=load.prompts / job,
            tokens_per_second=load.output_tokens / job,
            steady_lines_per_second=(last - first) / (times[last] - times[first]),
            whole_lines_per_second=load.prompts / (clock[-1] - clock[0]),
            busy=(after.busy_seconds - before.busy_seconds) / (job * max(workers, 1)),
            tokens_per_turn=(after.decode_tokens - before.decode_tokens) / (after.turns - before.turns),
            preemptions=after.preemptions - before.preemptions,
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers > 1)}" if self.workers else "without Ray"

    def show(self) -> None:
        print(f"{self.name:<12}  {self.lines_per_second:,.2f} lines, {self.tokens_per_second:,.0f} output tokens a "
              f"second; steady {self.steady_lines_per_second:,.2f} lines")  # fmt: skip
        print(f"              start {self.start_seconds:.1f} s, warm-up {self.warm_up_seconds:.1f} s, job "
              f"{self.job_seconds:.1f} s; in all {self.whole_lines_per_second:,.2f} lines a second")  # fmt: skip
        print(f"              busy {self.busy:.1%}, {self.tokens_per_turn:.0f} tokens a turn, {self.preemptions} "
              "preemptions", flush=True)  # fmt: skip

    def over(self, one: "Row") -> dict[str, float]:
        """How many times the rates of another run."""
        names = ("lines_per_second", "steady_lines_per_second", "whole_lines_per_second")
        return {name: getattr(self, name) / getattr(one, name) for name in names}


def save_model(folder: Path, shape: str, device: str, dtype: torch.dtype) -> str:
    """Random weights, with a tokenizer that has a word for every token."""
    random_model(shape, device, dtype).save_pretrained(folder)
    words = {f"w{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()  # the workers take what is free
    return str(folder)


def write_prompts(path: Path, load: Load, vocabulary_size: int, seed: int) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for i, prompt in enumerate(load.make_prompts(vocabulary_size, seed)):
            params = {"max_new_tokens": load.new_tokens, "num_return_sequences": load.width, "eos_token_id": []}
            params |= {"sample": True, "seed": seed + i} if load.kind == "samples" else {"num_beams": load.width}
            print(json.dumps({"id": f"p{i}", "token_ids": prompt, "params": params}), file=lines)


def run_job(prompts: Path, out: Path, decoder: PairDecoder) -> list[float]:
    """When each result came. Raises where a line failed."""
    watched = Watched(decoder)
    with BatchJob(prompts, out, LineDefaults({})) as job:
        job.run(watched)
        assert not job.num_failed, f"{job.num_failed} lines failed, as {out} says"
    return watched.times


def measure(workers: int, folder: Path, name: str, load: Load, options: argparse.Namespace) -> Row:
    knobs = {"device": options.device, "dtype": options.dtype}
    warm_up = Load(options.warm_up * max(workers, 1), load.width, load.kind, load.prompt_length, load.new_tokens)
    write_prompts(folder / f"warm{workers}.jsonl", warm_up, SHAPES[options.shape]["vocab_size"], 2 * SEED)
    clock = [time.perf_counter()]
    made = RayDecoders("local", workers, name, knobs) if workers else Decoder.from_pretrained(name, **knobs)
    with made as decoder, old_objects_left_alone():
        clock.append(time.perf_counter())
        print(f"--workers {workers}: ready after {clock[1] - clock[0]:.1f} s", flush=True)
        run_job(folder / f"warm{workers}.jsonl", folder / f"warmed{workers}.jsonl", decoder)
        clock.append(time.perf_counter())
        did = [decoder.counters()]
        times = run_job(folder / "prompts.jsonl", folder / f"out{workers}.jsonl", decoder)
        clock.append(time.perf_counter())
        did.append(decoder.counters())
    return Row.of(workers, load, clock, times, did)


def results(path: Path) -> dict[int, tuple[Any, list[list[int]]]]:
    """By line number: its id, and the tokens of its branches."""
    found = {}
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        assert record["line"] not in found, f"line {record['line']} is there twice"
        found[record["line"]] = (record["id"], [completion["token_ids"] for completion in record["completions"]])
    return found


def compare(folder: Path, load: Load, all_workers: list[int]) -> float:
    """The smallest share of lines with the first run's tokens. Raises where lines, ids or counts are not as asked."""
    shares = []
    files = [results(folder / f"out{workers}.jsonl") for workers in all_workers]
    for found in files:
        assert sorted(found) == list(range(1, load.prompts + 1)), "lines are missing"
        for number, (line_id, branches) in found.items():
            assert line_id == f"p{number - 1}", f"line {number} has the id {line_id}"
            assert [len(branch) for branch in branches] == [load.new_tokens] * load.width, f"line {number} is short"
        shares.append(sum(found[number] == files[0][number] for number in found) / load.prompts)
    return min(shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b", help="of the model (llama-1b)")
    parser.add_argument("--case", default="3072x8-samples@1024+128", help="as 3072x8-samples@1024+128")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="a run with each; 0: without Ray (1 2)")
    parser.add_argument("--warm-up", type=int, default=128, help="lines a worker before the job (128)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 on a CPU")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Ray gives a lone worker on a CPU the threads of two
    load = Load.parse(options.case)
    about = print_header(f"One batch job on Ray, {options.shape}, {options.case}, {options.dtype}")
    rows: list[Row] = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name = save_model(folder / "model", options.shape, options.device, getattr(torch, options.dtype))
        write_prompts(folder / "prompts.jsonl", load, SHAPES[options.shape]["vocab_size"], SEED)
        for workers in options.workers:
            rows.append(measure(workers, folder, name, load, options))
            rows[-1].show()
            for rate, times in rows[-1].over(rows[0]).items() if rows[1:] else ():
                print(f"              {times:.3f} times the {rate.replace('_', ' ')} of {rows[0].name}", flush=True)
        share = compare(folder, load, options.workers)
    is_equal = share == 1 or options.dtype != "float32"
    print(f"all lines once, with their ids and counts; {share:.1%} of them with the tokens of the first run")
    found = [{**asdict(row), "over_first": row.over(rows[0])} for row in rows]
    print(json.dumps({"benchmark": "ray", **about, "shape": options.shape, "case": options.case,
                      "dtype": options.dtype, "same_tokens": share, "equal": is_equal, "rows": found}))  # fmt: skip
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
