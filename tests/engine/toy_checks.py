"""Checks of an engine over the toy model: between two operations, and at the end."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyvelo.engine.request import Request, RequestStatus, Sequence
from pyvelo.kv.prefix import Window
from pyvelo.outputs import StreamPiece

from .toy_model import Faults, naive_answer
from .toy_values import Values, logprob

if TYPE_CHECKING:
    from .toy_stand import ToyStand


@dataclass
class Job:
    """A request, and what is known of it apart from the engine."""

    request: Request
    salt: str
    prompt: list[int]
    pieces: list[StreamPiece] = field(default_factory=list)
    n_ended: int = 0
    checked: bool = False


@dataclass
class Held:
    """A session: a sequence, and the salt that it was opened with."""

    sequence: Sequence
    salt: str


def check_engine(engine: ToyStand) -> None:
    """Verify what holds between two operations; look at jobs until all samples of their prompt have ended."""
    core, jobs = engine.core, engine.open_jobs
    assert not engine.context.wrong, engine.context.wrong
    _check_samples(jobs)
    for job in jobs:
        _check_job(job, engine.faults, engine.now, engine.manager.layout.windows)
    if engine.broken:
        assert engine.idle, "a broken engine has ended every request"
        return
    engine.manager.audit()
    assert engine.loop._owner is None
    assert engine.loop._n_stepping == engine.loop._n_visiting == 0
    _check_requests(engine)
    _check_owners(engine)
    states = [request.recurrent_state for request in core._active.running] if engine.n_states else []
    if core._states is not None:
        assert sorted(core._states.free + states) == list(range(engine.n_states))
    assert all(sampler.closed == sampler.request.finished for sampler in engine.samplers)
    n_closed = len(engine.jobs) - len(jobs)
    assert core.counters.n_ended == n_closed + sum(job.request.finished for job in jobs)
    engine.open_jobs = [job for job in jobs if job.request.parent.n_open]


def check_nothing_left(engine: ToyStand) -> None:
    """Verify that a closed engine without sessions holds nothing."""
    core, manager = engine.core, engine.manager
    assert engine.idle
    assert core.n_running == core.n_waiting == len(core.idle) == 0
    assert manager.n_used == manager.n_reserved == 0
    assert manager.swap.n_free == manager.swap.n_blocks
    assert core._states is None or len(core._states.free) == engine.n_states


def _check_requests(engine: ToyStand) -> None:
    """Each request is where its status says, once, and holds what its status says."""
    core = engine.core
    waiting, running, new = core._active.waiting, core._active.running, list(core.inbox._arrivals)
    assert {request.status for request in running} <= {RequestStatus.RUNNING}
    assert {request.status for request in waiting} <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}
    assert {request.status for request in new} <= {RequestStatus.NEW, RequestStatus.HELD}
    for requests in (waiting, running):
        ranks = [request.rank for request in requests]
        assert ranks == sorted(set(ranks)), "in the order of rank, each once"
    places = [id(request) for request in _all_of([*waiting, *running, *new]) if not request.finished]
    unfinished = {id(job.request) for job in engine.open_jobs if not job.request.finished}
    assert set(places) == unfinished, "a request that has not ended is in a queue, or behind another sample"
    seen = [id(request) for request in (*waiting, *running)]
    assert len(seen) == len(set(seen))
    for job in engine.open_jobs:
        _check_status(job.request)


def _check_status(request: Request) -> None:
    """A request holds a sampler, blocks and blocks in host memory as its status says."""
    status, sequence = request.status, request.sequence
    assert (request.finish_reason is not None) == request.finished == (status.name[:8] == "FINISHED")
    if status is RequestStatus.RUNNING:
        assert sequence.table is not None
        assert request.sampler is not None
        assert sequence.swapped is None
    elif status is RequestStatus.PREEMPTED:
        assert sequence.table is None
        assert request.sampler is not None
    else:
        assert request.sampler is None
        if not request.keeps_blocks:
            assert sequence.table is None
            assert sequence.swapped is None


def _check_owners(engine: ToyStand) -> None:
    """Each block table, and what is in host memory, has one owner."""
    core, manager = engine.core, engine.manager
    assert all(one.request is None or one.request.status is not RequestStatus.RUNNING for one in core.idle)
    assert all(one.table is not None for one in core.idle)
    sequences = [request.sequence for request in core._active.running] + list(core.idle)
    tables = [sequence.table for sequence in sequences]
    assert sorted(map(id, tables)) == sorted(map(id, manager.tables())), "a table has one owner"
    known = {id(one): one for one in [*engine.sequences, *(job.request.sequence for job in engine.open_jobs)]}
    swapped = [sequence.swapped for sequence in known.values()]
    held = sorted(id(one) for one in swapped if id(one) in manager._swapped)
    assert held == sorted(manager._swapped), "what is in host memory has one owner"


def _check_job(job: Job, faults: Faults, now: float, windows: abc.Sequence[Window]) -> None:
    """Check that a request reports its end once, and that its answer is right so far."""
    request = job.request
    assert job.n_ended == request.finished
    if not request.finished or job.checked:
        return
    job.checked = True
    given, reason = list(request.generated_ids), request.finish_reason
    wanted, why, stop = naive_answer(request, job.salt, job.prompt, windows)
    assert given == wanted[: len(given)], f"{given} were generated, not {wanted}"
    assert list(request.tokens[: len(job.prompt)]) == job.prompt
    if reason in ("stop", "length"):
        assert (given, reason, request.stop_reason) == (wanted, why, stop)
    if reason == "timeout":
        assert request.params.timeout is not None
        assert now >= request.submitted + request.params.timeout
    if reason == "error" and "no token can be drawn" not in str(request.error):
        assert faults.caused(request.error), repr(request.error)
    shown = [token for piece in job.pieces for token in piece.token_ids]
    assert shown == given[: len(shown)]
    _check_logprobs(job, given, windows)


def _check_samples(jobs: abc.Sequence[Job]) -> None:
    """Usage and times come once, with the last piece of all samples of a prompt."""
    samples: dict[int, list[Job]] = {}
    for job in jobs:
        samples.setdefault(id(job.request.parent), []).append(job)
    for group in samples.values():
        parent = group[0].request.parent
        assert parent.n_open == sum(not job.request.finished for job in group)
        told = [(job, piece) for job in group for piece in job.pieces if piece.usage or piece.times]
        assert len(told) <= (parent.n_open == 0)
        for job, piece in told:
            assert piece is job.pieces[-1]
            assert piece.usage == job.request.usage
            assert piece.usage.completion_tokens == sum(len(other.request.generated_ids) for other in group)
            assert piece.times is not None
            times = (piece.times.queued, piece.times.first_token, piece.times.end)
            given = [time for time in times if time is not None]
            assert given == sorted(given)
            assert (len(given) == 3) == (piece.usage.completion_tokens > 0)


def _check_logprobs(job: Job, given: list[int], windows: abc.Sequence[Window]) -> None:
    request, tokens = job.request, job.prompt + given
    if request.n_logprobs is None and request.params.prompt_logprobs is None:
        return
    values = Values(windows, job.salt, tokens)

    def score(at: int) -> float:
        return logprob(values.logits[at], tokens[at])

    n = len(job.prompt)
    if request.n_logprobs is not None:
        named = [(token.token_id, token.logprob) for token in request.logprobs]
        assert named == [(tokens[at], score(at)) for at in range(n, n + len(named))]
        assert len(given) - len(named) in (0, request.finish_reason == "error")
    if request.finish_reason in ("stop", "length") and request.params.prompt_logprobs is not None:
        assert [token.logprob for token in request.prompt_logprobs] == [score(at) for at in range(1, n)]


def _all_of(requests: abc.Sequence[Request]) -> Iterator[Request]:
    """Yield requests and the samples that they hold."""
    for request in requests:
        yield request
        yield from _all_of(request.followers)
