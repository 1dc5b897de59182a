"""A toy model over a paged pool: it attends to every slot that the window of each group of layers allows,
verifies what it reads, and fails if told to.

The next token is drawn from a digest of what is read (toy_values.py). So a wrong slot, block table, position,
length, state or salt gives another answer, and is also noted at once, in `ToyContext.wrong`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyvelo.engine.request import Request
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import Window

from .fakes import FakeArrays
from .toy_values import (
    END,
    N_VOCAB,
    Attention,
    Expected,
    Values,
    allowed_tokens,
    ends,
    logprob,
    next_token,
    salt_of,
)

EMPTY = -1


def naive_answer(
    request: Request, salt: str, prompt: Sequence[int], windows: Sequence[Window]
) -> tuple[list[int], str, int | None]:
    """Return what one sequence alone must generate without a cache, its finish reason and its stop reason."""
    matcher = request.matcher.seed if isinstance(request.matcher, ToyMatcher) else None
    length = request.matcher.length if isinstance(request.matcher, ToyMatcher) else 0
    answer: list[int] = []
    values = Values(windows, salt, prompt)
    for number in range(request.max_new):
        allowed = allowed_tokens(matcher, number)
        if number < request.params.min_tokens:
            going_on = [token for token in allowed if not ends(request, token)]
            allowed = going_on if going_on or matcher is None else allowed
        token = next_token(values.logits[-1], request.seed, number, allowed)
        answer.append(token)
        if token == END and not request.params.ignore_eos:
            return answer, "stop", None
        if token in request.stop_ids:
            return answer, "stop", token
        if length and number + 1 == length:
            return answer, "stop", None
        values.extend([token])
    return answer, "length", None


# ---- failures ----


class Injected(Exception):
    """An error of a call that the engine makes."""


class Interrupt(KeyboardInterrupt):
    """Exception of a signal handler in the middle of a call."""


@dataclass
class _Fault:
    call: str
    moment: str
    countdown: int
    act: Callable[[], None]


class Faults:
    """Failures to come: `arm` says at which call, `check` is called there."""

    def __init__(self) -> None:
        self._armed: list[_Fault] = []
        self.raised: list[BaseException] = []

    def arm(self, call: str, moment: str, countdown: int, error: type[BaseException]) -> None:
        """Raise `error` at the moment, "before", "middle" or "after", of the call after `countdown` more."""

        def act() -> None:
            self.raised.append(error(f"{moment} {call}"))
            raise self.raised[-1]

        self._armed.append(_Fault(call, moment, countdown, act))

    def arm_action(self, call: str, countdown: int, action: Callable[[], None]) -> None:
        """Do something there instead, as another thread would."""
        self._armed.append(_Fault(call, "middle", countdown, action))

    def off(self) -> None:
        self._armed.clear()

    def check(self, call: str, moment: str = "before") -> None:
        for fault in self._armed:
            if fault.call == call and fault.moment == moment:
                fault.countdown -= 1
                if fault.countdown < 0:
                    self._armed.remove(fault)
                    fault.act()
                return

    def caused(self, error: BaseException | None) -> bool:
        """Whether an armed failure is what was raised, or its stated cause."""
        while error is not None:
            if any(error is raised for raised in self.raised):
                return True
            error = error.__cause__
        return False


# ---- the parts of a model ----


@dataclass(eq=False)
class ToyAdapter:
    """Adapter whose key, like a salt, changes all values that its sequences store."""

    key: bytes


class ToyMatcher:
    """Matcher that allows some of the tokens; the answer is complete after `length`."""

    def __init__(self, faults: Faults, seed: int, length: int) -> None:
        self.seed, self.length = seed, length
        self._faults = faults
        self._number = 0

    def mask(self) -> bytes:
        self._faults.check("matcher")
        bits = np.zeros(N_VOCAB, np.uint8)
        bits[allowed_tokens(self.seed, self._number)] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def accept(self, token: int) -> bool:
        self._faults.check("accept")
        self._number += 1
        return self._number == self.length


class ToySampler:
    """Draws the tokens of one request, and knows which."""

    def __init__(self, context: ToyContext, request: Request) -> None:
        context.faults.check("sampler")
        self.request = request
        self.closed = False
        self._context = context
        self._n_drawn = 0
        self._prompt: tuple[int, ...] | None = None
        self._allowed: Sequence[int] = range(N_VOCAB)

    def see_prompt(self, tokens: Sequence[int]) -> None:
        self._context.faults.check("see_prompt")
        self._context.note(self._prompt is None, "a sampler sees its prompt twice")
        self._prompt = tuple(tokens)

    def mask(self, bits: bytes) -> None:
        self._context.faults.check("mask")
        found = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        self._allowed = found.tolist() if bits else range(N_VOCAB)

    def draw(self, logits: int) -> int:
        request, note = self.request, self._context.note
        note(not self.closed and not request.finished, "a sampler draws after the end")
        note(self._n_drawn == request.n_generated or not request.max_new, "a draw was lost, or made twice")
        seen = request.prompt_ids if request.params.repetition_penalty != 1.0 else None
        note(self._prompt == seen, "a sampler has not seen its prompt")
        wanted = self._context.expected.values(request).logits[-1]
        note(logits == wanted, "the logits are not those behind the tokens of the request")
        self._n_drawn += 1
        return next_token(logits, request.seed, self._n_drawn - 1, self._allowed)

    def close(self) -> None:
        self._context.note(not self.closed, "a sampler is closed twice")
        self.closed = True


@dataclass
class ToyContext:
    """Context that stores the token of each slot, and verifies each read of a sequence.

    `owners` are the requests of the rows of the next step; `wrong` is what should not have happened.
    """

    manager: BlockManager
    faults: Faults
    n_states: int
    max_outputs: int
    advance_clock: Callable[[], None]
    owners: Sequence[Request] = ()
    wrong: list[str] = field(default_factory=list)
    n_runs: int = 0

    def __post_init__(self) -> None:
        self._windows = self.manager.layout.windows
        self.expected = Expected(self._windows)
        self._size = self.manager.block_size
        self._slots = np.full((self.manager.n_blocks, self._size), EMPTY, np.int64)
        self._host = np.full((self.manager.swap.n_blocks, self._size), EMPTY, np.int64)
        self._states: list[tuple[int, int] | None] = [None] * self.n_states  # tokens, and their digest
        self._saved: list[tuple[int, int] | None] = []  # states, whose numbers are in blocks
        self._logits: list[int] = []
        self.adapter: Any = None  # that is applied

    def note(self, right: bool, otherwise: str) -> None:
        if not right:
            self.wrong.append(otherwise)

    # ---- whole blocks ----

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.faults.check("copy")
        for source, target in zip(sources, targets, strict=True):
            self.note(source != target, "a block is copied to itself")
            self._slots[target] = self._slots[source]
            self.faults.check("copy", "middle")
        self.faults.check("copy", "after")

    def swap_out(self, blocks: Sequence[int], swap_blocks: Sequence[int]) -> None:
        self.faults.check("swap_out")
        self.note(len(set(swap_blocks)) == len(blocks), "a swap block is used twice")
        for block, swap_block in zip(blocks, swap_blocks, strict=True):
            self._host[swap_block] = self._slots[block]
            self.faults.check("swap_out", "middle")
        self.faults.check("swap_out", "after")

    def swap_in(self, swap_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self.faults.check("swap_in")
        for swap_block, block in zip(swap_blocks, blocks, strict=True):
            self._slots[block] = self._host[swap_block]
            self.faults.check("swap_in", "middle")
        self.faults.check("swap_in", "after")

    def fill_blocks(self, blocks: Sequence[int], byte: int) -> None:
        self.faults.check("fill")
        self._slots[list(blocks)] = EMPTY

    def clear_state(self, state: int) -> None:
        self.faults.check("clear_state")
        self._states[state] = (0, 0)

    def copy_state(self, source: int, target: int) -> None:
        self.faults.check("copy_state")
        self._states[target] = self._states[source]
        self.faults.check("copy_state", "after")

    def save_state(self, state: int, blocks: Sequence[int], *, swapped: bool = False) -> None:
        self.faults.check("save_state")
        number = len(self._saved) + 2
        self._saved.append(self._states[state])
        self.note(len(set(blocks)) == len(blocks) == self.manager.layout.state_blocks, "blocks of a state")
        for part, block in enumerate(blocks):  # no slot of a token has these numbers
            (self._host if swapped else self._slots)[block] = -(number * 64 + part)
            self.faults.check("save_state", "middle")
        self.faults.check("save_state", "after")

    def load_state(self, state: int, blocks: Sequence[int], *, swapped: bool = False) -> None:
        self.faults.check("load_state")
        read = (self._host if swapped else self._slots)[list(blocks)]
        number = int(-read[0, 0]) // 64
        wanted = -(number * 64 + np.arange(len(blocks)))
        if 2 <= number < len(self._saved) + 2 and (read == wanted[:, None]).all():
            self._states[state] = self._saved[number - 2]
        else:
            self.wrong.append(f"blocks {list(blocks)} hold no state but {read[:, 0].tolist()}")
        self.faults.check("load_state", "after")

    # ---- a step ----

    def adapt(self, adapter: Any) -> None:
        self.faults.check("adapt")
        self.adapter = adapter
        self.faults.check("adapt", "after")

    def run(self, arrays: FakeArrays, n_tokens: int, n_seqs: int, n_copies: int = 0) -> None:
        self.n_runs += 1
        self.advance_clock()
        self._logits = []
        self.faults.check("run")
        owners, sizes = self.owners, arrays.seqs[:n_seqs, 1].tolist()
        adapters = {owner.sequence.adapter for owner in owners}
        self.note(adapters == {self.adapter}, "a step has requests of another adapter than its own")
        self.note(len(owners) == n_seqs and sum(sizes) == n_tokens and n_copies == 0, "sizes of a step")
        self._check_writes(arrays, n_tokens)
        logits: list[int] = []
        try:
            first = 0
            for row, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
                logits += self._run_row(arrays, row, first, size, owner)
                first += size
                self.faults.check("run", "middle")
            self.faults.check("run", "after")
        except BaseException:
            self._states = [None] * self.n_states
            raise
        self.note(len(logits) <= self.max_outputs, "more logits than there is room for")
        self._logits = logits

    def _check_writes(self, arrays: FakeArrays, n_tokens: int) -> None:
        slots = arrays.slots[:, :n_tokens].reshape(-1).tolist()
        self.note(len(set(slots)) == len(slots), "a slot is written twice")
        written = {slot // self._size for slot in slots}
        self.note(not written & self.manager.published(), "a published block is written")
        tables = self.manager.tables()
        held = [block for table in tables for blocks in table.groups for block in blocks]
        self.note(all(held.count(block) == 1 for block in written), "a block of another sequence is written")

    def _run_row(self, arrays: FakeArrays, row: int, first: int, n: int, owner: Request) -> list[int]:
        length = int(arrays.seqs[row, 2])
        start = length - n
        fed = arrays.tokens[first : first + n].tolist()
        self.note(arrays.seqs[row].tolist() == [first, n, length, 0] and n > 0 <= start, "a row's numbers")
        self.note(fed == owner.tokens[start:length].tolist(), "the tokens of a row")
        positions = arrays.positions[first : first + n].tolist()
        self.note(positions == list(range(start, length)), "the positions of a row")
        attention, wanted = Attention(self._windows, salt_of(owner)), self.expected.values(owner)
        targets = [
            self._read(arrays, row, group, start, attention, wanted) for group in range(len(self._windows))
        ]
        for group, target in enumerate(targets):
            slots = arrays.slots[group, first : first + n].tolist()
            self.note(slots == target.tolist(), "the slots of a row")
        if self.n_states:
            state, before = self._states[int(arrays.states[row])], wanted.logits[start] if start else 0
            self.note(state == (start, before), "a recurrent state is not of its sequence")
        outputs = arrays.outputs[first : first + n].tolist()
        self.note(set(outputs) <= {0, 1}, "outputs are 0 or 1")
        behind = [attention.add(start + number, token) for number, token in enumerate(fed)]
        for values, target in zip(attention.values, targets, strict=True):
            self._slots.reshape(-1)[target] = values[-n:]
        if self.n_states:
            self._states[int(arrays.states[row])] = (length, behind[-1])
        return [logits for logits, output in zip(behind, outputs, strict=True) if output]

    def _read(
        self, arrays: FakeArrays, row: int, group: int, start: int, attention: Attention, wanted: Values
    ) -> Any:
        """Read the values of a group before position `start` that its window allows, through the table.

        Return the slots of the row's tokens, which are written next.
        """
        size, length = self._size, int(arrays.seqs[row, 2])
        table, begin = arrays.tables[group, row], int(arrays.firsts[group, row])
        held = self.owners[row].sequence.table
        blocks = held.groups[group] if held is not None else []  # one more after a step cut short
        first = held.firsts[group] if held is not None else 0
        row_wanted = blocks + [-1] * (len(table) - len(blocks))
        reaches = (first + len(blocks)) * size >= length
        self.note(table.tolist() == row_wanted and begin == first and reaches, "a row's block table")
        low = self._windows[group].first_token(start)
        self.note(low // size >= begin, f"a window reads position {low}, whose block is freed")
        at = np.arange(low, length)
        where = table[at // size - begin] * size + at % size
        read = self._slots.reshape(-1)[where[: start - low]].tolist()
        right = wanted.values[group][low:start].tolist()
        if read != right:
            self.wrong.append(f"group {group} reads {read} from {low} to {start}, not {right}")
        attention.begins[group], attention.values[group] = low, array("q", read)
        return where[start - low :]

    def sample(self, rows: Any, samplers: Sequence[ToySampler]) -> tuple[Any, Any]:
        self.faults.check("sample")
        self.faults.check("sample", "middle")
        statuses = np.zeros(len(samplers), np.int32)
        tokens = [
            sampler.draw(self._logits[row]) for row, sampler in zip(rows.tolist(), samplers, strict=True)
        ]
        try:
            self.faults.check("status")
        except Injected:
            statuses[-1:], tokens[-1:] = 1, [-1] * len(tokens[-1:])
        self.faults.check("sample", "after")
        return np.array(tokens, np.int32), statuses

    def logprobs(self, rows: Any, tokens: Any, k: int) -> tuple[Any, Any, Any]:
        """The k most likely tokens are 0, 1, ...: the engine only passes them on."""
        self.faults.check("logprobs")
        logits = [self._logits[row] for row in rows.tolist()]
        chosen = [logprob(*pair) for pair in zip(logits, tokens.tolist(), strict=True)]
        top = np.tile(np.arange(k, dtype=np.int32), (len(rows), 1))
        self.faults.check("logprobs", "after")
        return np.array(chosen), top, -top.astype(np.float32)
