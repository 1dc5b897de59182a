"""examples/batch_with_ray.py: order, retries and failures of rows, with Ray Data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.batch_with_ray import Ask

ROOT = Path(__file__).parents[2]


class Flaky(ThreadingHTTPServer):
    """Server that refuses, or drops, the first request for two of three prompts; "bad" is always refused."""

    daemon_threads = True
    request_queue_size = 64  # by default 5: connections beyond them may be reset

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Flaky

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            self.server.seen[prompt] += 1
            first = self.server.seen[prompt] == 1
        kind = len(prompt) % 3 if first else 2
        if prompt == "bad":
            self.answer(400, {"error": {"message": "never"}})
        elif kind == 0:
            self.answer(503, {}, **{"Retry-After": "0"})
        elif kind == 1:
            self.close_connection = True  # no answer at all
        else:
            content = f"{prompt}! {body['max_tokens']} {self.headers['Authorization']}"
            self.answer(200, {"choices": [{"message": {"content": content}}]})

    def answer(self, status: int, content: Any, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def flaky() -> Iterator[Flaky]:
    with Flaky() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(url: str, tries: int = 5) -> Ask:
    return Ask(
        url, "prompt", {"max_tokens": 7}, at_once=8, tries=tries, headers={"Authorization": "Bearer k"}
    )


def test_a_batch_is_answered_in_order_and_refusals_are_tried_again(flaky: Flaky) -> None:
    prompts = ["x" * n for n in range(1, 40)]
    found = ask(flaky.url)({"prompt": prompts, "id": list(range(39))})
    assert found["answer"] == [f"{prompt}! 7 Bearer k" for prompt in prompts]
    assert found["tries"] == [1 if len(prompt) % 3 == 2 else 2 for prompt in prompts]
    assert set(found["error"]) == {""}
    assert found["id"] == list(range(39))


def test_a_row_that_fails_keeps_its_place(flaky: Flaky) -> None:
    found = ask(flaky.url)({"prompt": ["xx", "bad", "xxxxx"]})
    assert found["answer"] == ["xx! 7 Bearer k", "", "xxxxx! 7 Bearer k"]
    assert [error[:3] for error in found["error"]] == ["", "400", ""]
    assert flaky.seen["bad"] == 1
    assert ask(flaky.url, tries=1)({"prompt": ["xxx"]})["error"][0].startswith("503")
    assert ask("http://127.0.0.1:9/v1", tries=1)({"prompt": ["xxx"]})["error"][0]


def test_a_null_prompt_is_a_failed_row(flaky: Flaky) -> None:
    found = ask(flaky.url)({"prompt": [None, "xx", float("nan"), "None", 7777]})
    assert found["answer"] == ["", "xx! 7 Bearer k", "", "None! 7 Bearer k", "7777! 7 Bearer k"]
    assert found["tries"][::2] == [0, 0, 2]
    assert found["error"] == [
        "no prompt in the column 'prompt'",
        "",
        "no prompt in the column 'prompt'",
        "",
        "",
    ]
    assert set(flaky.seen) == {"xx", "None", "7777"}


def ended(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/batch_with_ray.py", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_a_file_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    done = ended(f"{tmp_path}/none.jsonl", "-o", f"{tmp_path}/out")
    assert (done.returncode, done.stdout) == (1, "")
    sentence = f"{tmp_path}/none.jsonl does not exist: give a file of rows, .jsonl or .parquet\n"
    assert done.stderr == sentence
    assert not (tmp_path / "out").exists()


def test_wrong_files_and_rows_that_all_fail(flaky: Flaky, tmp_path: Path) -> None:
    pytest.importorskip("ray.data", reason="needs pip install 'ray[data]'")
    rows, bad = tmp_path / "rows.jsonl", tmp_path / "bad.jsonl"
    rows.write_text('{"prompt": "bad"}\n{"prompt": null}\n')
    bad.write_text("no JSON\n")
    out, url = str(tmp_path / "out"), flaky.url
    done = ended(str(rows), "-o", out, "--url", url, "--column", "text")
    assert done.returncode == 1
    assert f"{rows} has no column 'text': give --column prompt" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    done = ended(str(bad), "-o", out, "--url", url)
    assert done.returncode == 1
    assert f"{bad} cannot be read as rows: json.decoder.JSONDecodeError: Expecting value" in done.stderr
    done = ended(str(rows), "-o", out, "--url", url)
    assert done.returncode == 1
    assert f"{out}: 2 of 2 rows failed" in done.stdout


def run(path: Path, output: Path, *options: str) -> list[dict[str, Any]]:
    """Run the example in a process of its own, with a Ray of its own."""
    done = ended(*map(str, (path, "-o", output, *options)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{output}: 0 of " in done.stdout
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dataset_through_a_flaky_server(flaky: Flaky, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("ray.data", reason="needs pip install 'ray[data]'")
    rows = [{"id": n, "question": "x" * (n % 60 + 1) + str(n)} for n in range(120)]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    found = run(path, tmp_path / "out.jsonl", "--url", flaky.url, "--column", "question", "--api-key", "k")
    assert [row["id"] for row in found] == list(range(120))
    assert [row["answer"] for row in found] == [f"{row['question']}! 64 Bearer k" for row in rows]
    assert {row["tries"] for row in found} == {1, 2}


@pytest.mark.parametrize("n_rows", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_dataset_through_a_server_of_the_demo_model(tmp_path: Path, n_rows: int) -> None:
    pytest.importorskip("ray.data", reason="needs pip install 'ray[data]'")
    path = tmp_path / "rows.jsonl"
    sums = [(n % 40, n // 40 % 40) for n in range(n_rows)]
    lines = (json.dumps({"prompt": f"What is {a} + {b}?"}) + "\n" for a, b in sums)
    path.write_text("".join(lines), encoding="utf-8")
    found = run(path, tmp_path / "out.jsonl", "--max-tokens", "40")
    assert [row["prompt"] for row in found] == [f"What is {a} + {b}?" for a, b in sums]
    right = sum(str(a + b) in row["answer"] for row, (a, b) in zip(found, sums, strict=True))
    assert right >= 0.9 * n_rows
