"""Scripts of examples/ with the demo model: they run, and their results are as they say."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.agent import FUNCTIONS, run, solve
from examples.classify import classify
from examples.extract import SCHEMA, rows
from examples.gradio_chat import answers_of
from examples.rag import nearest, passages
from examples.tree import grow
from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.demo import DEMO_MODEL
from tests.chat.answers import QWEN
from tests.chat.upstream_templates import folder

ROOT = Path(__file__).parents[2]
LONG = (
    "PyVelo cuts the KV cache into blocks, and a table says where the blocks of each conversation lie. " * 4
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_MODEL, n_ctx=1024, n_threads=1) as opened:
        yield opened


def printed(name: str, *arguments: str, warning: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert warning in done.stderr if warning else not done.stderr
    return done.stdout


def test_every_example_is_tested_and_explains_itself() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {"agent", "batch_with_ray", "classify", "extract", "gradio_chat", "rag", "tree"}
    for name in names:
        assert "default: the demo model" in printed(name, "--help")


def test_a_question_finds_its_paragraph(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "facts.md"
    file.write_text("# Facts\n\nThe KV cache is cut\ninto blocks.\n\n\n\nAnna Berger 4821.\n\n" + "x" * 999)
    texts = passages([file])
    assert texts[:3] == ["# Facts", "The KV cache is cut into blocks.", "Anna Berger 4821."]
    assert len(texts[3]) == 400
    for text in texts:
        assert nearest(llm, text, texts, 1) == [text]
    assert len(nearest(llm, "blocks", texts, 3)) == 3
    out = printed("rag", "The KV cache is cut into blocks.", str(file), "--count", "2")
    assert out.startswith("[1] The KV cache is cut into blocks.\n[2] ")
    assert len(out.splitlines()) >= 3


def test_rows_follow_the_schema(llm: LLM) -> None:
    found = rows(llm, ["Anna is 31 and lives in Rome.", "Ben, 44, from Oslo", "nobody"])
    assert len(found) == 3
    for row in found:
        assert list(row) == list(SCHEMA["properties"])  # type: ignore[call-overload]
        assert 1 <= len(row["name"]) <= 40
        assert 0 <= row["age"] <= 120
    lines = list(csv.DictReader(io.StringIO(printed("extract", "Anna is 31 and lives in Rome."))))
    assert [{**line, "age": int(line["age"])} for line in lines] == found[:1]


def test_classes_are_the_given_ones_and_the_beginning_is_cached(llm: LLM) -> None:
    classes = ["a+b", "c (d)", "everything else"]
    llm.reset_prefix_cache()
    before = llm.stats().hit_tokens
    found = classify(llm, ["I want my money back", "Thanks", "Why?"], classes)
    assert set(found) <= set(classes)
    assert llm.stats().hit_tokens - before >= 3 * llm.geometry.block_size
    out = printed("classify", "one", "two", "--classes", "red", "blue")
    assert re.fullmatch(r"(?:red|blue): one\n(?:red|blue): two\n\d+ of \d+ prompt tokens were .*\n", out)


def test_a_tree_shares_its_trunk(llm: LLM) -> None:
    used = llm.stats().blocks_used
    tips = grow([(0.0, "", llm.session(LONG))], 4, 6, seed=1)
    assert len({text for _, text, _ in tips}) == len(tips) > 1
    trunk = len(llm.tokenize(LONG)) // llm.geometry.block_size
    assert trunk >= 2
    assert llm.stats().blocks_used - used <= trunk + 2 * len(tips)
    for score, _, session in tips:
        assert score < 0
        session.close()
    assert llm.stats().blocks_used == used
    found = [
        tuple(map(int, pair)) for pair in re.findall(r"in (\d+) blocks, not (\d+)", printed("tree", LONG))
    ]
    assert len(found) == 3
    assert all(shared < alone for shared, alone in found[:1])
    assert all(shared <= alone for shared, alone in found)


def test_calls_of_functions() -> None:
    assert run("add", '{"a": 1, "b": 2.5}') == "3.5"
    assert run("power", '{"a": 2, "b": 10}') == "1024.0"
    for name, arguments in (
        ("no", "{}"),
        ("add", "{"),
        ("add", '{"a": 1}'),
        ("power", '{"a": 1e9, "b": 1e9}'),
    ):
        assert run(name, arguments).startswith("error: ")


def test_an_agent_calls_and_answers(make_model: Any) -> None:
    pytest.importorskip("llguidance")
    model = make_model("tiny", "--type", "f32", "--chat-template", str(folder() / f"{QWEN}.jinja"))
    with LLM(model, n_ctx=4096, n_threads=1) as llm:
        talk = solve(llm, "What is 12 * 34?", force=True, turns=2)
    call = talk[1]["tool_calls"][0]
    assert call["function"]["name"] in FUNCTIONS
    results = [message for message in talk if message["role"] == "tool"]
    arguments = json.loads(call["function"]["arguments"])
    assert results[0]["content"] == run(call["function"]["name"], json.dumps(arguments))
    assert results[0]["tool_call_id"] == call["id"]
    assert talk[-1]["role"] in ("assistant", "tool")
    shown = printed("agent", "Who are you?", warning="leaves out tools")  # the demo model's template
    assert shown.startswith("user: Who are you?\nassistant: I am the demo model")


QUESTION = "What is 12 + 30?"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_an_answer_for_gradio_grows_and_knows_what_was_said(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]

    async def shown() -> list[str]:
        async with AsyncLLM(DEMO_MODEL, n_ctx=1024, n_threads=1) as opened:
            return [text async for text in answers_of(opened, GREEDY)(QUESTION, talk)]

    texts = asyncio.run(shown())
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == llm.chat([*talk, {"role": "user", "content": QUESTION}], GREEDY).outputs[0].text


def test_a_page_of_gradio_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "examples/gradio_chat.py", "--port", str(port), "--max-tokens", "8"]
    quiet = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False"}
    with subprocess.Popen(command, cwd=ROOT, env=quiet, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            assert "Running on local URL" in next(line for line in page.stdout if line.strip())
            url = f"http://127.0.0.1:{port}/gradio_api/call/chat"
            event = httpx.post(url, json={"data": [QUESTION]}).raise_for_status().json()["event_id"]
            events = httpx.get(f"{url}/{event}", timeout=60).raise_for_status().text
        finally:
            page.terminate()
    assert events.count("event: generating") > 1
    last = events.rpartition("event: complete\ndata: ")[2]
    assert json.loads(last.strip())[0]
