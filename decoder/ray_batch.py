"""Many decoders as one, for a batch job: an actor pool on Ray, on this machine or a cluster.

Ray places the workers, starts one anew that was killed, and hands it the bundles again that it had: their lines are
decoded once more, and their outcomes arrive once. Writing them is the affair of who iterates (`BatchJob`).
"""

import os
import socket
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Self

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cowbeam.decoder.counters import Counters, total
from cowbeam.decoder.default_model import resolve_default_model
from cowbeam.decoder.hand_out import BUNDLES_AT_ONCE, Bundle, HandOut, Numbered
from cowbeam.decoder.outputs import Outcome
from cowbeam.decoder.params import Params
from cowbeam.decoder.ray_worker import Decoded, RayWorker
from cowbeam.decoder.request_maker import Prompt
from cowbeam.decoder.scheduler import MAX_ROWS

# A bundle whose workers ended so many times ends the job: its lines are likely to be why.
MAX_RETRIES = 3


class RayDecoders:
    """Decodes pairs by ``num_workers`` decoders; one a GPU where None, or one a machine where there are no GPUs.

    Args:
        address: of a running cluster ("auto" finds one), or "local" for one that ends with this object.
        num_workers: each with a GPU, or with its part of the CPUs.
        name: of the model, for `Decoder.from_pretrained`, as are ``knobs``. The workers load it, each where it runs.

    Raises:
        ValueError: Ray is not installed or there is no cluster, it has no place for so many, or no decoder can be made.
    """

    def __init__(self, address: str, num_workers: int | None, name: str | None, knobs: dict[str, Any]) -> None:
        try:
            import ray
        except ImportError:
            raise ValueError("--ray needs the library Ray: pip install 'cowbeam[ray]'") from None
        self._ray = ray
        self._name = os.path.abspath(name) if name is not None and os.path.isdir(name) else name
        self._max_rows: int = knobs.get("max_rows", MAX_ROWS)
        self._counters: dict[str, Counters] = {}  # by process: the last that each told of
        try:
            _knock_at(address)
            ray.init(address, logging_level="ERROR", log_to_driver=False, **_LOCAL if address == "local" else {})
        except OSError as error:
            raise ValueError(f"--ray: no cluster at {address!r}: {error}") from error
        try:
            self._workers = self._start(num_workers, knobs)
        except BaseException:
            ray.shutdown()
            raise

    def _start(self, num_workers: int | None, knobs: dict[str, Any]) -> list[Any]:
        ray = self._ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_workers, needs = _place(nodes, num_workers)
        worker = ray.remote(**needs, max_restarts=-1, max_task_retries=MAX_RETRIES, max_concurrency=BUNDLES_AT_ONCE)
        workers = [worker(RayWorker).remote(self._name, knobs) for _ in range(num_workers)]
        try:
            ray.get([worker.wait_until_ready.remote() for worker in workers])
        except ray.exceptions.RayActorError as error:
            raise ValueError(f"a worker could not start: {str(error).strip().splitlines()[-1]}") from error
        return workers

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's, which chats need here already."""
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._name or resolve_default_model())
        return tokenizer

    def counters(self) -> Counters:
        """Of all workers together, as of their last bundles."""
        return total(self._counters.values())

    def generate_pairs(self, pairs: Iterable[tuple[Prompt, Params]]) -> Iterator[Outcome]:
        """`Decoder.generate_pairs`; pairs are taken as workers have room for them."""
        lines = (Numbered(index, *pair) for index, pair in enumerate(pairs))
        hand_out = HandOut(lines, len(self._workers), self._max_rows)
        in_flight: dict[Any, Bundle] = {}  # by what Ray promises for it
        while True:
            while (bundle := hand_out.next_bundle()) is not None:
                in_flight[self._workers[bundle.worker].decode.remote(bundle.lines)] = bundle
            if not in_flight:
                return
            (done,), _ = self._ray.wait(list(in_flight))
            hand_out.take_back(in_flight.pop(done))
            yield from self._received(done).outcomes

    def _received(self, done: Any) -> Decoded:
        try:
            decoded: Decoded = self._ray.get(done)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            text = f"the workers of the same lines ended {MAX_RETRIES + 1} times: {str(error).splitlines()[0]}"
            raise ChildProcessError(text) from error
        before = self._counters.get(decoded.process)
        if before is None or before.turns < decoded.counters.turns:
            self._counters[decoded.process] = decoded.counters
        return decoded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()


# Only bundles pass through the object store. By default it may be larger than what shared memory holds.
_LOCAL = {"include_dashboard": False, "object_store_memory": 2**29}


def _knock_at(address: str) -> None:
    """Raises OSError at once where nobody listens; Ray tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _place(nodes: list[dict[str, float]], num_workers: int | None) -> tuple[int, dict[str, float]]:
    """How many workers, and what each needs. Raises ValueError for more than there is place for."""
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    wanted = num_workers or gpus or len(nodes)
    if gpus:
        if wanted > gpus:
            raise ValueError(f"--ray-workers {wanted}: the cluster has {gpus} GPUs, and a worker takes one")
        return wanted, {"num_gpus": 1, "num_cpus": 1}
    each = -(-wanted // len(nodes))
    cpus = int(min(node.get("CPU", 0) for node in nodes)) // each
    if cpus < 1:
        raise ValueError(f"--ray-workers {wanted}: {each} of them do not fit on a machine, a CPU each")
    return wanted, {"num_cpus": cpus}
