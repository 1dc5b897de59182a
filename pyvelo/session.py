"""Sessions, blocking and asyncio: token sequences that a user continues and forks."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from pyvelo.engine.engine import Engine
from pyvelo.engine.input_processor import Prompt
from pyvelo.engine.loop import Stream, run_all
from pyvelo.engine.output import Submission
from pyvelo.engine.request import Branch
from pyvelo.errors import ClosedError, RequestError
from pyvelo.keywords import checked
from pyvelo.outputs import RequestOutput, StreamPiece, raise_first_error
from pyvelo.sampling import SamplingParams

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import (
        AsyncEngineLoop,  # imports asyncio, which blocking sessions do without
    )

__all__ = ["AsyncSession", "HeldBranch", "Session"]


class HeldBranch:
    """What `Session` and `AsyncSession` share: the text, and whose turn it is. `let_go` gives it back."""

    def __init__(self, engine: Engine, branch: Branch, let_go: Callable[[Branch], None]) -> None:
        self._engine = engine
        self._branch = branch
        self._lock = threading.Lock()
        self._let_go = let_go
        self._dropped = weakref.finalize(self, engine.loop.abandon_branch, branch)
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
                self._let_go(self._branch)

    @contextmanager
    def _claim(self) -> Iterator[Branch]:
        """The branch, to oneself; it may still be `busy` with what was cancelled in the middle of a step."""
        self._take()
        try:
            yield self._branch
        finally:
            self._lock.release()

    def _take(self) -> None:
        """Acquire the lock; RequestError where another call has it."""
        self._engine.loop.check_open()
        if self.closed:
            raise ClosedError("this session was closed")
        if not self._lock.acquire(blocking=False):
            raise RequestError("this session is answering: wait until it has, or fork it before")

    def _current(self) -> Branch:
        """Return the branch as it is now; an answer that was cancelled may still add a token to it."""
        return self._branch

    def _settle(self) -> None:
        """Waits until what was cancelled has ended."""
        if self._branch.busy:
            with self._engine.loop.visit():
                pass

    def _tokens(self, text: Prompt) -> Sequence[int]:
        """What `text` appends, if there is room for it."""
        branch, processor = self._branch, self._engine.processor
        tokens = processor.tokens(text, add_special=not branch.tokens)
        processor.check_room(len(branch.tokens) + len(tokens))
        return tokens

    def _to_compute(self) -> list[Submission]:
        """What computes what is not computed yet, where it can be shared and something can follow it."""
        branch, processor = self._branch, self._engine.processor
        if (
            len(branch.tokens) > 1
            and not branch.computed
            and processor.can_fork
            and processor.has_room(branch)
        ):
            return [processor.compute(branch)]
        return []

    def _twin(self) -> Branch:
        return self._branch.fork(self._branch.tokens, len(self._branch.tokens))

    def _share(self, twin: HeldBranch) -> None:
        """Lets another session share the blocks of this one."""
        with self._engine.loop.visit() as core:
            core.shelf.fork(self._branch, twin._branch)


class Session(HeldBranch):
    """Text that grows, by what is appended and by what is generated behind it; made by `LLM.session`.

    What is computed stays in the cache from answer to answer: each computes only what is new. Forks share all
    that was there when they were made. A session at rest gives its blocks up before any request has to, and
    gets them back, or computes them again, when it goes on: it never stands in the way, and loses no text.

    Several threads may use different sessions at once; one session answers once at a time. `close` it, or use
    it in `with`; one that is dropped is closed too.
    """

    def __init__(self, engine: Engine, branch: Branch) -> None:
        super().__init__(engine, branch, engine.loop.let_go)

    def append(self, text: Prompt) -> None:
        """Adds text or token ids; they are computed with the next answer, fork or `compute`.

        Raises RequestError or OutOfBlocks where there would be no room for an answer; nothing is added then.
        """
        with self._turn() as branch:
            branch.tokens.extend(self._tokens(text))

    @checked(params=SamplingParams)
    def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Goes on; what is generated belongs to the session. One sample: fork for more."""
        with self._turn() as branch:
            processor = self._engine.processor
            param = params or SamplingParams()
            submission = processor.go_on(branch, param, asked=processor.ask(param))
            run_all(self._engine.loop, [submission])
        output = submission.output()
        raise_first_error([output])
        return output

    @checked(params=SamplingParams)
    def stream(self, params: SamplingParams | None = None) -> Generator[StreamPiece, None, None]:
        """As `generate`, a piece for every token as it comes; the session is taken until the
        last. Closing the generator cancels the rest; what was generated stays."""
        pieces: deque[StreamPiece] = deque()

        def begin() -> Submission:
            self._take()
            try:
                self._settle()
                return self._engine.processor.go_on(self._branch, params or SamplingParams(), pieces.append)
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

    def _current(self) -> Branch:
        """Return the branch; after an answer that was cancelled, as the step in progress leaves it."""
        if not self._lock.locked():
            self._settle()
        return self._branch

    @contextmanager
    def _turn(self) -> Iterator[Branch]:
        """The branch, to oneself and at rest."""
        with self._engine.loop.guard, self._claim() as branch:
            self._settle()
            yield branch

    def _compute(self) -> None:
        submissions = self._to_compute()
        run_all(self._engine.loop, submissions)
        raise_first_error(submission.output() for submission in submissions)


class AsyncSession(HeldBranch):
    """A `Session` whose answers are awaited; made by `AsyncLLM.session`.

    Any number may answer at once, each once at a time. Whoever stops to wait, or to listen, ends the answer
    within a step, and what was generated stays. `close` it, or use it in `async with`; one that is dropped is
    closed too.
    """

    def __init__(self, engine_loop: AsyncEngineLoop, branch: Branch) -> None:
        super().__init__(engine_loop.engine, branch, engine_loop.let_go)
        self._engine_loop = engine_loop

    async def append(self, text: Prompt) -> None:
        """Adds text or token ids; they are computed with the next answer, fork or `compute`.

        Raises RequestError or OutOfBlocks where there would be no room for an answer; nothing is added then.
        """
        async with self._turn() as branch:
            branch.tokens.extend(await self._engine_loop.preparer.run(partial(self._tokens, text)))

    @checked(params=SamplingParams)
    async def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Goes on; what is generated belongs to the session. One sample: fork for more."""
        async with self._turn() as branch:
            param, processor = params or SamplingParams(), self._engine.processor
            prepare = partial(processor.go_on, branch, param, asked=processor.ask(param))
            submission = await self._engine_loop.preparer.run(prepare, [param])
            await self._engine_loop.run([submission])
        output = submission.output()
        raise_first_error([output])
        return output

    @checked(params=SamplingParams)
    async def stream(self, params: SamplingParams | None = None) -> AsyncGenerator[StreamPiece, None]:
        """As `generate`, a piece for every token as it comes; the session is taken until the last."""
        async with self._turn() as branch:
            param, processor = params or SamplingParams(), self._engine.processor
            prepare = partial(processor.go_on, branch, param, asked=processor.ask(param))
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
    async def _turn(self) -> AsyncIterator[Branch]:
        """The branch, to oneself and at rest."""
        import asyncio

        with self._claim() as branch:
            if branch.busy:
                await asyncio.to_thread(self._settle)
            yield branch

    async def _compute(self) -> None:
        submissions = self._to_compute()
        await self._engine_loop.run(submissions)
        raise_first_error(submission.output() for submission in submissions)
