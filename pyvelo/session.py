"""Sessions, blocking and asyncio: token sequences that a user continues and forks."""

from __future__ import annotations

import threading
from collections import abc, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyvelo.engine.engine import Engine
from pyvelo.engine.input_processor import Asked, Prompt
from pyvelo.engine.loop import Stream, run_all
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.engine.request import Sequence
from pyvelo.errors import ClosedError, RequestError
from pyvelo.finalizer import Finalizer
from pyvelo.keywords import NotCopied, checked, either
from pyvelo.outputs import RequestOutput, StreamPiece
from pyvelo.sampling import SamplingParams
from pyvelo.store.saved import save_session

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import (
        AsyncEngineLoop,  # imports asyncio, which blocking sessions do without
        RequestStream,
    )

__all__ = ["AsyncSession", "BaseSession", "Session", "continued", "idle_tokens", "saved"]


class BaseSession(NotCopied):
    """State that `Session` and `AsyncSession` share: the sequence and a lock; `release` frees its blocks."""

    _instead = "fork it, or open a session of its token_ids"

    def __init__(self, engine: Engine, sequence: Sequence, release: Callable[[Sequence], None]) -> None:
        self._engine = engine
        self._sequence = sequence
        self._lock = threading.Lock()
        self._release = release
        self._dropped = Finalizer(self, partial(engine.loop.abandon_sequence, sequence))

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__}: {len(self._sequence.tokens):,} tokens{state}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens: given, appended and generated ones, with the end tokens of answers."""
        return tuple(self._current().tokens)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._current().tokens)

    def __bool__(self) -> bool:
        """Return True, also for a session without tokens."""
        return True

    @property
    def text(self) -> str:
        """All text, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._engine.model.detokenize(list(self._current().tokens)).decode("utf-8", "replace")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._dropped.alive

    def _close(self) -> None:
        with self._engine.loop.guard:
            if self._dropped.detach():
                self._release(self._sequence)

    @contextmanager
    def _claim(self) -> Iterator[Sequence]:
        """Yield the sequence, locked; a request that was cancelled within a step may still run on it."""
        self._take()
        try:
            yield self._sequence
        finally:
            self._lock.release()

    def _take(self) -> None:
        """Acquire the lock; raise RequestError if another call holds it."""
        self._engine.loop.check_open()
        if self.closed:
            raise ClosedError("this session was closed")
        if not self._lock.acquire(blocking=False):
            raise RequestError("this session is answering: wait for the end, or fork the session before")

    def _current(self) -> Sequence:
        """Return the sequence as it is now; a cancelled answer may still add a token."""
        return self._sequence

    def _settle(self) -> None:
        """Wait until a cancelled answer has ended."""
        if self._sequence.busy:
            with self._engine.loop.visit():
                pass

    def _tokens(self, text: Prompt) -> abc.Sequence[int]:
        """Return the tokens of `text`, if there is room for them."""
        sequence, processor = self._sequence, self._engine.processor
        if sequence.tokens and isinstance(text, str):
            text = self._engine.model.tokenize_more(text)
        tokens = processor.tokens(text)
        processor.check_room(len(sequence.tokens) + len(tokens), "the session with this text")
        return tokens

    def _to_compute(self, priority: int = 0) -> list[Submission]:
        """Return a request that computes the new tokens, if an answer has room."""
        sequence, processor = self._sequence, self._engine.processor
        if len(sequence.tokens) > 1 and not sequence.computed and processor.has_room(sequence):
            return [processor.compute(sequence, priority)]
        return []

    def _save(self, name: str, note: abc.Mapping[str, Any] | None = None) -> None:
        """Save the sequence, locked, with what a server keeps beside it."""
        save_session(self._engine, name, self._sequence, note)

    def _twin(self) -> Sequence:
        return self._sequence.fork(self._sequence.tokens, len(self._sequence.tokens))

    def _share(self, twin: BaseSession) -> None:
        """Share the blocks with another session."""
        with self._engine.loop.visit() as core:
            core.idle.fork(self._sequence, twin._sequence)


class Session(BaseSession):
    """Text that grows by appended and generated text; made by `LLM.session`.

    Its blocks stay in the cache between answers, so each answer computes only new tokens. A fork shares all
    blocks. An idle session is evicted before any request is preempted; its next answer swaps the blocks in or
    computes them again. It never blocks a request, and loses no text.

    Several threads may use different sessions at once; a session has one answer at a time. `close` it, or use
    it in `with`; dropping it closes it, too.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        super().__init__(engine, sequence, engine.loop.release)

    def append(self, text: Prompt) -> None:
        """Append text or token ids; the next answer, fork or `compute` computes them.

        Raises:
            RequestError, OutOfBlocks: there would be no room for an answer; nothing is appended.
        """
        with self._turn() as sequence:
            sequence.tokens.extend(self._tokens(text))

    @checked(params=SamplingParams)
    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Continue the text; the session keeps the output. It generates one sample: fork it for more."""
        with self._turn() as sequence:
            processor = self._engine.processor
            param = either(params, sampling_params, SamplingParams())
            submission = processor.go_on(sequence, param, asked=processor.ask(param, request_id))
            run_all(self._engine.loop, [submission])
        return outputs_of([submission])[0]

    @checked(params=SamplingParams)
    def stream(
        self,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Generator[StreamPiece, None, None]:
        """Continue the text as `generate` does, and yield a piece for each token.

        The session is busy until the last piece. Closing the generator cancels the answer; its tokens stay.
        """
        pieces: deque[StreamPiece] = deque()
        processor, param = self._engine.processor, either(params, sampling_params, SamplingParams())
        asked = processor.ask(param, request_id, timed=False)

        def begin() -> Submission:
            self._take()
            try:
                self._settle()
                return processor.go_on(self._sequence, param, pieces.append, asked)
            except BaseException:
                self._lock.release()
                raise

        return Stream(self._engine.loop, begin, pieces, self._lock.release, engine=self._engine)

    def compute(self) -> None:
        """Compute the appended tokens now, so that the next answer starts sooner."""
        with self._turn():
            self._compute()

    def save(self, name: str) -> None:
        """Save the session in the KV store under a name, for `load_session`; replace an earlier one.

        Raises:
            ConfigError: there is no `kv_store`.
            RequestError: the name is invalid.
            StoreError: the store is away, or another process writes to its folder.
        """
        with self._claim():
            with self._engine.loop.guard:
                self._settle()
            self._save(name)

    def fork(self) -> Session:
        """Return a session of the same tokens that shares all blocks; compute the appended tokens first."""
        with self._turn():
            self._compute()
            twin = Session(self._engine, self._twin())
            self._share(twin)
        return twin

    def close(self) -> None:
        """Cancel the answer and free the blocks; may be called twice."""
        self._close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self) -> Sequence:
        """Return the sequence, after the step in progress if an answer was cancelled."""
        if not self._lock.locked():
            self._settle()
        return self._sequence

    @contextmanager
    def _turn(self) -> Iterator[Sequence]:
        """Yield the sequence, locked, when no request runs on it."""
        with self._engine.loop.guard, self._claim() as sequence:
            self._settle()
            yield sequence

    def _compute(self) -> None:
        submissions = self._to_compute()
        run_all(self._engine.loop, submissions)
        outputs_of(submissions)


class AsyncSession(BaseSession):
    """`Session` for asyncio, made by `AsyncLLM.session`.

    Any number of sessions may answer at once, each with one answer at a time. A task that is cancelled or a
    stream that is closed ends the answer within a step, and its tokens stay. The step in progress may still
    add one to `token_ids`; the session's next call waits for it. `close` it, or use it in `async with`;
    dropping it closes it, too.
    """

    def __init__(self, engine_loop: AsyncEngineLoop, sequence: Sequence) -> None:
        super().__init__(engine_loop.engine, sequence, engine_loop.release)
        self._engine_loop = engine_loop

    async def append(self, text: Prompt) -> None:
        """Append text or token ids; the next answer, fork or `compute` computes them.

        Raises:
            RequestError, OutOfBlocks: there would be no room for an answer; nothing is appended.
        """
        async with self._turn() as sequence:
            sequence.tokens.extend(await self._engine_loop.preparer.run(partial(self._tokens, text)))

    @checked(params=SamplingParams)
    async def generate(
        self,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Continue the text; the session keeps the output. It generates one sample: fork it for more."""
        async with self._turn() as sequence:
            param, processor = either(params, sampling_params, SamplingParams()), self._engine.processor
            prepare = partial(processor.go_on, sequence, param, asked=processor.ask(param, request_id))
            submission = await self._engine_loop.preparer.run(prepare, [param])
            await self._engine_loop.run([submission])
        return outputs_of([submission])[0]

    @checked(params=SamplingParams)
    async def stream(
        self,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[StreamPiece, None]:
        """Continue the text as `generate` does, and yield a piece for each token; busy until the last."""
        async with self._turn() as sequence:
            param, processor = either(params, sampling_params, SamplingParams()), self._engine.processor
            prepare = partial(processor.go_on, sequence, param, asked=processor.ask(param, request_id))
            async with aclosing(self._engine_loop.pieces(prepare, param)) as pieces:
                async for piece in pieces:
                    yield piece

    async def compute(self) -> None:
        """Compute the appended tokens now, so that the next answer starts sooner."""
        async with self._turn():
            await self._compute()

    async def save(self, name: str) -> None:
        """Save the session in the KV store under a name, as `Session.save` does."""
        await saved(self, name, None)

    async def fork(self) -> AsyncSession:
        """Return a session of the same tokens that shares all blocks; compute the appended tokens first."""
        return await forked(self, 0)

    async def close(self) -> None:
        """Cancel the answer and free the blocks; may be called twice."""
        self._close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Sequence]:
        """Yield the sequence, locked, when no request runs on it."""
        from pyvelo.threads import in_thread

        with self._claim() as sequence:
            if sequence.busy:
                await in_thread(self._settle)
            yield sequence

    async def _compute(self, priority: int = 0) -> None:
        submissions = self._to_compute(priority)
        await self._engine_loop.run(submissions)
        outputs_of(submissions)


async def saved(session: AsyncSession, name: str, note: abc.Mapping[str, Any] | None) -> None:
    """Save a session with what a server keeps beside it."""
    from pyvelo.threads import run_in_thread

    async with session._turn():
        await run_in_thread(partial(session._save, name, note))


async def idle_tokens(session: AsyncSession) -> tuple[int, ...]:
    """Return the tokens of a session; wait for the step of an answer that was cancelled."""
    async with session._turn():
        return session.token_ids


async def share_beginning(session: AsyncSession, other: AsyncSession) -> None:
    """Share the blocks of an idle session with a new one, if its tokens begin with the other's."""
    from pyvelo.threads import in_thread

    own, its, n = session._sequence, other._sequence, len(other)
    if (own.adapter, own.salt, own.tokens[:n]) == (its.adapter, its.salt, its.tokens) and n < len(session):
        await in_thread(partial(other._share, session))


async def forked(session: AsyncSession, priority: int) -> AsyncSession:
    """Return a fork of a session, whose appended tokens are computed with a priority."""
    from pyvelo.threads import in_thread

    async with session._turn():
        await session._compute(priority)
        twin = AsyncSession(session._engine_loop, session._twin())
        await in_thread(partial(session._share, twin))
    return twin


@asynccontextmanager
async def continued(
    session: AsyncSession, params: SamplingParams, asked: Asked, *, streams: bool
) -> AsyncIterator[RequestStream]:
    """Yield the request that continues a session, for `AsyncEngineLoop.batches`; busy within the block.

    streams: the request makes pieces."""
    engine_loop = session._engine_loop
    go_on = engine_loop.engine.processor.go_on
    async with session._turn() as sequence:

        def prepare(put: Callable[[StreamPiece], None]) -> Submission:
            return go_on(sequence, params, put if streams else None, asked)

        yield await engine_loop.prepare([prepare], [params])
