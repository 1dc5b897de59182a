"""Workloads that are drawn, read from a file, or taken from a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pyvelo.errors import ConfigError
from pyvelo.simulate.workload import (
    END,
    Job,
    Lengths,
    Texts,
    WorkloadSpec,
    draw_jobs,
    jobs_of_trace,
    parse_lengths,
    parse_prefix,
    read_jobs,
)
from pyvelo.trace.format import Arrived, Finished, TraceHeader, TraceWriter, read_trace


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("200", 200, 0),
        ("uniform:100:300", 200, 201 / 12**0.5),
        ("exponential:200", 200, 200),
        ("lognormal:200:150", 200, 150),
    ],
)
def test_lengths_have_their_mean_and_spread(text: str, mean: float, deviation: float) -> None:
    drawn = parse_lengths(text).draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.05, abs=0.1)
    assert drawn.min() >= 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "-3", "0", "many", "uniform:5", "uniform:9:5", "normal:5:5", "lognormal:0:1", "lognormal:5:-1"),
        *("exponential:inf", "exponential:nan", "lognormal:5", "fixed", "10000000", "uniform:1:2:3"),
    ],
)
def test_invalid_lengths_raise(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a length"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", "300", "300:", "300:0", "300:1.5", "0:0.5", "a:b", "300:nan", "-1:0.5"])
def test_invalid_prefixes_raise(text: str) -> None:
    with pytest.raises(ConfigError, match="shared prefix"):
        parse_prefix(text)
    assert parse_prefix("300:0.8") == (300, 0.8)


def spec(**settings: object) -> WorkloadSpec:
    usual = {
        "n_requests": 2000,
        "rate": 4.0,
        "prompt": Lengths("exponential", 100),
        "answer": Lengths("exponential", 50),
        "max_tokens": 80,
    }
    return WorkloadSpec(**{**usual, **settings})  # type: ignore[arg-type]


def test_a_drawn_workload() -> None:
    jobs = draw_jobs(spec(prefixes=[(60, 0.5), (40, 0.25)]), 400)
    assert jobs == draw_jobs(spec(prefixes=[(60, 0.5), (40, 0.25)]), 400)
    assert jobs != draw_jobs(spec(prefixes=[(60, 0.5), (40, 0.25)], seed=1), 400)
    times = [job.time for job in jobs]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] / len(jobs) == pytest.approx(1 / 4, rel=0.1)
    assert all(1 <= job.n_answer <= job.max_tokens <= 80 for job in jobs)
    assert all(job.n_prompt + job.max_tokens <= 400 for job in jobs)
    shared = {n: [job for job in jobs if job.n_shared == n] for n in (60, 40)}
    assert len(shared[60]) == pytest.approx(1000, rel=0.1)
    assert len(shared[40]) == pytest.approx(500, rel=0.2)
    assert len({job.like for job in shared[60]}) == len({job.like for job in shared[40]}) == 1
    at_once = draw_jobs(spec(rate=float("inf")), 400)
    assert {job.time for job in at_once} == {0.0}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"n_requests": 0}, {"max_tokens": 0}, {"samples": 0}, {"rate": 0.0}, {"rate": float("nan")}),
        *({"seed": -1}, {"prefixes": [(5, 0.7), (5, 0.7)]}),
    ],
)
def test_invalid_workloads_raise(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        spec(**wrong)


def test_jobs_share_exactly_n_shared_tokens() -> None:
    jobs = [
        Job(0, 20, 5, 9),
        Job(1, 30, 4, 4, like=0, n_shared=23),
        Job(2, 12, 4, 4, samples=2, like=1, n_shared=12),
    ]
    texts = Texts(jobs, 3)
    first, second, third = (texts.prompt(index) for index in range(3))
    assert [len(first), len(second), len(third)] == [20, 30, 12]
    assert second[:23].tolist() == [*first.tolist(), *texts.answer(0, 0)[:3].tolist()]
    assert third.tolist() == second[:12].tolist()
    answers = [texts.answer(0, 0), texts.answer(2, 0), texts.answer(2, 1)]
    assert [len(answer) for answer in answers] == [5, 4, 4]
    assert [answer[-1] == END for answer in answers] == [True, False, False]
    assert answers[1].tolist() != answers[2].tolist()
    assert all(token != END for text in (first, second, answers[1]) for token in text)


def test_a_described_workload(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    requests = [
        {"prompt": 10, "answer": 3},
        {"time": 1.5, "prompt": 20, "answer": 3, "max_tokens": 9, "samples": 2, "like": 0},
        {"time": 1.5, "prompt": 20, "answer": 3, "like": 1, "shared": 7},
    ]
    path.write_text(json.dumps({"requests": requests}), encoding="utf-8")
    assert read_jobs(path) == [
        Job(0.0, 10, 3, 3),
        Job(1.5, 20, 3, 9, 2, 0, 13),
        Job(1.5, 20, 3, 3, 1, 1, 7),
    ]


FIRST = {"time": 1, "prompt": 10, "answer": 3}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "requests"),
        ('{"requests": []}', "requests"),
        (json.dumps({"requests": [7]}), "request 0: not an object"),
        *(
            (json.dumps({"requests": [FIRST, {**FIRST, **wrong}]}), f"request 1: .*{says}")
            for wrong, says in (
                ({"promt": 3}, "promt"),
                ({"prompt": 0}, "prompt=0"),
                ({"prompt": "3"}, "prompt='3'"),
                ({"prompt": True}, "prompt=True"),
                ({"answer": None}, "answer=None"),
                ({"time": 0}, "before"),
                ({"time": "x"}, "seconds"),
                ({"max_tokens": 2}, "max_tokens=2"),
                ({"samples": 0}, "samples=0"),
                ({"like": 1}, "like=1"),
                ({"like": 0, "shared": 11}, "shared=11"),
                ({"shared": 1}, "shared=1"),
            )
        ),
    ],
)
def test_an_invalid_description_names_the_request(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "work.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_jobs(path)


def test_the_first_request_is_like_no_other(tmp_path: Path) -> None:
    path = tmp_path / "work.json"
    path.write_text('{"requests": [{"prompt": 3, "answer": 2, "like": 0}]}', encoding="utf-8")
    with pytest.raises(ConfigError, match="request 0: like: the first request has none before it"):
        read_jobs(path)


def test_the_workload_of_a_recorded_run(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run.trace", TraceHeader(8, 4, 64, 100, 0))
    writer.write(0.5, {}, {}, {}, [Arrived(1, 10, 20, 0, 0), Arrived(2, 10, 20, 1, 8)])
    writer.write(1.5, {}, {}, {}, [Arrived(3, 30, 5, 2, 8), Arrived(4, 9, 5, 1, 8), Finished(1, 7, "stop")])
    writer.write(2.5, {}, {}, {}, [Finished(3, 5, "length"), Finished(4, 0, "abort")])
    writer.close()
    jobs = jobs_of_trace(read_trace(tmp_path / "run.trace"))
    assert jobs == [Job(0.5, 10, 7, 20), Job(1.5, 30, 5, 5)], "a request that did not end is left out"
    TraceWriter(tmp_path / "empty", TraceHeader(8, 4, 64, 100, 0)).close()
    with pytest.raises(ConfigError, match="no request"):
        jobs_of_trace(read_trace(tmp_path / "empty"))
