"""``AsyncDecoder``: many tasks of event loops share one decoder, turned by one thread.

The thread lives while there is something to turn: nothing idles, and nothing is left behind by whoever forgets to
close. Tasks never wait for the engine's lock; they leave a request or their leave, and the thread looks at both
between two turns.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Self

from cowbeam.decoder.counters import Counters
from cowbeam.decoder.decoder import Decoder
from cowbeam.decoder.frames import Frame
from cowbeam.decoder.group import Request
from cowbeam.decoder.outputs import DecodeResult, StreamedToken
from cowbeam.decoder.params import BeamSearchParams, Params
from cowbeam.decoder.request_maker import Prompt
from cowbeam.decoder.run import Run, Watch
from cowbeam.decoder.text_stream import TokenTexts


class _Waiter:
    """One request of one task, made in the task's event loop. The thread sets ``run`` or ``error``, then wakes it."""

    def __init__(self, request: Request, watch: Watch | None) -> None:
        self.request = request
        self.watch = watch
        self.run: Run | None = None
        self.error: BaseException | None = None
        self.has_left = False  # set by the task: nobody waits any more
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """There is a result or an error."""
        return self.error is not None or (self.run is not None and self.run.is_over)

    @property
    def is_gone(self) -> bool:
        """Its task has left, or the whole loop has."""
        return self.has_left or self._loop.is_closed()

    @property
    def has_news(self) -> bool:
        """Something is there for the task to take."""
        return self.is_over or (self.run is not None and bool(self.run.frames or self.run.tokens))

    def wake(self) -> None:
        """Called by the thread."""
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # the loop was closed just now: `is_gone` will say so
            assert self._loop.is_closed(), "an open loop takes calls"

    async def wait(self) -> None:
        """Until the thread has news."""
        await self._changed.wait()
        self._changed.clear()

    def result(self) -> DecodeResult:
        """Of a request that is over. Raises its error."""
        error = self.error or (self.run and self.run.error)
        if error:
            raise error
        result = self.run and self.run.result
        assert result, "only what is over has a result"
        return result


class AsyncDecoder:
    """A decoder for ``asyncio``: as many tasks as you like, all decoded together.

    Cancelling a task aborts its request: the blocks are free within a step. A decoder may be used by others meanwhile,
    directly or by an ``AsyncDecoder`` of their own; closing this one leaves ``decoder`` open.

    Example::

        async with AsyncDecoder(decoder) as decoding:
            results = await asyncio.gather(*(decoding.generate(prompt, params) for prompt in prompts))
    """

    def __init__(self, decoder: Decoder) -> None:
        if not isinstance(decoder, Decoder):
            raise ValueError(f"AsyncDecoder takes a Decoder, got {shown(decoder)}")
        self._decoder = decoder
        # One thread, so that requests are queued in the order of their calls: a long prompt takes long to tokenize.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="cowbeam-prepare")
        self._lock = threading.Lock()  # guards what follows; held for moments only
        self._arrived: list[_Waiter] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def generate(self, prompt: Prompt, params: Params | None = None) -> DecodeResult:
        """Decode one prompt. Raises ValueError for what cannot be decoded, and what the engine raises."""
        waiter = await self._enter(prompt, params, None)
        try:
            await waiter.wait()
            return waiter.result()
        finally:
            waiter.has_left = True

    async def stream(self, prompt: Prompt, params: Params | None = None) -> AsyncIterator[Frame]:
        """A frame a step, as ``Decoder.stream`` gives them; frames wait for a task that is slower than the engine.

        To leave early, leave the loop and let go of the iterator, or ``aclose`` it.
        """
        waiter = await self._enter(prompt, params, "frames")
        try:
            is_over = False
            while not is_over:
                await waiter.wait()
                is_over = waiter.is_over  # asked before the frames are taken: the last one comes with the end
                frames = waiter.run.frames if waiter.run else None
                while frames:
                    yield frames.popleft()
            waiter.result()
        finally:
            waiter.has_left = True

    async def tokens(self, prompt: Prompt, params: Params) -> AsyncIterator[StreamedToken]:
        """Every token of samples or of greedy search as it is chosen, with its text.

        Cheaper than frames. Raises ValueError for beams, and for samples of which some are given up: ``stream`` shows
        those.
        """
        if isinstance(params, BeamSearchParams) and params.num_beams > 1:
            raise ValueError(f"num_beams={params.num_beams}: tokens of beams may be given up again; stream shows beams")
        for name in ("best_of", "branch_scorer"):
            if getattr(params, name, None) is not None:
                raise ValueError(f"{name}: samples may be given up again; stream shows them")
        waiter = await self._enter(prompt, params, "tokens")
        texts = TokenTexts(waiter.request, self._decoder.text_of)
        try:
            is_over = False
            while not is_over:
                await waiter.wait()
                is_over = waiter.is_over
                tokens = waiter.run.tokens if waiter.run else None
                while tokens:
                    yield texts.add(*tokens.popleft())
            waiter.result()
        finally:
            waiter.has_left = True

    def counters(self) -> Counters:
        """The decoder's. Waits for the turn that runs, so a loop with little patience asks by ``asyncio.to_thread``."""
        return self._decoder.counters()

    async def close(self) -> None:
        """Abort what is in flight, whose tasks get a RuntimeError, and wait for the thread. Twice is fine."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)
        self._preparing.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _enter(self, prompt: Prompt, params: Params | None, watch: Watch | None) -> _Waiter:
        self._check_open()
        prepare = self._decoder.prepare
        request = await asyncio.get_running_loop().run_in_executor(self._preparing, prepare, prompt, params)
        waiter = _Waiter(request, watch)
        with self._lock:
            self._check_open()
            if self._thread is None:
                thread = threading.Thread(target=self._turn_while_needed, name="cowbeam-turns")
                thread.start()  # raises where the system has none to give: nobody waits for it then
                self._thread = thread
            self._arrived.append(waiter)
        return waiter

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the async decoder is closed")

    def _turn_while_needed(self) -> None:
        waiters: list[_Waiter] = []
        while self._is_needed(waiters):
            try:
                self._let_go_and_begin(waiters)
                self._decoder.step()
            except BaseException as error:
                _fail(waiters, error)
            # Asked before they are woken: in a turn of another thread a request may end at any moment.
            left = [waiter for waiter in waiters if not waiter.is_over]
            for waiter in waiters:
                if waiter.has_news:
                    waiter.wake()
            waiters = left

    def _is_needed(self, waiters: list[_Waiter]) -> bool:
        """Add who has arrived; False ends the thread."""
        with self._lock:
            waiters += self._arrived
            self._arrived = []
            if not waiters:
                self._thread = None
            return bool(waiters)

    def _let_go_and_begin(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            if waiter.run is not None and (waiter.is_gone or self._is_closed):
                self._decoder.abort(waiter.run)
        waiters[:] = [waiter for waiter in waiters if not waiter.is_gone]
        for waiter in waiters:
            if self._is_closed and not waiter.is_over:
                waiter.error = RuntimeError("the async decoder was closed")
            elif waiter.run is None:
                try:
                    waiter.run = self._decoder.add_request(waiter.request, watch=waiter.watch)
                except Exception as error:  # its stop strings' tokenizer, say: it is this request's alone
                    waiter.error = error


def _fail(waiters: list[_Waiter], error: BaseException) -> None:
    """The engine has ended its runs with an error each; this is for those that it does not know (any more)."""
    for waiter in waiters:
        if not waiter.is_over:
            waiter.error = RuntimeError(f"the decoder failed: {error}")
            waiter.error.__cause__ = error
