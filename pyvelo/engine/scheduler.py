"""Who runs in the next step, and how many tokens each. Pure: a plan is made, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pyvelo.engine.request import Request
from pyvelo.errors import InternalError
from pyvelo.kv.draft import BlockTable, Draft, Never, NotNow, Swapped
from pyvelo.kv.manager import BlockManager

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
    """One step: sequences that start, those that feed one token, those that feed a piece of their prompt,
    and those that give up their blocks so that others can grow, to host memory or for good."""

    starts: list[Chunk]
    decodes: list[Request]
    chunks: list[Chunk]
    preempted: list[tuple[Request, Swapped | None]]
    draft: Draft

    @property
    def requests(self) -> list[Request]:
        """Everyone who takes part."""
        return self.decodes + [chunk.request for chunk in self.chunks]


def schedule(
    waiting: Iterable[Request],
    running: Sequence[Request],
    manager: BlockManager,
    limits: Limits,
    favour_swap: Callable[[int, int], bool] = lambda n_blocks, n_tokens: True,
) -> StepPlan:
    """Decodes first, then prompts, the whole within `max_batch_tokens`. Both lists are in the order of rank.

    Where blocks run out, whoever ranks last gives up its own, so the first of all always gets on. Whoever
    waits starts in the order of rank, when there are blocks for all its tokens and for some more.
    `favour_swap(blocks, tokens)`: whether it is better to move them out and back than to compute them again.
    """
    draft = manager.draft()
    decodes, prefills, preempted = _grow(running, draft, favour_swap)
    budget = limits.max_batch_tokens - len(decodes)
    chunks: list[Chunk] = []
    for request in prefills:
        if budget == 0:
            break
        chunks.append(_chunk(request, _table(request), budget, draft, request.n_computed))
        budget -= chunks[-1].n_tokens
    if preempted:
        return StepPlan([], decodes, chunks, preempted, draft)
    starts = _start(waiting, len(running), draft, budget, limits, manager.block_size)
    return StepPlan(starts, decodes, chunks + starts, preempted, draft)


def _grow(
    running: Sequence[Request], draft: Draft, favour_swap: Callable[[int, int], bool]
) -> tuple[list[Request], list[Request], list[tuple[Request, Swapped | None]]]:
    """Who decodes, who has more of its prompt to feed, and who must give way."""
    decodes: list[Request] = []
    prefills: list[Request] = []
    preempted: list[tuple[Request, Swapped | None]] = []
    n_left = len(running)
    index = 0
    while index < n_left:
        request = running[index]
        n_next = request.n_computed + 1
        if n_next < len(request.tokens):
            prefills.append(request)  # its blocks are promised
        else:
            table = _table(request)
            while index < n_left and not draft.grow(table, n_next):
                n_left -= 1
                preempted.append((running[n_left], _give_way(running[n_left], draft, favour_swap)))
            if index < n_left:
                decodes.append(request)
        index += 1
    return decodes, prefills, preempted


def _give_way(request: Request, draft: Draft, favour_swap: Callable[[int, int], bool]) -> Swapped | None:
    table = _table(request)
    if table.n_tokens and favour_swap(len(table.blocks), table.n_tokens):
        swapped = draft.swap_out(table)
        if swapped is not None:
            return swapped
    draft.drop(table)
    return None


def _start(
    waiting: Iterable[Request], n_running: int, draft: Draft, budget: int, limits: Limits, block_size: int
) -> list[Chunk]:
    starts: list[Chunk] = []
    for request in waiting:
        if budget == 0 or n_running + len(starts) >= limits.max_seqs:
            break
        # room to grow: for itself, and a block for each of those that run
        n_tokens = min(request.max_stored, len(request.tokens) + block_size)
        spare = n_running + len(starts)
        outcome = draft.start(n_tokens, request.chain, spare, request.swapped)
        if isinstance(outcome, Never):
            raise InternalError(f"a request for {outcome.needed} of {outcome.total} blocks was let in")
        if isinstance(outcome, NotNow):
            break
        starts.append(_chunk(request, outcome.table, budget, draft, outcome.table.n_cached))
        budget -= starts[-1].n_tokens
    return starts


def _chunk(request: Request, table: BlockTable, budget: int, draft: Draft, n_there: int) -> Chunk:
    pending = len(request.tokens) - n_there
    n_tokens = min(pending, budget)
    if not draft.grow(table, n_there + n_tokens):
        raise InternalError("a sequence has no blocks for the tokens that it started with")
    return Chunk(request, table, n_tokens, n_tokens == pending)


def _table(request: Request) -> BlockTable:
    if request.table is None:
        raise InternalError("a request runs without a block table")
    return request.table
