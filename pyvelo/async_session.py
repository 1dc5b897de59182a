"""Sessions for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import TracebackType

from pyvelo.engine.branch import Branch
from pyvelo.engine.intake import Prompt
from pyvelo.engine.pump import Pump
from pyvelo.outputs import RequestOutput, StreamPiece, raise_first_error
from pyvelo.sampling import SamplingParams
from pyvelo.session import HeldBranch

__all__ = ["AsyncSession"]


class AsyncSession(HeldBranch):
    """A `Session` whose answers are awaited; made by `AsyncLLM.session`.

    Any number may answer at once, each once at a time. Whoever stops to wait, or to listen, ends the answer
    within a step, and what was generated stays. `close` it, or use it in `async with`; one that is dropped is
    closed too.
    """

    def __init__(self, pump: Pump, branch: Branch) -> None:
        super().__init__(pump.engine, branch, pump.let_go)
        self._pump = pump

    async def append(self, text: Prompt) -> None:
        """Adds text or token ids; they are computed with the next answer, fork or `compute`.

        Raises RequestError or OutOfBlocks where there would be no room for an answer; nothing is added then.
        """
        async with self._turn() as branch:
            branch.tokens.extend(await self._pump.preparer.run(partial(self._tokens, text)))

    async def generate(self, params: SamplingParams | None = None) -> RequestOutput:
        """Goes on; what is generated belongs to the session. One sample: fork for more."""
        async with self._turn() as branch:
            param, intake = params or SamplingParams(), self._engine.intake
            prepare = partial(intake.go_on, branch, param, asked=intake.ask(param))
            submission = await self._pump.preparer.run(prepare, [param])
            await self._pump.run([submission])
        output = submission.output()
        raise_first_error([output])
        return output

    async def stream(self, params: SamplingParams | None = None) -> AsyncGenerator[StreamPiece, None]:
        """As `generate`, a piece for every token as it comes; the session is taken until the last."""
        async with self._turn() as branch:
            param, intake = params or SamplingParams(), self._engine.intake
            prepare = partial(intake.go_on, branch, param, asked=intake.ask(param))
            async with aclosing(self._pump.pieces(prepare, param)) as pieces:
                async for piece in pieces:
                    yield piece

    async def compute(self) -> None:
        """Computes what was appended, while there is time, so that the next answer begins at once."""
        async with self._turn():
            await self._compute()

    async def fork(self) -> AsyncSession:
        """Another session of the same tokens, which shares every block that this one has; first computes what
        was appended, so that none of the two has to."""
        async with self._turn():
            await self._compute()
            twin = AsyncSession(self._pump, self._twin())
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
        with self._claim() as branch:
            if branch.busy:
                await asyncio.to_thread(self._settle)
            yield branch

    async def _compute(self) -> None:
        submissions = self._to_compute()
        await self._pump.run(submissions)
        raise_first_error(submission.output() for submission in submissions)
