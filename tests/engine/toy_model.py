"""A toy model over a paged pool: it attends to every slot, verifies what it reads, and fails if told to.

The value that a token stores in its slot is a digest of all values before it, of the salt of its sequence and
of the token. The next token is drawn from such a digest. So a wrong slot, block table, position, length,
state or salt gives another answer, and is also noted at once, in `ToyContext.wrong`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyvelo.engine.request import Request
from pyvelo.kv.manager import BlockManager

from .fakes import FakeArrays

N_VOCAB = 16
END = 0
EMPTY = -1


def digest(value: int, before: int) -> int:
    """Return a digest of both, of 32 bits."""
    return zlib.crc32(value.to_bytes(8, "little"), before)


def start_digest(salt: str) -> int:
    """Return what a sequence attends to before its first token."""
    return zlib.crc32(salt.encode())


def stored_values(salt: str, tokens: Sequence[int]) -> tuple[list[int], int]:
    """Return the value that each token stores, and the digest of all of them: the logits behind the last."""
    values, before = [], start_digest(salt)
    for token in tokens:
        values.append(digest(token, before))
        before = digest(values[-1], before)
    return values, before


class Expected:
    """The same for sequences that grow, each token computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[int], list[int], list[int]]] = {}  # by the id of the tokens

    def values(self, request: Request) -> tuple[list[int], list[int]]:
        """Return the value of each token, and the digests before each and behind the last."""
        tokens = request.tokens
        _, values, digests = self._known.setdefault(
            id(tokens), (tokens, [], [start_digest(salt_of(request))])
        )
        for token in tokens[len(values) :]:
            values.append(digest(token, digests[-1]))
            digests.append(digest(values[-1], digests[-1]))
        return values, digests


def salt_of(request: Request) -> str:
    return request.hashes.extra.decode()


def next_token(logits: int, seed: int, number: int, allowed: Sequence[int]) -> int:
    """Return the token that a sampler with this seed draws as its `number`-th."""
    return allowed[digest(seed * 1000 + number, logits) % len(allowed)]


def logprob(logits: int, token: int) -> float:
    return -(digest(token, logits) % 997) / 100


def allowed_tokens(matcher: int | None, number: int) -> list[int]:
    """Return the tokens that a matcher allows as the `number`-th of an answer; None: it is free."""
    if matcher is None:
        return list(range(N_VOCAB))
    return [token for token in range(1, N_VOCAB) if digest(token, matcher + number) % 3] or [1]


def ends(request: Request, token: int) -> bool:
    """Return whether the token would end the answer."""
    return token in request.stop_ids or (token == END and not request.params.ignore_eos)


def naive_answer(request: Request, salt: str, prompt: Sequence[int]) -> tuple[list[int], str, int | None]:
    """Return what one sequence alone must generate without a cache, its finish reason and its stop reason."""
    matcher = request.matcher.seed if isinstance(request.matcher, ToyMatcher) else None
    length = request.matcher.length if isinstance(request.matcher, ToyMatcher) else 0
    answer: list[int] = []
    _, logits = stored_values(salt, prompt)
    for number in range(request.max_new):
        allowed = allowed_tokens(matcher, number)
        if number < request.params.min_tokens:
            going_on = [token for token in allowed if not ends(request, token)]
            allowed = going_on if going_on or matcher is None else allowed
        token = next_token(logits, request.seed, number, allowed)
        answer.append(token)
        if token == END and not request.params.ignore_eos:
            return answer, "stop", None
        if token in request.stop_ids:
            return answer, "stop", token
        if length and number + 1 == length:
            return answer, "stop", None
        logits = digest(digest(token, logits), logits)
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
        _, digests = self._context.expected.values(request)
        note(logits == digests[-1], "the logits are not those behind the tokens of the request")
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
    expected: Expected = field(default_factory=Expected)
    n_runs: int = 0

    def __post_init__(self) -> None:
        self._size = self.manager.block_size
        self._slots = np.full((self.manager.n_blocks, self._size), EMPTY, np.int64)
        self._host = np.full((self.manager.swap.n_blocks, self._size), EMPTY, np.int64)
        self._states: list[tuple[int, int] | None] = [None] * self.n_states  # tokens, and their digest
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
            for state in arrays.states[:n_seqs].tolist() if self.n_states else ():
                self._states[state] = None
            raise
        self.note(len(logits) <= self.max_outputs, "more logits than there is room for")
        self._logits = logits

    def _check_writes(self, arrays: FakeArrays, n_tokens: int) -> None:
        slots = arrays.slots[:n_tokens].tolist()
        self.note(len(set(slots)) == n_tokens, "a slot is written twice")
        written = {slot // self._size for slot in slots}
        self.note(not written & self.manager.published(), "a published block is written")
        held = [block for table in self.manager.tables() for block in table.blocks]
        self.note(all(held.count(block) == 1 for block in written), "a block of another sequence is written")

    def _run_row(self, arrays: FakeArrays, row: int, first: int, n: int, owner: Request) -> list[int]:
        length, size, table = int(arrays.seqs[row, 2]), self._size, arrays.tables[row]
        start = length - n
        fed = arrays.tokens[first : first + n].tolist()
        self.note(arrays.seqs[row].tolist() == [first, n, length, 0] and n > 0 <= start, "a row's numbers")
        self.note(fed == owner.tokens[start:length].tolist(), "the tokens of a row")
        at = np.arange(length)
        self.note(
            arrays.positions[first : first + n].tolist() == at[start:].tolist(), "the positions of a row"
        )
        held = owner.sequence.table
        blocks = held.blocks if held is not None else []  # one more after a step cut short
        row_wanted = blocks + [-1] * (len(table) - len(blocks))
        self.note(table.tolist() == row_wanted and len(blocks) * size >= length, "a row's block table")
        where = table[at // size] * size + at % size
        self.note(arrays.slots[first : first + n].tolist() == where[start:].tolist(), "the slots of a row")

        wanted, _ = self.expected.values(owner)
        flat = self._slots.reshape(-1)
        read = flat[where[:start]]
        if read.tolist() != wanted[:start]:
            self.wrong.append(f"of {start} tokens {read.tolist()} is read, not {wanted[:start]}")
        before = zlib.crc32(read.tobytes(), start_digest(salt_of(owner)))  # attention: to every slot
        if self.n_states:
            state = self._states[int(arrays.states[row])]
            self.note(state == (start, before if start else 0), "a recurrent state is not of its sequence")
        outputs = arrays.outputs[first : first + n].tolist()
        self.note(set(outputs) <= {0, 1}, "outputs are 0 or 1")
        logits = []
        for number, token in enumerate(fed):
            flat[where[start + number]] = value = digest(token % (1 << 64), before)
            before = digest(value, before)
            logits += [before] * outputs[number]
        if self.n_states:
            self._states[int(arrays.states[row])] = (length, before)
        return logits

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
