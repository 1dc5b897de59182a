"""Who runs in the next step, and how many tokens each. Pure: a plan is made, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyvelo.engine.request import Request
from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager, BlockTable, Draft, Never, NotNow

__all__ = ["Chunk", "Limits", "StepPlan", "schedule"]


class Limits(NamedTuple):
    """What one step may hold; `max_seqs` is at most `max_batch_tokens`, so that all who run can decode."""

    max_seqs: int
    max_batch_tokens: int


class Chunk(NamedTuple):
    """The next `n_tokens` tokens of a sequence; `last` when its next token can be drawn after them."""

    request: Request
    table: BlockTable
    n_tokens: int
    last: bool


class StepPlan(NamedTuple):
    """One step: sequences that start, those that feed one token, those that feed a piece of their prompt."""

    starts: list[Chunk]
    decodes: list[Request]
    chunks: list[Chunk]
    draft: Draft

    @property
    def requests(self) -> list[Request]:
        """Everyone who takes part."""
        return self.decodes + [chunk.request for chunk in self.chunks]


def schedule(
    waiting: Iterable[Request], running: Sequence[Request], manager: BlockManager, limits: Limits
) -> StepPlan:
    """Decodes first, then prompts in the order in which they came, the whole within `max_batch_tokens`.

    Whoever waits starts in the order of arrival, when the blocks of its worst case can be promised.
    """
    draft = manager.draft()
    grow = draft.grow
    decodes: list[Request] = []
    prefills: list[Request] = []
    for request in running:
        n_next = request.n_computed + 1
        if n_next == len(request.tokens):
            decodes.append(request)
            grow(_table(request), n_next)
        else:
            prefills.append(request)
    budget = limits.max_batch_tokens - len(decodes)
    chunks: list[Chunk] = []
    for request in prefills:
        if budget == 0:
            break
        chunks.append(_chunk(request, _table(request), budget, draft, request.n_computed))
        budget -= chunks[-1].n_tokens
    starts: list[Chunk] = []
    for request in waiting:
        if budget == 0 or len(running) + len(starts) >= limits.max_seqs:
            break
        outcome = draft.start(request.max_stored, request.chain)
        if isinstance(outcome, Never):
            raise InternalError(f"a request for {outcome.needed} of {outcome.total} blocks was let in")
        if isinstance(outcome, NotNow):
            break
        starts.append(_chunk(request, outcome.table, budget, draft, outcome.table.n_cached))
        budget -= starts[-1].n_tokens
    return StepPlan(starts, decodes, chunks + starts, draft)


def _chunk(request: Request, table: BlockTable, budget: int, draft: Draft, n_there: int) -> Chunk:
    pending = len(request.tokens) - n_there
    n_tokens = min(pending, budget)
    draft.grow(table, n_there + n_tokens)
    return Chunk(request, table, n_tokens, n_tokens == pending)


def _table(request: Request) -> BlockTable:
    if request.table is None:
        raise InternalError("a request runs without a block table")
    return request.table
