"""Two replicas on Ray: affinity, overload, a killed replica, scaling, streams and cancellation.

They run if Ray is installed (pip install 'ray[serve]'), in a cluster of their own with two CPUs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pyvelo.cluster.start import prefer_fast_calls

prefer_fast_calls()  # before Ray is imported

ray = pytest.importorskip("ray", reason="needs pip install 'ray[serve]'")

import httpx  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray import serve
    from ray.util import list_named_actors

    from pyvelo.cluster.deployments import application
from pyvelo.cluster.options import parse  # noqa: E402
from scripts.bench._http import free_port  # noqa: E402

ROOT = Path(__file__).parents[2]
WAIT = 60.0
"""Seconds after which something is taken to hang."""
SMALL = ["--ctx", "16384", "--kv-cache-bytes", "64M", "--threads", "1", "--cpus", "0.5", "--deterministic"]
TEXT = "cuts the KV cache into blocks, and a table says where the blocks of a sequence are. "

pytestmark = pytest.mark.filterwarnings("default")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition is true; return its value."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {WAIT} s: {what}")


class Cluster:
    """Application on Ray, and clients of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._options: tuple[str, ...] = ()

    def start(self, *options: str) -> None:
        """Start the application, unless it runs with these options already."""
        if options == self._options:
            return
        self._options = options
        wanted = parse([*SMALL, *options])
        assert not isinstance(wanted, int)
        wanted = dataclasses.replace(wanted, port=int(self.url.rpartition(":")[2]))
        serve.run(application(wanted, listens=True), name="pyvelo", route_prefix=None)

    def is_ready(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=WAIT).status_code == 200
        except httpx.HTTPError:
            return False

    def replicas(self) -> dict[str, Any]:
        """Return the actors of the replicas by their names."""
        return self.actors("Replica")

    def actors(self, deployment: str) -> dict[str, Any]:
        start = f"SERVE_REPLICA::pyvelo#{deployment}#"
        named = [each["name"] for each in list_named_actors(all_namespaces=True)]
        return {
            name.removeprefix(start): ray.get_actor(name, namespace="serve")
            for name in named
            if name.startswith(start)
        }

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the reports of the replicas that have started."""
        calls = {name: actor.record_routing_stats.remote() for name, actor in self.replicas().items()}
        reports = {}
        for name, call in calls.items():
            with suppress(ray.exceptions.RayError):
                reports[name] = ray.get(call)
        return reports

    def busy(self) -> int:
        return sum(report["n_open"] for report in self.reports().values())

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=WAIT)

    def complete(self, prompt: str, **fields: Any) -> tuple[str, int]:
        """Return the replica of a completion, and the cached tokens of its prompt."""
        answer = self.post({"prompt": prompt, "max_tokens": 2, **fields})
        assert answer.status_code == 200, answer.text
        return replica_of(answer), answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def settled(self) -> None:
        """Wait until nothing runs, and the routers have reports of that."""
        until(lambda: not self.busy(), "all requests end")
        time.sleep(2.5)


def replica_of(answer: httpx.Response) -> str:
    return str(answer.headers["x-pyvelo-replica"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port = free_port()
    os.environ["PYTHONPATH"] = str(ROOT)  # of the processes that Ray starts
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name in ("REPLICA", "HANDLE"):
        os.environ[f"RAY_SERVE_{name}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(proxy_location="Disabled")
    try:
        yield Cluster(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def two(cluster: Cluster) -> Cluster:
    cluster.start("--replicas", "2")
    until(lambda: len(cluster.replicas()) == 2, "two replicas")
    cluster.settled()
    return cluster


def test_equal_prefixes_meet_and_others_spread(two: Cluster) -> None:
    prompts = [f"{number} is the number of a text that {TEXT * 6}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(two.complete, prompt, max_tokens=300, ignore_eos=True) for prompt in prompts]
        first = [call.result() for call in calls]
    assert {n_cached for _, n_cached in first} == {0}
    assert len({replica for replica, _ in first}) == 2, "one replica got everything"
    again = [two.complete(prompt + "More.") for prompt in prompts]  # from the memory of the router
    two.settled()
    later = [two.complete(prompt + "Still more.") for prompt in prompts]  # and from the reports
    for found in (again, later):
        assert [replica for replica, _ in found] == [replica for replica, _ in first]
        assert all(n_cached >= 64 for _, n_cached in found)


def test_a_new_router_finds_the_prefixes_by_the_reports(two: Cluster) -> None:
    prompts = [f"{number} again names a text which {TEXT * 6}" for number in range(4)]
    first = [two.complete(prompt)[0] for prompt in prompts]
    [(old, actor)] = two.actors("Front").items()
    ray.kill(actor)
    until(lambda: two.actors("Front").keys() - {old}, "another ingress")
    until(two.is_ready, "it answers")
    two.settled()
    assert [two.complete(prompt)[0] for prompt in prompts] == first


def test_endpoints_and_errors_pass_through(two: Cluster) -> None:
    embedding = {"input": ["a", "b"], "pooling": "mean"}
    chat = two.post({"messages": [{"role": "user", "content": "What is 2 + 2?"}]}, "/v1/chat/completions")
    assert "4" in chat.json()["choices"][0]["message"]["content"]
    assert two.post(embedding, "/v1/embeddings").json()["data"][1]["index"] == 1
    assert two.post({"prompt": "Hi"}, "/tokenize").json()["count"] >= 1
    assert httpx.get(two.url + "/health").json() == {"status": "ok"}
    assert two.post({"prompt": 3}).status_code == 400
    refused = two.post({"prompt": "a", "model": "gpt-17"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(two.url + "/nowhere").status_code == 404
    metrics = httpx.get(two.url + "/metrics").text
    assert all(f'replica="{name}"' in metrics for name in two.replicas())


def test_sessions_stay_at_their_replica(two: Cluster) -> None:
    sessions: list[httpx.Response] = []
    with ThreadPoolExecutor(8) as pool:
        while len(sessions) < 48 and len(set(map(replica_of, sessions))) < 2:
            bodies = [{"prompt": f"{len(sessions) + n} {TEXT * 9}"} for n in range(8)]
            sessions += pool.map(lambda body: two.post(body, "/v1/sessions"), bodies)
    owners = [replica_of(answer) for answer in sessions]
    assert len(set(owners)) == 2
    listed = httpx.get(two.url + "/v1/sessions").json()["data"]
    assert {each["id"] for each in listed} == {answer.json()["id"] for answer in sessions}
    for answer, owner in zip(sessions, owners, strict=True):
        more = two.post({"max_tokens": 2}, f"/v1/sessions/{answer.json()['id']}/generate")
        assert (more.status_code, replica_of(more)) == (200, owner)
    stored = two.post({"input": "Hi", "max_output_tokens": 2}, "/v1/responses")
    body = {"input": "And?", "max_output_tokens": 2, "previous_response_id": stored.json()["id"]}
    for _ in range(3):
        assert replica_of(two.post(body, "/v1/responses")) == replica_of(stored)
    gone = sessions[0].json()["id"].rpartition("_")[0] + "_dead"
    answer = two.post({"max_tokens": 2}, f"/v1/sessions/{gone}/generate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_gone")


def test_events_arrive_before_the_end(two: Cluster) -> None:
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", two.url + "/v1/completions", json=body, timeout=WAIT) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert two.busy() == 1, "the answer was complete before its first event was sent"
        rest = list(lines)
    events = [line for line in rest if line]
    assert events.pop() == "data: [DONE]"
    assert len(events) >= 100  # a token may be half a character, and an event may have two
    assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_cancels(two: Cluster) -> None:
    body = {"prompt": "Once", "max_tokens": 15_000, "n": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", two.url + "/v1/completions", json=body, timeout=WAIT) as answer:
        lines = answer.iter_lines()  # without a name it would be dropped, and the connection closed
        next(lines)
        assert two.reports()[replica_of(answer)]["n_running"] == 4
    left = time.monotonic()
    until(lambda: not two.busy(), "the request ends")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(two.url + "/v1/completions", json={**body, "stream": False}, timeout=1.0)
    until(lambda: not two.busy(), "the request ends whose answer has not begun")
    assert time.monotonic() - left < 15.0, "the answers ended by themselves"


def test_an_overloaded_replica_shares_its_prefix(cluster: Cluster) -> None:
    cluster.start("--replicas", "2", "--slack", "2", "--factor", "1")
    until(lambda: len(cluster.replicas()) == 2, "two replicas")
    cluster.settled()
    prompt = "All read this: " + TEXT * 6
    owner, _ = cluster.complete(prompt)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(cluster.complete, prompt, max_tokens=400, ignore_eos=True) for _ in range(8)]
        replicas = Counter(call.result()[0] for call in calls)
    assert set(replicas.values()) == {4}, replicas
    assert owner in replicas


def test_refusals_and_their_retry_after_pass_through(cluster: Cluster) -> None:
    cluster.start("--replicas", "2", "--max-num-seqs", "1", "--max-queue", "1")
    until(lambda: len(cluster.replicas()) == 2, "two replicas")
    cluster.settled()
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: cluster.post(body), range(16)))
    assert {answer.status_code for answer in answers} == {200, 503}
    assert sum(answer.status_code == 200 for answer in answers) >= 4
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 120


def test_a_killed_replica_loses_no_request_that_had_not_begun(cluster: Cluster) -> None:
    cluster.start("--replicas", "2", "--max-num-seqs", "1", "--slack", "9")
    until(lambda: len(cluster.replicas()) == 2, "two replicas")
    cluster.settled()
    prompt = "They wait in one queue: " + TEXT * 6
    long = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    told: list[str] = []
    begun, killed = threading.Event(), threading.Event()

    def listen() -> str:
        with httpx.stream("POST", cluster.url + "/v1/completions", json=long, timeout=WAIT) as answer:
            for line in answer.iter_lines():
                told.append(line)
                begun.set()
            return replica_of(answer)

    with ThreadPoolExecutor(8) as pool:
        stream = pool.submit(listen)
        assert begun.wait(WAIT)
        waiting = [pool.submit(cluster.post, {"prompt": prompt, "max_tokens": 3}) for _ in range(4)]
        reports = until(
            lambda: next((found for found in [cluster.reports()] if cluster_open(found) == 5), None),
            "all five are at their replicas",
        )
        victim = max(reports, key=lambda name: reports[name]["n_open"])
        assert reports[victim]["n_open"] == 5
        ray.kill(cluster.replicas()[victim])
        killed.set()
        assert stream.result() == victim
        answers = [each.result() for each in waiting]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(replica_of(answer) != victim for answer in answers)
    assert told[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:]) for line in told[:-2] if line]
    assert events[-1]["error"]["code"] == "replica_lost"
    assert all("choices" in event for event in events[:-1])
    until(lambda: len(cluster.replicas().keys() - {victim}) == 2, "the replica is replaced")
    assert cluster.complete(prompt)[0] != victim


def cluster_open(reports: dict[str, dict[str, Any]]) -> int:
    return sum(report["n_open"] for report in reports.values())


def test_replicas_come_with_load_and_end_without(cluster: Cluster) -> None:
    scale = ["--target-requests", "1", "--upscale-delay", "0.5", "--downscale-delay", "1"]
    cluster.start("--autoscale", "2:3", *scale)
    cluster.settled()
    assert len(cluster.replicas()) == 2
    stop = threading.Event()

    def load(number: int) -> int:
        n_answers = 0
        while not stop.is_set():
            cluster.complete(f"{number} {TEXT}", max_tokens=200, ignore_eos=True)
            n_answers += 1
        return n_answers

    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(load, number) for number in range(6)]
        try:
            until(lambda: len(cluster.reports()) == 3, "a third replica")
            until(lambda: all(report["n_open"] for report in cluster.reports().values()), "it gets requests")
        finally:
            stop.set()
        assert all(call.result() >= 1 for call in calls)
    until(lambda: len(cluster.replicas()) == 2, "two replicas again")
    assert cluster.complete("Once")[0] in cluster.replicas()


def test_the_command_serves_until_a_signal() -> None:
    port = free_port()
    command = [sys.executable, "-m", "pyvelo.cluster.ray", "--port", str(port), "--drain", "1", *SMALL]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("served at"))
            assert line == f"served at http://127.0.0.1:{port}/v1 (Ctrl-C ends)\n"
            models = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=WAIT).json()["data"]
            assert models[0]["id"] == "demo"
            foreign = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"host": "evil.example"})
            assert foreign.status_code == 403
            body = {"prompt": "Once", "max_tokens": 15_000, "n": 4, "ignore_eos": True, "stream": True}
            url = f"http://127.0.0.1:{port}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=WAIT) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                *_, error, _, done, _ = lines
            assert '"code":"draining"' in error
            assert done == "data: [DONE]"
            process.stdout.read()
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/v1/models")
