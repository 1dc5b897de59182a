"""A toy model over a pool that is checked slot by slot.

The next token is a hash of the tokens that the block table says are stored; every token is looked up in the
slot where a step wrote it, so a wrong slot, table, position, length or state gives a wrong answer, or none.
"""

from __future__ import annotations

import zlib
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from pyvelo.engine.request import Detokenizer, Request, Sequence
from pyvelo.engine.step import EngineCore
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import FULL, Window
from pyvelo.kv.states import StateManager
from pyvelo.memory.budget import Limits
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams

N_VOCAB = 1000
END = 0  # the toy model never chooses it by itself
EMPTY = -(1 << 30)


def next_token(tokens: abc.Sequence[int]) -> int:
    """What the toy model says after these tokens."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % (N_VOCAB - 1) + 1


def answer(prompt: abc.Sequence[int], n: int) -> tuple[int, ...]:
    """The first `n` tokens that the toy model generates after a prompt, alone."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


def token_bytes(token: int) -> bytes:
    return f"<{token}>".encode()


def text_of(tokens: abc.Sequence[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode()


class FakeArrays:
    def __init__(self, max_tokens: int, max_seqs: int, max_width: int, n_groups: int = 1) -> None:
        garbage = 123_456
        self.tokens = np.full(max_tokens, garbage, np.int32)
        self.positions = np.full(max_tokens, garbage, np.int32)
        self.slots = np.full((n_groups, max_tokens), garbage, np.int32)
        self.outputs = np.full(max_tokens, 7, np.int8)
        self.seqs = np.full((max_seqs, 4), garbage, np.int32)
        self.firsts = np.full((n_groups, max_seqs), garbage, np.int32)
        self.tables = np.full((n_groups, max_seqs, max_width), garbage, np.int32)
        self.states = np.full(max_seqs, garbage, np.int32)


@dataclass
class FakeSampler:
    """Sampler of the toy model's choice; a `status` other than 0 fails the draw."""

    status: int = 0
    prompt: tuple[int, ...] | None = None
    closed: bool = False
    masks: list[bytes] = field(default_factory=list)

    def see_prompt(self, tokens: abc.Sequence[int]) -> None:
        self.prompt = tuple(tokens)

    def mask(self, bits: bytes) -> None:
        self.masks.append(bits)

    def close(self) -> None:
        assert not self.closed, "a sampler is closed once"
        self.closed = True


@dataclass
class Step:
    """One forward pass: the tokens of each sequence."""

    n_tokens: list[int]
    n_outputs: int


@dataclass
class FakeContext:
    """Checks what it is given, stores tokens in slots, and answers from the block tables.

    The first group has no window, and the answer depends on it. Each other group must have the same tokens in
    every slot that its window allows.
    """

    n_blocks: int
    block_size: int
    n_states: int = 0
    windows: tuple[Window, ...] = (FULL,)
    before_run: Callable[[], None] = lambda: None
    before_sample: Callable[[], None] = lambda: None
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = np.full(self.n_blocks * self.block_size, EMPTY, np.int64)
        self.swapped: dict[int, Any] = {}  # host memory
        self.states: dict[int, list[int]] = {}
        self.saved: list[list[int]] = []  # states, whose numbers are in blocks
        self.drawn: list[int] = []  # behind each token whose logits were wanted
        self.rows_drawn: list[int] = []
        self.rows_scored: set[int] = set()
        self.n_copies = 0

    def copy_blocks(self, sources: abc.Sequence[int], targets: abc.Sequence[int]) -> None:
        slots = self.slots.reshape(self.n_blocks, self.block_size)
        for source, target in zip(sources, targets, strict=True):
            assert source != target
            slots[target] = slots[source]
        self.n_copies += len(sources)

    def swap_out(self, blocks: abc.Sequence[int], swap_blocks: abc.Sequence[int]) -> None:
        assert len(set(swap_blocks)) == len(blocks)
        for block, swap_block in zip(blocks, swap_blocks, strict=True):
            self.swapped[swap_block] = self.slots.reshape(self.n_blocks, self.block_size)[block].copy()

    def swap_in(self, swap_blocks: abc.Sequence[int], blocks: abc.Sequence[int]) -> None:
        assert len(set(blocks)) == len(swap_blocks)
        for swap_block, block in zip(swap_blocks, blocks, strict=True):
            self.slots.reshape(self.n_blocks, self.block_size)[block] = self.swapped[swap_block]

    def fill_blocks(self, blocks: abc.Sequence[int], byte: int) -> None:
        self.slots.reshape(self.n_blocks, self.block_size)[list(blocks)] = EMPTY

    def clear_state(self, state: int) -> None:
        assert 0 <= state < self.n_states
        self.states[state] = []

    def copy_state(self, source: int, target: int) -> None:
        self.states[target] = list(self.states[source])

    def save_state(self, state: int, blocks: abc.Sequence[int], *, swapped: bool = False) -> None:
        self.saved.append(list(self.states[state]))
        for part, block in enumerate(blocks):  # no slot of a token has these numbers
            self._block(block, swapped)[:] = -(len(self.saved) * 64 + part)

    def load_state(self, state: int, blocks: abc.Sequence[int], *, swapped: bool = False) -> None:
        parts = [set(self._block(block, swapped).tolist()) for block in blocks]
        number = -parts[0].pop() // 64
        assert parts == [set(), *({-(number * 64 + part)} for part in range(1, len(blocks)))]
        self.states[state] = list(self.saved[number - 1])

    def _block(self, block: int, swapped: bool) -> Any:
        if swapped:
            return self.swapped.setdefault(block, np.full(self.block_size, EMPTY, np.int64))
        return self.slots.reshape(self.n_blocks, self.block_size)[block]

    def run(self, arrays: FakeArrays, n_tokens: int, n_seqs: int, n_copies: int = 0) -> None:
        sizes = arrays.seqs[:n_seqs, 1].tolist()
        firsts = np.cumsum([0, *sizes])
        assert arrays.seqs[:n_seqs, 0].tolist() == firsts[:-1].tolist(), "sequence after sequence"
        assert int(firsts[-1]) == n_tokens > 0
        assert (arrays.seqs[:n_seqs, 3] == 0).all()
        assert set(arrays.outputs[:n_tokens].tolist()) <= {0, 1}
        self._check_tables(arrays, n_seqs)
        self.before_run()
        self.drawn, self.rows_drawn, self.rows_scored = [], [], set()
        for row in range(n_seqs):
            self._run_row(arrays, row, int(firsts[row]), sizes[row])
        self.steps.append(Step(sizes, len(self.drawn)))

    def _check_tables(self, arrays: FakeArrays, n_seqs: int) -> None:
        tables, size = arrays.tables[:, :n_seqs], self.block_size
        held = tables[tables >= 0]
        assert held.size == 0 or int(held.max()) < self.n_blocks
        for group, row in np.ndindex(tables.shape[:2]):
            length, n = int(arrays.seqs[row, 2]), int(arrays.seqs[row, 1])
            first, table = int(arrays.firsts[group, row]), tables[group, row]
            assert 0 <= first <= self.windows[group].first_token(length - n) // size, "freed too early"
            written = table[(length - n) // size - first : -(-length // size) - first]
            assert np.isin(held, written).sum() == len(written), "what is written belongs to one sequence"
            needed = -(-length // size) - first
            assert (table[:needed] >= 0).all()
            assert (table[needed:] == -1).all(), "nothing but -1 past the end"

    def _run_row(self, arrays: FakeArrays, row: int, first: int, n: int) -> None:
        assert n > 0
        length = int(arrays.seqs[row, 2])
        assert arrays.positions[first : first + n].tolist() == list(range(length - n, length))
        fed = arrays.tokens[first : first + n]
        stored = self._store(arrays, row, first, 0, fed)
        for group, window in enumerate(self.windows[1:], 1):
            begin = window.first_token(length - n)
            read = self._store(arrays, row, first, group, fed)
            assert read[begin:].tolist() == stored[begin:].tolist(), "all groups hold the same sequence"
        assert (stored >= 0).all()
        if self.n_states:
            state = self.states[int(arrays.states[row])]
            assert state == stored[: length - n].tolist(), "the state continues its sequence"
            state.extend(fed.tolist())
        wanted = arrays.outputs[first : first + n].tolist()
        known = stored.tolist()
        self.drawn += [next_token(known[: length - n + at + 1]) for at in range(n) if wanted[at]]

    def _store(self, arrays: FakeArrays, row: int, first: int, group: int, fed: Any) -> Any:
        """Store tokens in the slots of a group. Return all tokens that the group has of the sequence."""
        length, size, begin = int(arrays.seqs[row, 2]), self.block_size, int(arrays.firsts[group, row])
        everything = np.arange(begin * size, length)
        where = arrays.tables[group, row, everything // size - begin] * size + everything % size
        new = where[len(where) - len(fed) :]
        assert arrays.slots[group, first : first + len(fed)].tolist() == new.tolist()
        self.slots[new] = fed * len(self.windows) + group  # a block has the K and V of one group
        there = np.full(length, EMPTY, np.int64)
        there[begin * size :], others = np.divmod(self.slots[where] - group, len(self.windows))
        there[begin * size :][others > 0] = EMPTY
        return there

    def sample(self, rows: Any, samplers: abc.Sequence[FakeSampler]) -> tuple[Any, Any]:
        self.before_sample()
        if not self.rows_drawn:
            left = set(range(len(self.drawn))) - self.rows_scored
            assert set(rows.tolist()) == left, "every wanted row is drawn, or scores a prompt"
        self.rows_drawn += rows.tolist()
        assert not any(sampler.closed for sampler in samplers)
        statuses = [sampler.status for sampler in samplers]
        return np.array(self.drawn, np.int32)[rows], np.array(statuses, np.int32)

    def logprobs(self, rows: Any, tokens: Any, k: int) -> tuple[Any, Any, Any]:
        """Return -t / 100 for token t, minus the toy model's token / 100 if it is another one; the likeliest
        tokens are 0, 1, ..., and each row knows one less than the row before."""
        if not set(rows.tolist()) <= set(self.rows_drawn):
            assert not self.rows_drawn, "prompts are scored before anything is drawn"
            assert not self.rows_scored & set(rows.tolist())
            self.rows_scored |= set(rows.tolist())
        top = np.tile(np.arange(k, dtype=np.int32), (len(rows), 1))
        top[top >= N_VOCAB - rows[:, None]] = -1
        said = np.array(self.drawn)[rows]
        return -(tokens + np.where(said == tokens, 0, said)) / 100, top, -top / 100


class Bench:
    """A core over a fake context; `audit` after every step."""

    def __init__(
        self,
        *,
        n_blocks: int = 16,
        block_size: int = 32,
        max_seqs: int = 8,
        max_batch_tokens: int = 64,
        n_states: int = 0,
        state_blocks: int = 1,
        width: int = 64,
        share: bool = True,
        n_swap_blocks: int = 0,
        windows: tuple[Window, ...] = (FULL,),
    ) -> None:
        self.context = FakeContext(n_blocks, block_size, n_states, windows)
        self.manager = (StateManager if n_states else BlockManager)(
            n_blocks,
            block_size,
            windows=windows,
            max_chunk=max_batch_tokens,
            state_blocks=state_blocks if n_states else 0,
            share=share,
            n_swap_blocks=n_swap_blocks,
        )
        self.samplers: list[FakeSampler] = []
        self.requests: list[Request] = []
        self.make_sampler: Callable[[Request], FakeSampler] = lambda request: FakeSampler()
        self.core = EngineCore(
            context=cast(Any, self.context),
            arrays=cast(Any, FakeArrays(max_batch_tokens, max_seqs, width, len(windows))),
            manager=self.manager,
            limits=Limits(max_seqs, max_batch_tokens),
            n_states=n_states,
            new_sampler=cast(Any, self._sampler),
            is_end=lambda token: token == END,
            debug=True,
        )

    def _sampler(self, request: Request) -> FakeSampler:
        self.samplers.append(self.make_sampler(request))
        return self.samplers[-1]

    def request(
        self,
        prompt: abc.Sequence[int],
        max_new: int = 4,
        on_piece: Any = None,
        sequence: Sequence | None = None,
        **params: Any,
    ) -> Request:
        """A request that was let in; the caller submits it."""
        settings = SamplingParams(**params)
        stops = cast("tuple[str, ...]", settings.stop)
        detokenizer = Detokenizer(token_bytes, stops)
        request = Request(
            sequence or Sequence(prompt, self.manager.block_size, settings.cache_salt),
            settings,
            max_new=max_new,
            seed=0,
            detokenizer=detokenizer,
            on_piece=on_piece,
            keeps_blocks=sequence is not None,
        )
        self.requests.append(request)
        return request

    def sequence(self, tokens: abc.Sequence[int] = ()) -> Sequence:
        return Sequence(tokens, self.manager.block_size)

    def go_on(self, sequence: Sequence, max_new: int = 4, **params: Any) -> Request:
        """A request behind the tokens of a sequence, submitted."""
        return self.submit(sequence.tokens, max_new, sequence=sequence, **params)

    def submit(self, *args: Any, **kwargs: Any) -> Request:
        request = self.request(*args, **kwargs)
        self.core.inbox.submit([request])
        return request

    def step(self) -> bool:
        progress = self.core.step()
        self.manager.audit()
        return progress

    def finish(self, *requests: Request, limit: int = 10_000) -> None:
        """Steps until these are done."""
        for _ in range(limit):
            if all(request.finished for request in requests):
                return
            assert self.step(), "no progress"
        raise AssertionError("too many steps")

    @property
    def free_states(self) -> list[int]:
        """The recurrent states that no request uses."""
        return sorted(self.core._states.free) if self.core._states is not None else []

    def assert_idle(self) -> None:
        """Nothing is held any more."""
        assert self.core.n_running == self.core.n_waiting == len(self.core.idle) == 0
        assert self.manager.n_used == self.manager.n_reserved == 0
        assert self.manager.swap.n_free == self.manager.swap.n_blocks
        assert all(sampler.closed for sampler in self.samplers)
        for request in self.requests:
            assert request.sequence.table is request.sequence.swapped is request.sampler is None
        self.manager.audit()


def joined(pieces: abc.Sequence[StreamPiece]) -> str:
    return "".join(piece.text for piece in pieces)
