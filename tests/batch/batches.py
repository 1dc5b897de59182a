"""Rows, files of rows, and an application without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pyvelo.batch.counts import Counts
from pyvelo.batch.output import open_output
from pyvelo.batch.run import Batch, Run, rows_to_answer
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.server.app import App
from pyvelo.server.settings import Settings
from tests.server.servers import SETTINGS

COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "The KV cache", "max_tokens": 4, "temperature": 0}


def row(custom_id: str, body: Any = PROMPT, url: str = COMPLETIONS, **more: Any) -> bytes:
    """Return a line of an input."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}).encode()


def written(path: Path, lines: Iterable[bytes]) -> Path:
    """Write lines to a file; return its path."""
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def results_of(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file, all of whose lines must be whole."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def keys_of(results: Sequence[dict[str, Any]]) -> list[Any]:
    """Return what names the row of each result: its custom_id, or the number of its line."""
    return [each["custom_id"] if each["custom_id"] is not None else each["error"]["line"] for each in results]


def run_batch(source: Path, results: Path, ordered: bool = False, **engine: Any) -> Counts:
    """Run a batch of the demo model."""
    config = EngineConfig(**{"model": DEMO_MODEL, **SETTINGS, **engine})
    settings = Settings(model_names=("demo",))
    with FileIO(source) as rows, open_output(results) as (output, held):
        return Batch(config, settings, rows, output, held, ordered).run()


class Echo:
    """Application that answers with the path; a body may ask it to wait, or to answer with a status."""

    def __init__(self) -> None:
        loop, files = SimpleNamespace(check_open=lambda: None), SimpleNamespace(check=lambda: None)
        self.serving = SimpleNamespace(engine=SimpleNamespace(loop=loop, files=files))
        self.n_open = self.most_open = 0
        self.asked: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            body = json.loads(scope["extensions"]["pyvelo.body"])
            self.asked.append(body)
            await asyncio.sleep(body.get("wait", 0))
            await send({"type": "http.response.start", "status": body.get("status", 200), "headers": []})
            content = json.dumps({"path": scope["path"], "error": {"message": "so"}}).encode()
            await send({"type": "http.response.body", "body": content + b" " * body.get("size", 0)})
        finally:
            self.n_open -= 1


def run_echo(
    source: Path, results: Path, *, ordered: bool = False, n_rows: int = 4, app: Any = None
) -> Counts:
    """Run a batch whose rows an application without an engine answers, twice `n_rows` at once."""
    config = EngineConfig(model=DEMO_MODEL, max_num_seqs=n_rows)

    async def main(batch: Batch) -> None:
        rows = rows_to_answer(batch.source, batch.held, batch.counts)
        await Run(batch, cast(App, app or Echo()), rows).until(asyncio.get_running_loop().create_future())

    with FileIO(source) as rows, open_output(results) as (output, held):
        batch = Batch(config, Settings(), rows, output, held, ordered)
        asyncio.run(main(batch))
        return batch.counts
