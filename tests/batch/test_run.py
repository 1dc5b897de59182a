"""Runs of a batch: the server's answers, bounds, order, resumption, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import sys
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.batch.flow import Room
from pyvelo.batch.lines import read_rows
from pyvelo.batch.rows import MAX_LINE
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import EngineError, ModelError
from pyvelo.server.app import App
from tests.server.servers import SETTINGS, Server

from .batches import PROMPT, Echo, keys_of, results_of, row, run_batch, run_echo, written

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "max_tokens": 24,
    "temperature": 0,
}
BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 5}),
    ("/v1/chat/completions", {**CHAT, "stream": False, "n": 2, "seed": 4, "temperature": 1.0}),
    ("/v1/completions", {**PROMPT, "model": "demo"}),
    (
        "/v1/completions",
        {"prompt": ["I am", "The KV"], "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1},
    ),
    ("/completions", {**PROMPT, "max_tokens": 0}),
    ("/v1/embeddings", {"input": ["The KV cache", "x"], "pooling": "mean"}),
    ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 4, "temperature": 0}),
    ("/v1/messages", {**CHAT, "model": "demo"}),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": CHAT["messages"]}),
    ("/completion", {"prompt": "The KV cache", "n_predict": 4, "temperature": 0}),
    ("/tokenize", {"prompt": "The KV cache"}),
    ("/apply-template", {"messages": CHAT["messages"]}),
]
REFUSED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {**CHAT, "model": "gpt-4"}),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}),
    ("/v1/chat/completions", {**CHAT, "tempreature": 1}),
    ("/v1/chat/completions", {**CHAT, "chat_template": "{{ x.y.z }}"}),
    ("/v1/completions", {"prompt": [5] * 600}),
    ("/v1/completions", {"prompt": {}}),
    ("/v1/completions", {**PROMPT, "guided_regex": "("}),
    ("/v1/completions", [1]),
    ("/v1/completions", None),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/messages", {"messages": 3}),
    ("/detokenize", {"tokens": [-1]}),
]
OWN = {
    *("id", "created", "created_at", "completed_at", "call_id", "item_id", "timings", "generation_settings"),
    "pyvelo",
}
"""Fields that differ from answer to answer."""


def without_own(value: Any) -> Any:
    """Return an answer without what no other one has: names, times and cached tokens."""
    if isinstance(value, dict):
        kept = {name: without_own(each) for name, each in value.items() if name not in OWN}
        return {
            name: 0 if name in ("cached_tokens", "tokens_cached") else each for name, each in kept.items()
        }
    return [without_own(each) for each in value] if isinstance(value, list) else value


def test_the_server_answers_the_same(server: Server, tmp_path: Path) -> None:
    asked = BODIES + REFUSED
    source = written(tmp_path / "in", [row(str(i), body, url) for i, (url, body) in enumerate(asked)])
    counts = run_batch(source, tmp_path / "out")
    found = {each["custom_id"]: each["response"] for each in results_of(tmp_path / "out")}
    for i, (url, body) in enumerate(asked):
        there = server.post(url, b"null" if body is None else body)
        here = found[str(i)]
        assert (here["status_code"], without_own(here["body"])) == (there.status, without_own(there.json)), (
            url
        )
        assert (there.status == 200) == (i < len(BODIES))
    assert (counts.rows, counts.answered, counts.failed) == (len(asked), len(asked), len(REFUSED))
    assert counts.errors[0].startswith(f"line {len(BODIES) + 1}: messages must be ")


def test_tokens_are_counted_for_each_endpoint(tmp_path: Path) -> None:
    bodies = [(url, body) for url, body in BODIES if "token" not in url and "stream" not in body]
    for i, (url, body) in enumerate(bodies):
        source = written(tmp_path / f"in{i}", [row("a", body, url)])
        counts = run_batch(source, tmp_path / f"out{i}")
        assert counts.prompt_tokens > 0 or url == "/apply-template", url
        generates = url not in ("/v1/embeddings", "/apply-template") and body.get("max_tokens") != 0
        assert (counts.completion_tokens > 0) == generates, url


def test_two_thousand_rows_take_constant_memory(tmp_path: Path) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    big = "é" * 10_000  # such rows fail, because their prompts are too long
    lines = [
        row(str(i), {"prompt": f"Row {i}", "max_tokens": 2} if i % 2 else {"prompt": big})
        for i in range(2_000)
    ]
    first, source = written(tmp_path / "first", lines[:600]), written(tmp_path / "in", lines)
    del lines
    run_batch(first, tmp_path / "first out")
    before = peak()
    assert source.stat().st_size > 48 << 20
    counts = run_batch(source, tmp_path / "out")
    assert (counts.answered, counts.failed) == (2_000, 1_000)
    assert peak() - before < 24 << 20
    assert sorted(map(int, keys_of(results_of(tmp_path / "out")))) == list(range(2_000))


# ---- without an engine ----


def test_many_rows_run_at_once_and_not_more(tmp_path: Path) -> None:
    app = Echo()
    source = written(tmp_path / "in", [row(str(i), {"wait": 0.001 * (i % 3)}) for i in range(100)])
    run_echo(source, tmp_path / "out", n_rows=4, app=app)
    assert app.most_open == 8
    assert sorted(map(int, keys_of(results_of(tmp_path / "out")))) == list(range(100))


def test_order(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = [row(str(i), {"wait": draw.random() / 200}) if i % 5 else b"?" for i in range(100)]
    names = [str(i) if i % 5 else i + 1 for i in range(100)]
    source = written(tmp_path / "in", lines)
    run_echo(source, tmp_path / "out", n_rows=20)
    assert keys_of(results_of(tmp_path / "out")) != names
    run_echo(source, tmp_path / "ordered", n_rows=20, ordered=True)
    assert keys_of(results_of(tmp_path / "ordered")) == names


@pytest.mark.parametrize("ordered", [False, True])
def test_any_cut_is_resumed(tmp_path: Path, ordered: bool) -> None:
    """At every byte: all rows have one result in the end, and none runs again that had one."""
    lines = [row("a"), b"?", row("b", url="/x"), row("a"), b"", row("é"), row("c", {"status": 400}), b"[]"]
    source, results = written(tmp_path / "in", lines), tmp_path / "out"
    counts = run_echo(source, results, ordered=ordered)
    assert (counts.rows, counts.answered, counts.failed) == (7, 7, 5)
    whole = results.read_bytes()
    keys = keys_of(results_of(results))
    assert sorted(map(str, keys)) == ["2", "4", "8", "a", "b", "c", "é"]
    for cut in range(len(whole) + 1):
        results.write_bytes(whole[:cut])
        n_whole = whole[: cut + 1].count(b"\n")  # if the line end alone is missing, the result is whole
        n_failed = sum(
            json.loads(line)["response"]["status_code"] != 200 for line in whole.split(b"\n")[:n_whole]
        )
        app = Echo()
        counts = run_echo(source, results, ordered=ordered, app=app)
        found = keys_of(results_of(results))
        assert found[:n_whole] == keys[:n_whole]
        assert sorted(map(str, found)) == sorted(map(str, keys)), cut
        assert (counts.skipped, counts.failed_before) == (n_whole, n_failed)
        assert len(app.asked) == sum(key in ("a", "é", "c") for key in keys[n_whole:])
        if ordered:
            assert found == keys


def test_a_row_that_was_mended_runs(tmp_path: Path) -> None:
    source, results = written(tmp_path / "in", [b"?", row("a")]), tmp_path / "out"
    run_echo(source, results)
    written(source, [row("b"), row("a")])
    assert run_echo(source, results).answered == 1
    assert keys_of(results_of(results))[-1] == "b"


def test_early_results_hold_rows_back_in_an_ordered_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyvelo.batch.run.Room", lambda n: Room(n, 100_000))
    app = Echo()
    lines = [row("slow", {"wait": 0.2}), *(row(str(i), {"size": 10_000}) for i in range(100))]
    source, results = written(tmp_path / "in", lines), tmp_path / "out"
    timer = threading.Timer(0.1, lambda: asked.append(len(app.asked)))
    asked: list[int] = []
    timer.start()
    run_echo(source, results, ordered=True, app=app)
    timer.join()
    assert asked[0] < 20
    assert keys_of(results_of(results)) == ["slow", *map(str, range(100))]


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    lines = [row("a"), b"x" * (MAX_LINE + 1), row("b"), b'"' + b"y" * (2 * MAX_LINE)]
    run_echo(written(tmp_path / "in", lines), tmp_path / "out", ordered=True)
    found = results_of(tmp_path / "out")
    assert keys_of(found) == ["a", 2, "b", 4]
    assert found[1]["response"]["status_code"] == 413


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(row("a") + b"\r\n\r\n  \n" + row("b"))
    assert run_echo(source, tmp_path / "out").answered == 2


def test_nothing_to_do(tmp_path: Path) -> None:
    assert run_echo(written(tmp_path / "in", []), tmp_path / "out").rows == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_rows_of_a_pipe_are_read_as_they_come(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    async def main() -> list[Any]:
        found = []
        os.write(writer, row("a") + b"\n" + row("b"))
        with FileIO(reader) as file:
            async for each in read_rows(file):
                found.append(each.custom_id)
                if each.custom_id == "a":
                    os.write(writer, b"\n")
                else:
                    os.close(writer)
        return found

    assert asyncio.run(main()) == ["a", "b"]


def test_a_broken_engine_ends_the_run(tmp_path: Path) -> None:
    app = Echo()

    def check_open() -> None:
        raise EngineError("the engine broke")

    app.serving.engine.loop.check_open = check_open
    lines = [row("a"), row("b", {"status": 503, "wait": 0.01}), *(row(str(i), {"wait": 9}) for i in range(9))]
    with pytest.raises(EngineError, match="the engine broke"):
        run_echo(written(tmp_path / "in", lines), tmp_path / "out", app=app)
    assert keys_of(results_of(tmp_path / "out")) == ["a"]


def test_a_model_that_is_changed_ends_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(DEMO_MODEL, model)
    source = written(tmp_path / "rows.jsonl", [row(str(i)) for i in range(2000)])
    results = tmp_path / "results.jsonl"

    def change() -> None:
        while not results.exists() or not results.stat().st_size:
            time.sleep(0.001)
        os.utime(model)

    threading.Thread(target=change).start()
    with pytest.raises(ModelError, match="was written to while it was in use"):
        run_batch(source, results, model=model)
    found = results_of(results)
    assert 0 < len(found) < 2000
    assert all(each["response"]["status_code"] == 200 for each in found)


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyvelo.batch.output.Output.append", append)
    source = written(tmp_path / "in", [row("a"), row("b", {"wait": 30})])
    with pytest.raises(OSError, match="No space left"):
        run_echo(source, tmp_path / "out")


def test_an_input_that_cannot_be_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FileIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("tests.batch.batches.FileIO", Broken)
    with pytest.raises(OSError, match="Input/output"):
        run_echo(written(tmp_path / "in", []), tmp_path / "out")


def test_room() -> None:
    async def main() -> None:
        room = Room(2, 100)
        await room.enter(500)  # alone
        waits = asyncio.ensure_future(room.enter(1))
        await asyncio.sleep(0)
        assert not waits.done()
        room.ended(500, 300)
        await asyncio.sleep(0)
        assert not waits.done()
        room.written(300)
        await waits
        await room.enter(99)
        waits = asyncio.ensure_future(room.enter(0))
        await asyncio.sleep(0)
        assert not waits.done()
        room.ended(1, 0)
        await waits

    asyncio.run(main())


def test_the_batch_of_the_engine_is_always_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes about as many steps as a call that has all prompts at once."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 40) for _ in range(400)]
    engine = {**SETTINGS, "kv_cache_bytes": 16 << 20, "max_num_seqs": 64}
    with LLM(DEMO_MODEL, **engine) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        llm.generate([f"{i} tokens" for i in range(400)], params)
        expected = llm.stats().steps
    bodies = [{"prompt": f"{i} tokens", "max_tokens": n, "ignore_eos": True} for i, n in enumerate(lengths)]
    source = written(tmp_path / "in", [row(str(i), body) for i, body in enumerate(bodies)])
    n_steps: list[int] = []
    drain = App.drain

    async def watched(app: App, seconds: float) -> None:
        n_steps.append(app.serving.engine.stats().steps)
        await drain(app, seconds)

    monkeypatch.setattr(App, "drain", watched)
    counts = run_batch(source, tmp_path / "out", **engine)
    assert counts.completion_tokens == sum(lengths)
    assert n_steps[0] < 1.5 * expected  # half as many rows would take twice as many
