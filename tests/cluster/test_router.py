"""Ray's router with replicas, requests and reports of the test, without a cluster."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs pip install 'ray[serve]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from pyvelo.cluster.router import PrefixRouter
from pyvelo.cluster.forwarded import Forwarded
from pyvelo.cluster.policy import Report, short

HASHES = tuple(bytes([n]) * 32 for n in range(1, 6))


def router(**options: Any) -> PrefixRouter:
    """Return a router without the state of Ray's base class."""
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state(**options)
    return made


def replica(name: str, report: Report | None = None) -> Any:
    values = {} if report is None else report.packed({"a": 5, "b": report.n_others})
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=values)


def pending(key: str, hashes: tuple[bytes, ...] = (), replica: str = "") -> Any:
    request = Forwarded("POST", "/v1/completions", hashes=hashes, replica=replica, router="a")
    metadata = SimpleNamespace(internal_request_id=key)
    return SimpleNamespace(args=[request], metadata=metadata, future=asyncio.Future())


def load(router: PrefixRouter, name: str) -> int:
    policy: Any = router._policy
    return int(policy.load(name))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def choose(router: PrefixRouter, request: Any, *replicas: Any) -> list[str]:
    ranks = await router.choose_replicas(list(replicas), request)
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


def test_reports_decide() -> None:
    async def test() -> None:
        made = router()
        holder = Report(frozenset(map(short, HASHES[:3])), n_open=3, n_others=1)
        x, y = replica("x", Report(free_blocks=50)), replica("y", holder)
        assert await choose(made, pending("1", HASHES), x, y) == ["y", "x"]
        assert await choose(made, pending("2"), x, y) == ["x", "y"]
        assert await choose(made, None, x, y)
        assert (load(made, "x"), load(made, "y")) == (1, 2)

    run(test)


def test_requests_are_counted_once_from_the_choice_to_the_end() -> None:
    async def test() -> None:
        made, x, y = router(policy="least-loaded"), replica("x"), replica("y")
        first = pending("1")
        assert (await choose(made, first, x, y))[0] == "x"
        assert (await choose(made, first, x, y))[0] == "y"  # Ray asks again; x was used last
        assert (load(made, "x"), load(made, "y")) == (0, 1)
        made.on_request_routed(first, SimpleNamespace(unique_id="x"), None)
        assert (load(made, "x"), load(made, "y")) == (1, 0)
        made.on_request_completed(SimpleNamespace(unique_id="y"), "1")  # of the try that was refused
        assert load(made, "x") == 1
        made.on_request_completed(SimpleNamespace(unique_id="x"), "1")
        made.on_request_completed(SimpleNamespace(unique_id="x"), "1")
        assert (load(made, "x"), made._sent) == (0, {})

    run(test)


def test_a_request_that_is_cancelled_before_it_is_sent_counts_no_more() -> None:
    async def test() -> None:
        made, x = router(), replica("x")
        waiting, sent = pending("1", HASHES), pending("2", HASHES)
        for request in (waiting, sent):
            await choose(made, request, x)
        waiting.future.cancel()
        sent.future.set_result(x)
        await asyncio.sleep(0)
        assert load(made, "x") == 1

    run(test)


def test_a_request_goes_to_the_replica_that_it_names_or_anywhere_to_be_refused() -> None:
    async def test() -> None:
        made, x, y = router(), replica("x", Report(n_open=90)), replica("y")
        assert await choose(made, pending("1", replica="x"), x, y) == ["x"]
        assert await choose(made, pending("2", replica="gone"), x, y) == ["y", "x"]

    run(test)


def test_another_report_replaces_the_last_one() -> None:
    async def test() -> None:
        made = router()
        held = Report(frozenset(map(short, HASHES)))
        assert (await choose(made, None, replica("x", held), replica("y")))[0]
        policy: Any = made._policy
        assert policy.held("x", [short(name) for name in HASHES]) == 5
        await choose(made, None, replica("x", Report()), replica("y"))
        assert policy.held("x", [short(name) for name in HASHES]) == 0

    run(test)
