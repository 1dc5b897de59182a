"""Operations on an engine over the toy model; each draws what it needs from a `random.Random`."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np

from pyvelo.engine.request import Detokenizer, ParentRequest, Request, Sequence
from pyvelo.errors import Cancelled
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams
from pyvelo.trace.recorder import Tracer

from .toy_checks import Held, Job
from .toy_model import Injected, Interrupt, ToyAdapter, ToyMatcher
from .toy_stand import ToyStand
from .toy_values import N_VOCAB, ends

CALLS = {
    "run": ("before", "middle", "after"),
    "adapt": ("before", "after"),
    "sample": ("before", "middle", "after"),
    "logprobs": ("before", "after"),
    "copy": ("before", "middle", "after"),
    "swap_out": ("before", "middle", "after"),
    "swap_in": ("before", "middle", "after"),
    "mover": ("before", "after"),
    "clear_state": ("before",),
    "copy_state": ("before", "after"),
    "save_state": ("before", "middle", "after"),
    "load_state": ("before", "after"),
    "fill": ("before",),
    "sampler": ("before",),
    "see_prompt": ("before",),
    "matcher": ("before",),
    "accept": ("before",),
    "mask": ("before",),
    "status": ("before",),
    "on_piece": ("before",),
    "watch": ("before",),
    "observe": ("before",),
}
"""What may fail, and when."""


def marked(adapter: ToyAdapter | None, salt: str) -> str:
    """Return what the values of a sequence depend on beside its tokens."""
    return ("" if adapter is None else adapter.key.decode()) + salt


class ToyEngine(ToyStand):
    """Operations of callers, and of other threads within calls; `check` after each operation."""

    # ---- operations: requests ----

    def submit(self, rng: Random) -> None:
        """One prompt or several at once, each for one sample or several."""
        requests = [request for _ in range(rng.choice((1, 1, 2, 3))) for request in self._samples(rng)]
        self.loop.submit(requests)

    def _samples(self, rng: Random) -> list[Request]:
        prompt, salt, adapter = self._prompt(rng), rng.choice(("", "", "a")), rng.choice(self.adapters)
        n = rng.choice((1, 1, 1, 2, 4))
        params = self._params(rng, salt, prompt_logprobs=rng.choice((None, None, None, 0, 2)))
        if rng.random() < 0.1:
            params = SamplingParams(n=n, best_of=n + 1)
            salt, n = "", n + 1
        parent, salt = ParentRequest(n), marked(adapter, salt)
        jobs = [
            self._job(rng, prompt, salt, params, index=index, parent=parent, adapter=adapter)
            for index in range(n)
        ]
        requests = [job.request for job in jobs]
        for request in requests:
            request.prompt_logprobs = requests[0].prompt_logprobs
        requests[0].hold(requests[1:])
        return requests

    def cancel(self, rng: Random) -> None:
        """Some requests, finished ones too."""
        requests = [job.request for job in self.jobs]
        chosen = rng.sample(requests, min(len(requests), rng.choice((1, 1, 2, 5))))
        self.survive(lambda: self.loop.cancel(chosen))

    def pass_time(self, rng: Random) -> None:
        self._tick(rng.choice((0.1, 1.0, 10.0)))

    def _params(self, rng: Random, salt: str, **others: Any) -> SamplingParams:
        return SamplingParams(
            cache_salt=salt,
            priority=rng.choice((0, 0, 0, 1, -1)),
            timeout=rng.choice((None, None, None, 0.0, 0.3, 3.0)),
            ignore_eos=rng.random() < 0.7,
            min_tokens=rng.choice((0, 0, 0, 1, 4)),
            stop_token_ids=rng.choice(((), (), (3,))),
            repetition_penalty=rng.choice((1.0, 1.0, 2.0)),
            logprobs=rng.choice((None, None, 0, 2)),
            **others,
        )

    def _job(
        self,
        rng: Random,
        prompt: abc.Sequence[int],
        salt: str,
        params: SamplingParams,
        *,
        max_new: int | None = None,
        index: int = 0,
        sequence: Sequence | None = None,
        parent: ParentRequest | None = None,
        adapter: ToyAdapter | None = None,
    ) -> Job:
        room = self.n_tokens - len(prompt) + (rng.random() < 0.1)  # the last one is not stored
        if max_new is None:
            max_new = min(room, rng.choice((1, 2, self.manager.block_size, 30)))
        matcher = (
            ToyMatcher(self.faults, rng.randrange(4), rng.randint(1, 20)) if rng.random() < 0.1 else None
        )
        request = Request(
            sequence or Sequence(prompt, self.manager.block_size, params.cache_salt, cast(Any, adapter)),
            params,
            max_new=max_new,
            seed=rng.choice((0, 0, 1)) + index,
            detokenizer=Detokenizer(lambda token: b"<%d>" % token),
            index=index,
            keeps_blocks=sequence is not None,
            matcher=cast(Any, matcher),
            parent=parent or ParentRequest(),
        )
        going_on = np.array([not ends(request, token) for token in range(N_VOCAB)])
        request.going_on = np.packbits(going_on, bitorder="little").tobytes()
        job = Job(request, salt, list(prompt))
        if rng.random() < 0.5:
            request.on_piece = self._listener(job)

        def ended(request: Request) -> None:
            job.n_ended += 1

        request.on_end = ended
        self.jobs.append(job)
        self.open_jobs.append(job)
        return job

    def _listener(self, job: Job) -> Callable[[StreamPiece], None]:
        def take(piece: StreamPiece) -> None:
            self.faults.check("on_piece")
            job.pieces.append(piece)

        return take

    def _prompt(self, rng: Random) -> list[int]:
        """The beginning of something that was there before, and behind it something new, or not."""
        size, most = self.manager.block_size, self.n_tokens
        texts = self.texts + [list(session.sequence.tokens) for session in self.sessions]
        old = rng.choice(texts)[: rng.choice((0, size, 2 * size, rng.randint(0, most), most))]
        n_new = rng.choice((0, 1, 2, size - 1, size, size + 1, 2 * size))
        new = [rng.randrange(1, N_VOCAB) for _ in range(n_new)] if rng.random() < 0.6 else [1] * n_new
        prompt = (old + new)[: rng.choice((most // 3 + 1, most // 2 + 1, most))] or [1]
        self.texts = [*self.texts[-5:], prompt]
        return prompt

    # ---- operations: sessions ----

    def open_session(self, rng: Random) -> None:
        salt, adapter = rng.choice(("", "", "a")), rng.choice(self.adapters)
        tokens = self._prompt(rng)[: self.n_tokens - 1] if rng.random() < 0.9 else []
        sequence = Sequence(tokens, self.manager.block_size, salt, cast(Any, adapter))
        self._hold(sequence, marked(adapter, salt))

    def append(self, rng: Random) -> None:
        session = self._idle(rng)
        room = self.n_tokens - 1 - len(session.sequence.tokens) if session else 0
        if session is not None and room > 0:
            n = min(room, rng.choice((1, 2, self.manager.block_size)))
            session.sequence.tokens.extend(rng.randrange(1, N_VOCAB) for _ in range(n))

    def go_on(self, rng: Random) -> None:
        session = self._idle(rng)
        if session is not None and 0 < len(session.sequence.tokens) <= self.n_tokens:
            sequence = session.sequence
            params = self._params(rng, "")  # the sequence has a salt of its own
            job = self._job(rng, sequence.tokens, session.salt, params, sequence=sequence)
            self.loop.submit([job.request])

    def compute(self, rng: Random) -> None:
        session = self._idle(rng)
        if session is None or not 2 <= len(session.sequence.tokens) <= self.n_tokens:
            return
        if session.sequence.computed:
            return
        sequence, params = session.sequence, SamplingParams(temperature=0.0)
        job = self._job(rng, sequence.tokens, session.salt, params, max_new=0, sequence=sequence)
        job.request.matcher = None
        self.loop.submit([job.request])

    def fork(self, rng: Random) -> None:
        """A session like another one, or a beam: with another token in the place of the last."""
        session = self._idle(rng)
        if session is None:
            return
        tokens, old = list(session.sequence.tokens), session.sequence
        is_beam = len(tokens) > 1 and old.table is not None and old.table.n_tokens < len(tokens)
        is_beam = is_beam and rng.random() < 0.3
        n_common = len(tokens) - is_beam
        twin = old.fork([*tokens[:n_common], *([rng.randrange(1, N_VOCAB)] * is_beam)], n_common)
        self._hold(twin, session.salt)

        def share() -> None:
            with self.loop.visit() as core:
                core.idle.fork(old, twin)
                if is_beam:
                    core.idle.free(old)

        self.survive(share)

    def close_session(self, rng: Random) -> None:
        if self.sessions:
            session = self.sessions.pop(rng.randrange(len(self.sessions)))
            self.survive(lambda: self.loop.release(session.sequence))

    def _hold(self, sequence: Sequence, salt: str) -> None:
        self.sessions.append(Held(sequence, salt))
        self.sequences.append(sequence)

    def _idle(self, rng: Random) -> Held | None:
        idle = [session for session in self.sessions if not session.sequence.busy]
        return rng.choice(idle) if idle else None

    # ---- operations: the engine ----

    def step(self, rng: Random) -> None:
        """A few steps."""
        left = rng.choice((1, 1, 2, 3, 8, 30))

        def ready() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or self.idle

        self.survive(lambda: self.loop.run_until(ready))

    def visit(self, rng: Random) -> None:
        """Between two steps: the prefix cache is reset, or numbers are asked for; or the visitor fails."""
        choice = rng.randrange(4)

        def look() -> None:
            with self.loop.visit() as core:
                if choice == 0:
                    core.manager.reset()
                elif choice == 1:
                    self.faults.raised.append(Injected("a visitor"))
                    raise self.faults.raised[-1]
                manager = core.manager
                assert manager.n_used + manager.n_cached + manager.n_free == manager.n_blocks
                assert 0 <= manager.n_stored <= manager.n_used * manager.block_size

        self.survive(look)

    def record(self, rng: Random) -> None:
        """Starts to record what the engine does, or ends it."""
        if self._watched:
            return

        def begin() -> None:
            with self.loop.visit() as core:
                self.tracer = Tracer(core, os.devnull, 1, self.n_tokens)

        self.survive(begin if self.tracer is None else self.end_recording)

    def fail_soon(self, rng: Random) -> None:
        """A call will fail."""
        call = rng.choice(list(CALLS))
        errors = (
            (Injected, Injected, Interrupt, Cancelled) if call == "run" else (Injected, Injected, Interrupt)
        )
        self.faults.arm(call, rng.choice(CALLS[call]), rng.choice((0, 0, 1, 3, 8)), rng.choice(errors))

    def meanwhile(self, rng: Random) -> None:
        """Another thread will do something while a step runs."""
        seed = rng.randrange(1 << 16)
        act = rng.choice((self.submit, self.go_on, self.go_on, self.cancel, self.close_session))
        call = rng.choice(("schedule", "schedule", "run", "sample"))
        self.faults.arm_action(call, rng.choice((0, 1, 3)), lambda: act(Random(seed)))
