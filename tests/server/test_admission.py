"""Admission: counts that never drift, limits of tenants and of the server, and the time to try again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pyvelo.server.admission import MAX_RETRY_SECONDS, MEMORY_SECONDS, Admission, Throughput, Ticket
from pyvelo.server.auth import Tenant
from pyvelo.server.errors import HttpError

from .conftest import Serve

ALICE = Tenant("alice")
"""Tenant without limits."""


class Parent:
    """Request of the engine, as admission sees it."""

    def __init__(self) -> None:
        self.first_token: float | None = None


def stats(seconds: float, tokens: int = 0, finished: int = 0) -> Any:
    return SimpleNamespace(
        step_seconds=seconds,
        prompt_tokens=tokens,
        requests_finished=finished,
        requests_timed_out=0,
        requests_aborted=0,
    )


def refusal(admission: Admission, tenant: Tenant = ALICE, n_tokens: int | None = None) -> HttpError:
    """Return the refusal of a request, of its arrival or of its tokens."""
    ticket = None if n_tokens is None else admission.enter(tenant)
    try:
        if ticket is None:
            admission.enter(tenant)
        else:
            admission.queue(ticket, n_tokens or 0, [cast(Any, Parent())])
    except HttpError as error:
        return error
    finally:
        if ticket is not None:
            admission.leave(ticket)
    raise AssertionError("it was not refused")


# ---- throughput ----


def test_nothing_is_known_before_the_first_step() -> None:
    throughput = Throughput()
    assert throughput.wait(10**9, 10**9) == 1
    throughput.watch(stats(0.0))
    assert throughput.wait(10**9, 10**9) == 1


@pytest.mark.parametrize(
    ("n_tokens", "n_requests", "seconds"),
    [(0, 0, 1), (100, 0, 1), (1001, 0, 11), (1000, 0, 10), (0, 3, 6), (1000, 20, 40), (10**9, 0, 120)],
)
def test_the_wait_is_the_longer_of_tokens_and_requests(n_tokens: int, n_requests: int, seconds: int) -> None:
    throughput = Throughput()
    throughput.watch(stats(4.0, tokens=400, finished=2))  # 100 tokens and half a request in a second
    assert throughput.wait(n_tokens, n_requests) == seconds
    assert MAX_RETRY_SECONDS == 120


def test_the_last_steps_count_most() -> None:
    throughput = Throughput()
    throughput.watch(stats(1.0, tokens=1000))
    assert throughput.wait(1000, 0) == 1
    throughput.watch(stats(1.0 + 20 * MEMORY_SECONDS, tokens=1000 + int(20 * MEMORY_SECONDS)))  # 1 a second
    assert 95 <= throughput.wait(100, 0) <= 100
    fresh = Throughput()
    fresh.watch(stats(MEMORY_SECONDS, tokens=0))
    fresh.watch(stats(2 * MEMORY_SECONDS, tokens=600))
    assert fresh.wait(100, 0) == 8  # 45 s for 600 tokens: the first half counts half


def test_ends_of_all_kinds_are_requests_done() -> None:
    throughput = Throughput()
    ended = stats(3.0)
    ended.requests_finished, ended.requests_timed_out, ended.requests_aborted = 1, 1, 1
    throughput.watch(ended)
    assert throughput.wait(0, 5) == 5


# ---- limits ----


def test_the_server_is_full_when_so_many_run_and_wait() -> None:
    admission = Admission(max_running=2, max_queue=1, max_tokens=1000)
    tickets = [admission.enter(ALICE) for _ in range(3)]
    refused = refusal(admission)
    assert (refused.status, refused.code, refused.kind) == (503, "queue_full", "overloaded_error")
    assert refused.headers == {"Retry-After": "1"}
    admission.leave(tickets[1])
    admission.leave(tickets[1])  # counts once
    assert len(admission) == 2
    admission.enter(ALICE)
    assert refusal(admission).status == 503
    assert admission.refusals == {"requests": 2, "tokens": 0, "key_requests": 0, "key_tokens": 0}


def test_only_tokens_that_wait_are_bounded() -> None:
    admission = Admission(max_running=9, max_queue=9, max_tokens=100)
    parents = [Parent(), Parent()]
    ticket = admission.enter(ALICE)
    admission.queue(ticket, 90, cast(Any, parents))
    assert admission.queued_tokens() == 90
    refused = refusal(admission, n_tokens=11)
    assert (refused.status, refused.message.split(":")[0]) == (503, "90 prompt tokens wait; the limit is 100")
    second = admission.enter(ALICE)
    admission.queue(second, 10, [cast(Any, Parent())])
    parents[1].first_token = 1.0  # one prompt runs, so the request does
    assert admission.queued_tokens() == 10
    admission.leave(second)
    assert admission.queued_tokens() == 0
    third = admission.enter(ALICE)
    admission.queue(third, 10**6, [cast(Any, Parent())])  # alone it may have any length
    assert admission.queued_tokens() == 10**6


def test_a_tenants_limits_do_not_depend_on_others() -> None:
    admission = Admission(max_running=9, max_queue=9, max_tokens=10**6)
    anna, bert = Tenant("anna", requests=2, tokens=50), Tenant("bert")
    ticket = admission.enter(anna)
    admission.queue(ticket, 30, [cast(Any, Parent())])
    for _ in range(3):
        admission.queue(admission.enter(bert), 300, [cast(Any, Parent())])
    refused = refusal(admission, anna, 21)
    assert (refused.status, refused.code, refused.kind) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert refused.message.startswith("30 prompt tokens of this key wait; its limit is 50")
    admission.enter(anna)
    refused = refusal(admission, anna)
    assert (refused.status, anna.n_requests, bert.n_requests) == (429, 2, 3)
    admission.throughput.watch(stats(10.0, tokens=100))
    assert refusal(admission, anna).headers["Retry-After"] == "20"  # 2 requests, none done in 10 s
    assert admission.refusals == {"requests": 0, "tokens": 0, "key_requests": 2, "key_tokens": 1}


def test_the_time_to_try_again_is_computed_from_what_waits() -> None:
    admission = Admission(max_running=1, max_queue=1, max_tokens=10**6)
    admission.throughput.watch(stats(10.0, tokens=1000, finished=100))
    runs, waits = Parent(), Parent()
    admission.queue(admission.enter(ALICE), 5000, [cast(Any, runs)])
    admission.queue(admission.enter(ALICE), 4000, [cast(Any, waits)])
    assert refusal(admission).headers["Retry-After"] == "90"
    runs.first_token = 1.0
    refused = refusal(admission)
    assert refused.headers["Retry-After"] == "40"
    assert refused.message.endswith("try again in 40 s")


# ---- any order ----


class AnyOrder(RuleBasedStateMachine):
    """Requests of three tenants that arrive, queue, run and leave in any order."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.tenants = [Tenant("a", requests=2), Tenant("b", tokens=40), Tenant("c")]
        self.admission = Admission(max_running=2, max_queue=3, max_tokens=100)
        self.inside: dict[Ticket, tuple[int, Parent]] = {}
        self.refused = 0

    @rule(target=tickets, number=st.integers(0, 2))
    def enter(self, number: int) -> Ticket | None:
        tenant = self.tenants[number]
        mine = sum(ticket.tenant is tenant for ticket in self.inside)
        full = len(self.inside) >= 5 or mine >= (tenant.requests or 99)
        try:
            ticket = self.admission.enter(tenant)
        except HttpError:
            assert full
            self.refused += 1
            return None
        assert not full
        self.inside[ticket] = (0, Parent())
        return ticket

    @rule(ticket=tickets, n_tokens=st.integers(1, 60))
    def queue(self, ticket: Ticket | None, n_tokens: int) -> None:
        if ticket not in self.inside or self.inside[ticket][0]:
            return
        parent = self.inside[ticket][1]
        every = self.waiting(None)
        of_tenant = self.waiting(ticket.tenant)
        full = bool(every) and every + n_tokens > 100
        full |= bool(of_tenant) and of_tenant + n_tokens > (ticket.tenant.tokens or 999)
        try:
            self.admission.queue(ticket, n_tokens, [cast(Any, parent)])
        except HttpError:
            assert full
            self.refused += 1
        else:
            assert not full
            self.inside[ticket] = (n_tokens, parent)

    @rule(ticket=tickets)
    def run(self, ticket: Ticket | None) -> None:
        if ticket in self.inside:
            self.inside[ticket][1].first_token = 1.0

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self.admission.leave(ticket)
            self.inside.pop(ticket, None)

    @rule(ticket=tickets)
    def leave_and_leave_again(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self.admission.leave(ticket)
            self.admission.leave(ticket)
            self.inside.pop(ticket, None)

    def waiting(self, tenant: Tenant | None) -> int:
        return sum(
            n_tokens
            for ticket, (n_tokens, parent) in self.inside.items()
            if parent.first_token is None and tenant in (None, ticket.tenant)
        )

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.admission) == len(self.inside)
        assert self.admission.queued_tokens() == self.waiting(None)
        for tenant in self.tenants:
            assert tenant.n_requests == sum(ticket.tenant is tenant for ticket in self.inside)
        assert sum(self.admission.refusals.values()) == self.refused

    def teardown(self) -> None:
        for ticket in self.inside:
            self.admission.leave(ticket)
        assert len(self.admission) == 0
        assert not any(tenant.n_requests for tenant in self.tenants)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)


# ---- over HTTP ----


def test_a_full_server_refuses_and_recovers(serve: Serve) -> None:
    """The throughput comes from the steps of the engine."""
    server = serve(max_num_seqs=1, max_queue=1)
    assert server.serving.admission.throughput.wait(10**9, 0) == 1
    path, body = "/v1/completions", {"prompt": [8] * 20, "max_tokens": 400, "ignore_eos": True}
    small = {"prompt": [9] * 5, "max_tokens": 1}
    admission = server.serving.admission
    with server.client() as first, server.client() as second:
        paused = server.paused_at(lambda stats: stats.completion_tokens == 1)
        with paused as wait:
            first.send(path, body)
            wait()
            second.send(path, {**body, "stream": True})
            server.until(lambda: admission.queued_tokens() == 20)
            refused = server.post(path, small)
            assert (refused.status, refused.error["code"]) == (503, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert server.get("/health").status == 200
            assert b"pyvelo:queued_prompt_tokens" in server.get("/metrics").data
    server.until_idle()
    assert server.post(path, small).status == 200
    assert server.serving.admission.throughput.wait(10**9, 0) == MAX_RETRY_SECONDS


def test_a_server_without_sessions_says_so(serve: Serve) -> None:
    answer = serve(n_ctx=64, max_sessions=0).post("/v1/sessions", {"prompt": "a"})
    assert answer.status == 403
    assert "--max-sessions 0" in answer.error["message"]
