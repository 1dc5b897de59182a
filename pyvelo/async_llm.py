"""The face for asyncio: the engine steps in a thread of its own, answers come as they are awaited."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from pyvelo.config import EngineConfig
from pyvelo.engine.compute import rest
from pyvelo.engine.engine import Engine, open_engine
from pyvelo.engine.intake import Prompt, Submission, for_each, pair_up
from pyvelo.engine.request import Request
from pyvelo.engine.stats import EngineStats
from pyvelo.engine.tracing import recording
from pyvelo.errors import ClosedError, VeloError
from pyvelo.outputs import RequestOutput, StreamPiece, raise_first_error
from pyvelo.sampling import CHAT_PARAMS, SamplingParams
from pyvelo.text.conversation import ChatOptions, Chats, is_one
from pyvelo.text.messages import Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """A GGUF model and its cache for asyncio; takes what `LLM` takes, and is used from one event loop.

    The model is loaded by `async with`, or by the first request, in a thread: the loop goes on meanwhile. Any
    number of requests may be awaited at once; they share every step. Whoever stops to listen (a task that is
    cancelled, a stream that is closed, an asyncio.timeout that is up) ends the request within a step.

    Raises ConfigError here, and when the model is loaded ModelError, UnsupportedError or OutOfMemory.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        known = [field.name for field in fields(EngineConfig) if field.name != "model"]
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(f"AsyncLLM has no setting {unknown[0]}: there are {', '.join(known)}")
        self._config = EngineConfig(model=model, **settings)
        self._loading: asyncio.Task[_Pump] | None = None
        self._closed = False

    # ---- answers ----

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts as `LLM.generate` does."""
        pump = await self._pump()
        streams = [_Stream(pump, prompt, param, keep=False) for prompt, param in pair_up(prompts, params)]
        try:
            pump.submit(streams)
            for stream in streams:
                await stream.wait()
        finally:
            pump.cancel(streams)
        outputs = [stream.submission.output() for stream in streams]
        if not return_errors:
            raise_first_error(outputs)
        return outputs

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamPiece, None]:
        """Answers one prompt, a piece for every token as it comes."""
        pump = await self._pump()
        stream = _Stream(pump, prompt, for_each(params, 1)[0], keep=True)
        try:
            pump.submit([stream])
            while (piece := await stream.next()) is not None:
                yield piece
        finally:
            pump.cancel([stream])
        raise_first_error([stream.submission.output()])

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput | list[RequestOutput]:
        """Answers conversations as `LLM.chat` does."""
        pump = await self._pump()
        # in a thread: a template may take its time
        prompts = await asyncio.to_thread(pump.chats.prompts, messages, **options)
        outputs = await self.generate(prompts, CHAT_PARAMS if params is None else params)
        return outputs[0] if is_one(messages) else outputs

    async def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[StreamPiece, None]:
        """Answers one conversation, a piece for every token as it comes."""
        pump = await self._pump()
        prompt = await asyncio.to_thread(pump.chats.one, messages, **options)
        async with aclosing(self.stream(prompt, CHAT_PARAMS if params is None else params)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Vectors of texts, as `LLM.embed` gives them, computed in a thread; a task that is cancelled ends it
        soon."""
        pump = await self._pump()
        stopped = threading.Event()
        try:
            embed = pump.engine.embeddings.embed
            return await asyncio.to_thread(embed, texts, pooling, normalize, stopped.is_set)
        finally:
            stopped.set()

    # ---- what it is ----

    async def stats(self) -> EngineStats:
        """Blocks, bytes, tokens and times, exact between two steps."""
        pump = await self._pump()
        return await asyncio.to_thread(pump.engine.stats)

    @asynccontextmanager
    async def trace(self, path: str | os.PathLike[str]) -> AsyncGenerator[None, None]:
        """Records what the cache does meanwhile, as `LLM.trace`: `async with llm.trace("run.trace"): ...`."""
        engine = (await self._pump()).engine
        run = recording(engine.driver, path, engine.geometry.block_bytes, engine.pool.n_ctx)
        await asyncio.to_thread(run.__enter__)
        try:
            yield
        finally:
            await asyncio.to_thread(run.__exit__, None, None, None)

    async def reset_prefix_cache(self) -> None:
        """Forgets the prefixes of what has ended and of what runs."""
        pump = await self._pump()
        await asyncio.to_thread(pump.engine.reset_prefix_cache)

    # ---- life ----

    async def close(self) -> None:
        """Ends what runs, its listeners get what is there, and frees model and cache; may be called twice."""
        self._closed = True
        if self._loading is not None:
            with suppress(VeloError):  # nothing was loaded, as whoever asked was told
                pump = await self._loading
                await asyncio.to_thread(pump.close)

    async def __aenter__(self) -> AsyncLLM:
        await self._pump()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _pump(self) -> _Pump:
        if self._closed:
            raise ClosedError("this engine was closed")
        if self._loading is None:
            self._loading = asyncio.create_task(_load(self._config))
        # whoever is cancelled while it loads does not take the model from the others
        return await asyncio.shield(self._loading)


async def _load(config: EngineConfig) -> _Pump:
    engine = await asyncio.to_thread(open_engine, config)
    return _Pump(engine, asyncio.get_running_loop())


class _Stream:
    """One prompt on its way; its pieces arrive in the event loop. None says that there is no more."""

    def __init__(self, pump: _Pump, prompt: Prompt, params: SamplingParams, *, keep: bool) -> None:
        self._pieces: asyncio.Queue[StreamPiece | None] = asyncio.Queue()
        on_piece = (lambda piece: pump.outbox.append((self, piece))) if keep else None
        self.submission: Submission = pump.engine.intake.prepare(prompt, params, on_piece)
        self._pump = pump
        self._n_open = len(self.submission.requests)
        for request in self.submission.requests:
            request.on_end = self._end

    def _end(self, request: Request) -> None:
        self._n_open -= 1
        if self._n_open == 0:
            self._pump.outbox.append((self, None))
            self._pump.n_ended += 1

    def take(self, piece: StreamPiece | None) -> None:
        self._pieces.put_nowait(piece)

    async def next(self) -> StreamPiece | None:
        """The next piece, or None behind the last; what broke the engine is raised."""
        piece = await self._pieces.get()
        if piece is None and self._pump.failure is not None:
            raise self._pump.failure
        return piece

    async def wait(self) -> None:
        """Until there is no more."""
        while await self.next() is not None:
            pass


class _Pump:
    """The engine's thread. It steps while there are requests, and wakes the event loop once for each step."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.chats = Chats(engine.model)
        self.outbox: deque[tuple[_Stream, StreamPiece | None]] = deque()
        self.failure: Exception | None = None
        self.n_ended = 0  # counted where requests end: by whoever has the core to itself
        self._n_submitted = 0  # counted in the event loop
        self._loop = loop
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pyvelo-engine", daemon=True)
        self._thread.start()

    def submit(self, streams: Sequence[_Stream]) -> None:
        requests = [request for stream in streams for request in stream.submission.requests]
        self.engine.driver.submit(requests)
        self._n_submitted += len(streams)
        self._work.set()

    def cancel(self, streams: Sequence[_Stream]) -> None:
        requests = [r for stream in streams for r in stream.submission.requests if not r.finished]
        if requests:
            self.engine.driver.cancel(requests)
            self._deliver_soon()

    def close(self) -> None:
        """Ends every request and waits for the thread."""
        self._stopping = True
        self.engine.close()
        self._work.set()
        self._thread.join()
        self._deliver_soon()  # what ended when the thread was gone

    def _run(self) -> None:
        while not self._stopping:
            self._work.wait()
            self._work.clear()
            if self._stopping:
                break
            try:
                self.engine.driver.drive(self._ready)
            except Exception as error:  # a defect: nobody must wait for ever
                self.failure = error
                with self.engine.driver.visit() as core:
                    core.cancel_all()
                self._deliver_soon()
            rest()

    def _ready(self) -> bool:
        self._deliver_soon()
        return self._stopping or self.n_ended >= self._n_submitted

    def _deliver_soon(self) -> None:
        if self.outbox:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self.outbox.clear()

    def _deliver(self) -> None:
        while self.outbox:
            stream, piece = self.outbox.popleft()
            stream.take(piece)
