"""/metrics: text that Prometheus reads, and numbers that agree with what was asked."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyvelo.server.metrics import Histogram

from .conftest import Serve
from .servers import Server

COMPLETIONS = "/v1/completions"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(server: Server) -> Samples:
    """Return the values of all metrics by name and labels, without the model's name."""
    answer = server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(answer.data.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "demo") == "demo"
            key = (sample.name, frozenset(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"pyvelo:{name}", frozenset(labels.items())]


def test_counters_agree_with_what_was_asked(serve: Serve) -> None:
    server = serve()
    usages = [
        server.ask(COMPLETIONS, {"prompt": [8] * 100, "max_tokens": 5, "ignore_eos": True, "n": n})["usage"]
        for n in (1, 3)
    ]
    server.stream(COMPLETIONS, {"prompt": [9] * 10, "max_tokens": 200, "ignore_eos": True})
    server.stream(COMPLETIONS, {"prompt": "a", "guided_choice": ["b"], "max_tokens": 20})
    assert server.post(COMPLETIONS, {"prompt": 1}).status == 400
    assert server.get("/v1/nothing").status == 404
    server.until_idle()
    found = samples_of(server)
    stats = server.serving.engine.stats()

    assert value(found, "generation_tokens_total") == stats.completion_tokens
    assert value(found, "prompt_tokens_total") == stats.prompt_tokens
    assert value(found, "steps_total") == stats.steps
    assert value(found, "prefix_cache_hits_total") == stats.hit_tokens > 0
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    assert value(found, "request_success_total", finished_reason="length") == 1 + 3 + 1
    assert value(found, "request_success_total", finished_reason="stop") == 1
    assert value(found, "http_requests_total", path=COMPLETIONS, status="200") == 4
    assert value(found, "http_requests_total", path=COMPLETIONS, status="400") == 1
    assert value(found, "http_requests_total", path="other", status="404") == 1
    assert value(found, "request_prompt_tokens_count") == 4
    assert value(found, "request_prompt_tokens_sum") == 100 + 100 + 10 + 1
    assert value(found, "request_prompt_tokens_bucket", le="10.0") == 2
    assert value(found, "request_prompt_tokens_bucket", le="+Inf") == 4
    assert value(found, "request_generation_tokens_sum") == stats.completion_tokens
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value(found, f"{name}_count") == 4
        assert value(found, f"{name}_sum") > 0
    assert value(found, "inter_token_latency_seconds_count") > 0
    assert value(found, "kv_cache_usage_perc") == 0
    blocks = {state: value(found, "kv_blocks", state=state) for state in ("used", "cached", "free")}
    assert blocks == {"used": 0, "cached": stats.blocks_cached, "free": stats.blocks_free}
    assert value(found, "http_requests_open") == 0
    assert value(found, "queued_prompt_tokens") == 0


def test_gauges_show_what_runs_and_waits(serve: Serve) -> None:
    server = serve(max_num_seqs=1, max_queue=0)
    body = {"prompt": [8] * 40, "max_tokens": 400, "ignore_eos": True}
    with server.client() as client, server.paused_at(lambda stats: stats.completion_tokens == 5) as wait:
        client.send(COMPLETIONS, {**body, "stream": True})
        wait()
        assert server.post(COMPLETIONS, body).status == 503
        found = samples_of(server)
    assert value(found, "num_requests_running") == 1
    assert value(found, "http_requests_open") == 1
    assert value(found, "kv_blocks", state="used") >= 2
    assert value(found, "kv_cache_usage_perc") > 0
    assert value(found, "admission_rejections_total", reason="requests") == 1
    server.until_idle()
    assert samples_of(server)["pyvelo:num_requests_running", frozenset()] == 0


@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_adds_the_names_of_vllm(serve: Serve, flag: bool) -> None:
    server = serve(n_ctx=64, vllm_metrics=flag)
    server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    found = samples_of(server)
    named = {name.removeprefix("vllm:"): labels for name, labels in found if name.startswith("vllm:")}
    assert bool(named) == flag
    if not flag:
        return
    ours = {name.removeprefix("pyvelo:") for name, _ in found if name.startswith("pyvelo:")}
    assert {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_count",
    } <= set(named) & ours
    for (name, labels), number in found.items():
        if name.startswith("vllm:"):
            assert found[name.replace("vllm:", "pyvelo:"), labels] == number


def test_a_model_name_with_quotes_is_escaped(serve: Serve) -> None:
    server = serve(n_ctx=64, model_names=('a "b"\\c',))
    text = server.get("/metrics").data.decode()
    names = {
        sample.labels["model_name"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "model_name" in sample.labels
    }
    assert names == {'a "b"\\c'}


def test_a_histogram_counts_each_value_in_all_buckets_above_it() -> None:
    histogram = Histogram((1, 2, 5))
    for number, times in ((0.5, 1), (1, 1), (1.5, 2), (5, 1), (9, 1)):
        histogram.add(number, times)
    buckets, total = histogram.buckets()
    assert buckets == [("1.0", 2.0), ("2.0", 4.0), ("5.0", 5.0), ("+Inf", 6.0)]
    assert total == 0.5 + 1 + 3 + 5 + 9


def test_a_scrape_never_waits_for_a_step(server: Server) -> None:
    """Nor do the other answers without work."""
    body: dict[str, Any] = {"prompt": [8] * 40, "max_tokens": 4, "ignore_eos": True}
    with server.client() as client:
        with server.paused_at(lambda stats: stats.running == 1) as wait:
            client.send(COMPLETIONS, body)
            wait()
            for path in ("/health", "/metrics", "/version", "/v1/models", "/openapi.json"):
                assert server.get(path).status == 200
            assert server.post("/tokenize", {"prompt": "a b"}).json["count"] > 0
        assert b" 200 " in client.answer()
    server.until_idle()
