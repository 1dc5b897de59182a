"""Answer each row of a JSONL or Parquet dataset by a server, with Ray Data.

    pip install "ray[data]"
    python examples/batch_with_ray.py questions.jsonl -o answers.jsonl --url http://127.0.0.1:8000/v1

The answers have the order of the rows. A request that the server refuses for now is sent again after the
time that its answer names; a row that fails for good has a text in "error". Without --url a server starts.
The exit code is 1 if all rows failed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pyvelo.demo import DEMO_MODEL

FOR_NOW = {408, 429, 502, 503, 504}
"""Statuses after which a request is sent again."""
LONGEST = 120.0
"""Most seconds between two tries."""


class Ask:
    """Function of batches of rows: it sends their prompts as messages, several at once.

    Args:
        url: of the server, up to /v1.
        column: with the prompts.
        fields: of each request, such as max_tokens.
        at_once: requests that are open at the same time.
        tries: requests for a row before it fails.
        headers: of each request, such as Authorization.
    """

    def __init__(
        self,
        url: str,
        column: str,
        fields: Mapping[str, Any],
        at_once: int,
        tries: int,
        headers: Mapping[str, str],
    ) -> None:
        self._url, self._column, self._fields, self._tries = url, column, fields, tries
        self._headers = {"Content-Type": "application/json", **headers}
        self._threads = ThreadPoolExecutor(at_once)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the columns answer, tries and error."""
        found = list(self._threads.map(self.ask, batch[self._column]))
        answers, tries, errors = zip(*found, strict=True)
        return {**batch, "answer": list(answers), "tries": list(tries), "error": list(errors)}

    def ask(self, prompt: Any) -> tuple[str, int, str]:
        """Return the answer to a prompt, the number of tries, and why it failed, if it did."""
        if prompt is None or prompt != prompt:  # a column of numbers has NaN for null
            return "", 0, f"no prompt in the column {self._column!r}"
        body = {**self._fields, "messages": [{"role": "user", "content": str(prompt)}]}
        request = Request(f"{self._url}/chat/completions", json.dumps(body).encode(), self._headers)
        error = ""
        for number in range(1, self._tries + 1):
            pause = min(LONGEST, 0.5 * 2**number) * random.uniform(0.5, 1.0)
            try:
                with urlopen(request, timeout=600) as answer:
                    return json.load(answer)["choices"][0]["message"]["content"], number, ""
            except HTTPError as refused:
                error = f"{refused.code}: {refused.read(2000).decode(errors='replace')}"
                if refused.code not in FOR_NOW:
                    return "", number, error
                after = refused.headers.get("Retry-After", "")
                pause = min(LONGEST, float(after)) if after.isdecimal() else pause
            except (OSError, HTTPException) as failed:  # the server is away
                error = str(failed) or type(failed).__name__
            if number < self._tries:
                time.sleep(pause)
        return "", self._tries, error


def read_rows(path: Path, column: str) -> Any:
    """Return the dataset of a file; end with a sentence if it cannot be read or lacks the column."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: give a file of rows, .jsonl or .parquet")
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    read = ray.data.read_parquet if path.suffix == ".parquet" else ray.data.read_json
    try:
        rows = read(str(path))
        columns = rows.columns() or []
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        named = [line for line in lines if re.match(r"[\w.]+(Error|Invalid): ", line)]  # in Ray's traceback
        raise SystemExit(f"{path} cannot be read as rows: {(named or lines)[-1]}") from None
    if columns and column not in columns:
        raise SystemExit(f"{path} has no column {column!r}: give --column {' or '.join(columns)}")
    return rows


def answer_all(
    rows: Any, output: Path, ask: Mapping[str, Any], batch_size: int = 64, n: int = 1
) -> tuple[int, int]:
    """Answer rows; write JSON lines, in the order of the rows. Return the number of failed rows, and of all.

    Args:
        rows: of `read_rows`.
        ask: arguments of `Ask`.
        batch_size: rows of a batch; n: processes that send batches.
    """
    answered = rows.map_batches(
        Ask, fn_constructor_kwargs=dict(ask), batch_size=batch_size, concurrency=n, num_cpus=0.1
    )
    n_failed = n_rows = 0
    with output.open("w", encoding="utf-8") as file:
        for row in answered.iter_rows():
            n_rows += 1
            n_failed += bool(row["error"])
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return n_failed, n_rows


@contextmanager
def server_of(model: str) -> Iterator[str]:
    """Start a server of a model; yield its URL."""
    command = [sys.executable, "-m", "pyvelo", "serve", model, "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            if "at" not in words:
                raise SystemExit("the server did not start")
            yield words[words.index("at") + 1]
        finally:
            server.terminate()


def main() -> int:
    """Answer the rows; return 1 if all of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of rows: .jsonl or .parquet")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--column", default="prompt", help="column of the prompts; default: prompt")
    parser.add_argument("--url", help="server, such as http://127.0.0.1:8000/v1; default: one that starts")
    parser.add_argument("--model", default=DEMO_MODEL, help="GGUF file or name; default: the demo model")
    parser.add_argument("--api-key", default="", help="of the server")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of an answer; default: 64")
    parser.add_argument("--at-once", type=int, default=16, help="open requests of a process; default: 16")
    parser.add_argument("--processes", type=int, default=1, help="that send requests; default: 1")
    parser.add_argument("--tries", type=int, default=8, help="requests for a row; default: 8")
    given = parser.parse_args()
    fields = {"max_tokens": given.max_tokens, "temperature": 0}
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    ask = {"column": given.column, "fields": fields, "at_once": given.at_once, "tries": given.tries}

    rows = read_rows(given.rows, given.column)
    with nullcontext(given.url) if given.url else server_of(str(given.model)) as url:
        n_failed, n_rows = answer_all(
            rows, given.output, {**ask, "url": url, "headers": headers}, n=given.processes
        )
    print(f"{given.output}: {n_failed} of {n_rows} rows failed")
    return int(0 < n_rows == n_failed)


if __name__ == "__main__":
    sys.exit(main())
