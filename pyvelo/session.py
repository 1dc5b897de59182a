"""Sessions, blocking and asyncio: token sequences that a user continues and forks."""

from __future__ import annotations

import threading
import weakref
from collections import abc, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from pyvelo.engine.engine import Engine
from pyvelo.engine.input_processor import Prompt
from pyvelo.engine.loop import Stream, run_all
from pyvelo.engine.output import Submission
from pyvelo.engine.request import Sequence
from pyvelo.errors import ClosedError, RequestError
from pyvelo.keywords import NotCopied, checked
from pyvelo.outputs import RequestOutput, StreamPiece, raise_first_error
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import (
        AsyncEngineLoop,  # imports asyncio, which blocking sessions do without
    )

__all__ = ["AsyncSession", "BaseSession", "Session"]


class BaseSession(NotCopied):
    """What `Session` and `AsyncSession` share: the text, and whose turn it is. `release` gives it back."""

    _instead = "fork it, or open a session of its token_ids"

    def __init__(self, engine: Engine, sequence: Sequence, release: Callable[[Sequence], None]) -> None:
        self._engine = engine
        self._sequence = sequence
        self._lock = threading.Lock()
        self._release = release
        self._dropped = weakref.finalize(self, engine.loop.abandon_sequence, sequence)
        self._dropped.atexit = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens: what was given, appended and generated, ends of answers included."""
        return tuple(self._current().tokens)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._current().tokens)

    @property
    def text(self) -> str:
        """All text, without control tokens; what is not UTF-8 becomes U+FFFD."""
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
        """Acquire the lock; RequestError where another call has it."""
        self._engine.loop.check_open()
        if self.closed:
            raise ClosedError("this session was closed")
        if not self._lock.acquire(blocking=False):
            raise RequestError("this session is answering: wait until it has, or fork it before")

    def _current(self) -> Sequence:
        """Return the sequence as it is now; an answer that was cancelled may still add a token to it."""
        return self._sequence

    def _settle(self) -> None:
        """Waits until what was cancelled has ended."""
        if self._sequence.busy:
            with self._engine.loop.visit():
                pass

    def _tokens(self, text: Prompt) -> abc.Sequence[int]:
        """What `text` appends, if there is room for it."""
        sequence, processor = self._sequence, self._engine.processor
        tokens = processor.tokens(text, add_special=not sequence.tokens)
        processor.check_room(len(sequence.tokens) + len(tokens))
        return tokens

    def _to_compute(self) -> list[Submission]:
        """What computes what is not computed yet, where it can be shared and something can follow it."""
        sequence, processor = self._sequence, self._engine.processor
        if (
            len(sequence.tokens) > 1
            and not sequence.computed
            and processor.can_fork
            and processor.has_room(sequence)
        ):
            return [processor.compute(sequence)]
        return []

    def _twin(self) -> Sequence:
        return self._sequence.fork(self._sequence.tokens, len(self._sequence.tokens))

    def _share(self, twin: BaseSession) -> None:
        """Lets another session share the blocks of this one."""
        with self._engine.loop.visit() as core:
            core.idle.fork(self._sequence, twin._sequence)


class Session(BaseSession):
    """Text that grows, by what is appended and by what is generated behind it; made by `LLM.session`.

    What is computed stays in the cache from answer to answer: each computes only what is new. Forks share all
    that was there when they were made. A session at rest gives its blocks up before any request has to, and
    gets them back, or computes them again, when it goes on: it never stands in the way, and loses no text.

    Several threads may use different sessions at once; one session answers once at a time. `close` it, or use
    it in `with`; one that is dropped is closed too.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        super().__init__(engine, sequence, engine.loop.release)

    def append(self, text: Prompt) -> None:
        """Adds text or token ids; they are computed with the next answer, fork or `compute`.

        Raises RequestError or OutOfBlocks where there would be no room for an answer; nothing is added then.
        """
        with self._turn() as sequence:
            sequence.tokens.extend(self._tokens(text))

    @checked(params=SamplingParams)
    def generate(
        self, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Goes on; what is generated belongs to the session. One sample: fork for more."""
        with self._turn() as sequence:
            processor = self._engine.processor
            param = SamplingParams() if params is None else params
            submission = processor.go_on(sequence, param, asked=processor.ask(param, request_id))
            run_all(self._engine.loop, [submission])
        output = submission.output()
        raise_first_error([output])
        return output

    @checked(params=SamplingParams)
    def stream(
        self, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Generator[StreamPiece, None, None]:
        """As `generate`, a piece for every token as it comes; the session is taken until the
        last. Closing the generator cancels the rest; what was generated stays."""
        pieces: deque[StreamPiece] = deque()
        processor, param = self._engine.processor, SamplingParams() if params is None else params
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
        """Computes what was appended, while there is time, so that the next answer begins at once."""
        with self._turn():
            self._compute()

    def fork(self) -> Session:
        """Another session of the same tokens, which shares every block that this one has; first computes what
        was appended, so that none of the two has to."""
        with self._turn():
            self._compute()
            twin = Session(self._engine, self._twin())
            self._share(twin)
        return twin

    def close(self) -> None:
        """Cancels what it answers and gives its blocks back; may be called twice."""
        self._close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self) -> Sequence:
        """Return the sequence; after an answer that was cancelled, as the step in progress leaves it."""
        if not self._lock.locked():
            self._settle()
        return self._sequence

    @contextmanager
    def _turn(self) -> Iterator[Sequence]:
        """The sequence, to oneself and at rest."""
        with self._engine.loop.guard, self._claim() as sequence:
            self._settle()
            yield sequence

    def _compute(self) -> None:
        submissions = self._to_compute()
        run_all(self._engine.loop, submissions)
        raise_first_error(submission.output() for submission in submissions)


class AsyncSession(BaseSession):
    """A `Session` whose answers are awaited; made by `AsyncLLM.session`.

    Any number may answer at once, each once at a time. Whoever stops to wait, or to listen, ends the answer
    within a step, and what was generated stays. `close` it, or use it in `async with`; one that is dropped is
    closed too.
    """

    def __init__(self, engine_loop: AsyncEngineLoop, sequence: Sequence) -> None:
        super().__init__(engine_loop.engine, sequence, engine_loop.release)
        self._engine_loop = engine_loop

    async def append(self, text: Prompt) -> None:
        """Adds text or token ids; they are computed with the next answer, fork or `compute`.

        Raises RequestError or OutOfBlocks where there would be no room for an answer; nothing is added then.
        """
        async with self._turn() as sequence:
            sequence.tokens.extend(await self._engine_loop.preparer.run(partial(self._tokens, text)))

    @checked(params=SamplingParams)
    async def generate(
        self, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Goes on; what is generated belongs to the session. One sample: fork for more."""
        async with self._turn() as sequence:
            param, processor = SamplingParams() if params is None else params, self._engine.processor
            prepare = partial(processor.go_on, sequence, param, asked=processor.ask(param, request_id))
            submission = await self._engine_loop.preparer.run(prepare, [param])
            await self._engine_loop.run([submission])
        output = submission.output()
        raise_first_error([output])
        return output

    @checked(params=SamplingParams)
    async def stream(
        self, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[StreamPiece, None]:
        """As `generate`, a piece for every token as it comes; the session is taken until the last."""
        async with self._turn() as sequence:
            param, processor = SamplingParams() if params is None else params, self._engine.processor
            prepare = partial(processor.go_on, sequence, param, asked=processor.ask(param, request_id))
            async with aclosing(self._engine_loop.pieces(prepare, param)) as pieces:
                async for piece in pieces:
                    yield piece

    async def compute(self) -> None:
        """Computes what was appended, while there is time, so that the next answer begins at once."""
        async with self._turn():
            await self._compute()

    async def fork(self) -> AsyncSession:
        """Another session of the same tokens, which shares every block that this one has; first computes what
        was appended, so that none of the two has to."""
        import asyncio

        async with self._turn():
            await self._compute()
            twin = AsyncSession(self._engine_loop, self._twin())
            await asyncio.to_thread(self._share, twin)
        return twin

    async def close(self) -> None:
        """Cancels what it answers and gives its blocks back; may be called twice."""
        self._close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Sequence]:
        """The sequence, to oneself and at rest."""
        import asyncio

        with self._claim() as sequence:
            if sequence.busy:
                await asyncio.to_thread(self._settle)
            yield sequence

    async def _compute(self) -> None:
        submissions = self._to_compute()
        await self._engine_loop.run(submissions)
        raise_first_error(submission.output() for submission in submissions)
