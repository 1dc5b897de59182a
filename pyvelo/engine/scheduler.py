"""Who runs in the next step, and how many tokens each. Pure: a plan is made, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from pyvelo.engine.branch import Branch
from pyvelo.engine.request import Request
from pyvelo.errors import InternalError
from pyvelo.kv.draft import BlockTable, Draft, Never, NotNow, Start, Swapped
from pyvelo.kv.manager import BlockManager

__all__ = ["SCORED_TOKENS", "Chunk", "Limits", "StepPlan", "schedule"]

SCORED_TOKENS = 64
"""Of prompts, whose logits a step gives beside those that a token is drawn from: each is as long as the
vocabulary."""


class Limits(NamedTuple):
    """What one step may hold; `max_seqs` is at most `max_batch_tokens`, so that all who run can decode."""

    max_seqs: int
    max_batch_tokens: int

    @property
    def max_outputs(self) -> int:
        """Tokens whose logits are asked for."""
        return min(self.max_batch_tokens, self.max_seqs + SCORED_TOKENS)


class Chunk(NamedTuple):
    """The next `n_tokens` tokens of a sequence; `last` when its next token can be drawn after them."""

    request: Request
    table: BlockTable
    n_tokens: int
    last: bool


class StepPlan(NamedTuple):
    """One step: sequences that start, those that feed one token, those that feed a piece of their prompt, and
    those that give up their blocks so that others can grow, to host memory or for good: of the branches that
    rest, and of those that ran."""

    starts: list[Chunk]
    decodes: list[Request]
    chunks: list[Chunk]
    evicted: list[tuple[Branch, Swapped | None]]
    preempted: list[tuple[Request, Swapped | None]]
    draft: Draft

    @property
    def requests(self) -> list[Request]:
        """Everyone who takes part."""
        return self.decodes + [chunk.request for chunk in self.chunks]


def schedule(
    waiting: Sequence[Request],
    running: Sequence[Request],
    manager: BlockManager,
    limits: Limits,
    favour_swap: Callable[[int, int], bool] = lambda n_blocks, n_tokens: True,
    resting: Iterable[Branch] = (),
    allowance: Callable[[int, int, int], int] | None = None,
) -> StepPlan:
    """Decodes first, then prompts, the whole within `max_batch_tokens`. Both lists are in the order of rank.

    Where blocks run out, branches at rest give up theirs, the longest at rest first, and then whoever ranks
    last of those that run; so the first of all always gets on. Whoever waits starts in the order of rank, if
    there are blocks for all its tokens and for some more; those of lower priority give way to it.
    `favour_swap(blocks, tokens)`: whether it is better to move them out and back than to compute them again.
    `allowance(decodes, listening, waiting)`: tokens of prompts that a step may take beside so many that are
    decoded, while so many listen to them, and so many wait for the end of their prompts.
    """
    planner = _Planner(running, manager, limits, favour_swap, resting)
    n_listening = sum(r.on_piece is not None and r.n_generated > 0 for r in running)
    if allowance is not None and n_listening:
        n_decodes = sum(r.n_computed + 1 == len(r.tokens) for r in running)
        if n_decodes:  # who listens may be computed again
            planner.allowance = allowance(n_decodes, n_listening, len(waiting) + len(running) - n_decodes)
    urgent = planner.start_urgent(waiting)
    planner.grow()
    planner.feed()
    if not planner.preempted:
        planner.start(islice(waiting, urgent, None))
    return planner.plan()


class _Refusal(Enum):
    """Why a request does not start in this step, where that is not for want of blocks."""

    FULL = auto()  # the step holds as many sequences or tokens as it may
    LATER = auto()  # its branch gives way in this step: it can come back in the next


class _Planner:
    """A plan that is being made."""

    def __init__(
        self,
        running: Sequence[Request],
        manager: BlockManager,
        limits: Limits,
        favour_swap: Callable[[int, int], bool],
        resting: Iterable[Branch],
    ) -> None:
        self.running = list(running)  # those that have not given way
        self.resting = iter(resting)  # those that nobody asked to give way
        self.resumed: list[BlockTable] = []
        self.draft = manager.draft()
        self.limits = limits
        self.favour_swap = favour_swap
        self.block_size = manager.block_size
        self.budget = limits.max_batch_tokens
        self.allowance = limits.max_batch_tokens  # tokens of prompts
        self.scored = 0
        self.starts: list[Chunk] = []
        self.decodes: list[Request] = []
        self.prefills: list[Request] = []
        self.chunks: list[Chunk] = []
        self.evicted: list[tuple[Branch, Swapped | None]] = []
        self.preempted: list[tuple[Request, Swapped | None]] = []

    def plan(self) -> StepPlan:
        chunks = self.chunks + self.starts
        return StepPlan(self.starts, self.decodes, chunks, self.evicted, self.preempted, self.draft)

    def start_urgent(self, waiting: Sequence[Request]) -> int:
        """Starts those that wait although somebody of lower priority and rank runs, in its place where there
        is none for both and it is enough; returns how many."""
        left = self.allowance
        for number, request in enumerate(waiting):
            last = self.running[-1] if self.running else None
            if last is None or not _outranks(request, last) or left == 0:
                return number
            # who runs may decode
            while not isinstance(
                outcome := self._start(request, min(left, self.budget - len(self.running))), Chunk
            ):
                if not self._gets_room(request, outcome):
                    return number
                self._preempt()
            self.budget -= outcome.n_tokens
            left -= outcome.n_tokens
        return len(waiting)

    def grow(self) -> None:
        """Who decodes, who has more of its prompt to feed, and who must give way."""
        grow, decodes = self.draft.grow, self.decodes
        for request in self.running:  # whoever gives way leaves its end
            n_next = request.n_computed + 1
            if n_next < len(request.tokens):
                self.prefills.append(request)  # its blocks are promised
            elif grow(_table(request), n_next) or self._make_room(request, n_next):
                decodes.append(request)
        n_started = sum(chunk.n_tokens for chunk in self.starts)
        self.budget = min(self.budget - len(self.decodes), self.allowance - n_started)

    def feed(self) -> None:
        """The next pieces of prompts."""
        for request in self.prefills:
            if self.budget == 0:
                break
            self.chunks.append(self._chunk(request, _table(request), self.budget, request.n_computed))
            self.budget -= self.chunks[-1].n_tokens

    def start(self, waiting: Iterable[Request]) -> None:
        """Those that wait, in the order of rank."""
        for request in waiting:
            outcome = self._start(request, self.budget)
            if not isinstance(outcome, Chunk):
                break
            self.budget -= outcome.n_tokens

    def _start(self, request: Request, budget: int) -> Chunk | NotNow | _Refusal:
        """Its first piece, or why there is none."""
        spare = len(self.running) + len(self.starts)
        if spare >= self.limits.max_seqs or budget <= 0:
            return _Refusal.FULL
        # room to grow: for itself, and a block for each of those that run
        n_tokens = min(request.max_stored, len(request.tokens) + self.block_size)
        held = request.branch.table if request.branch is not None else None
        if held is not None and self.draft.leaves(held):
            return _Refusal.LATER
        while True:
            outcome: Start | NotNow | Never
            if held is not None:
                outcome = self.draft.resume(held, n_tokens, spare)
            else:
                outcome = self.draft.start(
                    n_tokens, request.chain, spare, request.swapped, request.most_cached
                )
            if isinstance(outcome, Never):
                raise InternalError(f"a request for {outcome.needed} of {outcome.total} blocks was let in")
            if not isinstance(outcome, NotNow):
                break
            if not self._evict(held):
                if held is not None and not spare:
                    self._evict_own(request)  # its next block may be one to copy, and there is no other
                return outcome
        table = outcome.table
        if held is not None:
            self.resumed.append(held)
        self.starts.append(self._chunk(request, table, budget, table.n_tokens))
        return self.starts[-1]

    def _chunk(self, request: Request, table: BlockTable, budget: int, n_there: int) -> Chunk:
        pending = len(request.tokens) - n_there
        n_tokens = self._piece(request, n_there, min(pending, budget))
        if not self.draft.grow(table, n_there + n_tokens):
            raise InternalError("a sequence has no blocks for the tokens that it started with")
        return Chunk(request, table, n_tokens, n_tokens == pending)

    def _piece(self, request: Request, n_there: int, n_tokens: int) -> int:
        """How many of the next `n_tokens` a step takes. Whoever wants the logits of all gets those of one at
        least: there is a row for everyone who may draw."""
        n_rows = n_there + n_tokens - len(request.prompt_logprobs)
        if not request.scores or n_rows <= 0:  # what it computes again was scored before
            return n_tokens
        fewer = max(0, n_rows - 1 - (SCORED_TOKENS - self.scored))
        self.scored += n_rows - 1 - fewer
        return n_tokens - fewer

    # ---- who gives way ----

    def _make_room(self, request: Request, n_tokens: int) -> bool:
        """Others give way until it can grow; False where it was the last who could."""
        table = _table(request)
        while True:
            if not self._evict(None):
                self._preempt()
                if request is self.preempted[-1][0]:
                    return False
            if self.draft.grow(table, n_tokens):
                return True

    def _evict(self, keep: BlockTable | None) -> bool:
        """The branch that rests longest gives way, but not `keep`; False where there is none."""
        for branch in self.resting:
            table = branch.table
            if table is not None and table is not keep and table not in self.resumed:
                self.evicted.append((branch, self._give_way(table)))
                return True
        return False

    def _evict_own(self, request: Request) -> None:
        branch = request.branch
        if branch is not None and branch.table is not None:
            self.evicted.append((branch, self._give_way(branch.table)))

    def _preempt(self) -> None:
        request = self.running.pop()
        self.preempted.append((request, self._give_way(_table(request))))

    def _gets_room(self, request: Request, why: NotNow | _Refusal) -> bool:
        """Whether it could start if all of lower priority gave way who rank last of those that run."""
        lower = list(takewhile(partial(_outranks, request), reversed(self.running)))
        if isinstance(why, _Refusal):
            return why is _Refusal.FULL and bool(lower)
        # a block for each of those that run was to be left
        available = why.available + len(lower) + self.draft.would_free(map(_table, lower))
        return why.needed <= available

    def _give_way(self, table: BlockTable) -> Swapped | None:
        if table.n_tokens and self.favour_swap(len(table.blocks), table.n_tokens):
            swapped = self.draft.swap_out(table)
            if swapped is not None:
                return swapped
        self.draft.drop(table)
        return None


def _outranks(request: Request, other: Request) -> bool:
    """Whether one comes first for being more important, not only for having come earlier."""
    return request.params.priority > other.params.priority and request.rank < other.rank


def _table(request: Request) -> BlockTable:
    if request.table is None:
        raise InternalError("a request runs without a block table")
    return request.table
