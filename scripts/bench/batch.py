"""Compare `pyvelo batch` with LLM.generate on the same list of short prompts.

    python scripts/bench/batch.py
    python scripts/bench/batch.py model.gguf --rows 1000 --prompt 16 --tokens 16 --rounds 3 --json

Each side has a process of its own in each round, in turns. The time of both starts when the model is loaded,
and ends with the last answer. In the batch it contains the reading of the rows and the writing of the
results. The lengths of the answers are drawn from half to one and a half of --tokens. The default model is
bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.bench._runs import default_model, in_own_process

WORDS = [
    "block",
    "table",
    "cache",
    "token",
    "prefix",
    "request",
    "model",
    "step",
    "queue",
    "batch",
    "page",
    "slot",
    "window",
    "state",
]


def drawn_rows(n: int, n_words: int, n_tokens: int) -> list[tuple[str, int]]:
    """Return prompts and the lengths of their answers, the same ones each time."""
    draw = random.Random(0)
    return [
        (
            f"{number} {' '.join(draw.choices(WORDS, k=n_words))}",
            draw.randint(max(1, n_tokens // 2), max(1, n_tokens * 3 // 2)),
        )
        for number in range(n)
    ]


def engine_settings(threads: int | None) -> dict[str, Any]:
    """Return the settings of both engines."""
    return {"n_ctx": 512, "n_threads": threads}


def of_generate(model: Path, rows: list[tuple[str, int]], threads: int | None) -> tuple[float, int]:
    """Return the seconds and the new tokens of LLM.generate."""
    from pyvelo import LLM, SamplingParams

    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in rows]
    with LLM(model, **engine_settings(threads)) as llm:
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in rows], params)
        seconds = time.perf_counter() - start
    return seconds, sum(len(output.token_ids) for output in outputs)


def of_batch(model: Path, rows: list[tuple[str, int]], threads: int | None) -> tuple[float, int]:
    """Return the seconds and the new tokens of a batch."""
    from pyvelo.batch.output import open_output
    from pyvelo.batch.run import Batch
    from pyvelo.config import EngineConfig
    from pyvelo.server.settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        source, results = Path(folder, "rows.jsonl"), Path(folder, "results.jsonl")
        with source.open("w", encoding="utf-8") as file:
            for number, (prompt, n) in enumerate(rows):
                body = {"prompt": prompt, "max_tokens": n, "temperature": 0.0, "ignore_eos": True}
                row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(row) + "\n")
        config = EngineConfig(model=model, **engine_settings(threads))
        with FileIO(source) as rows_file, open_output(results) as (output, held):
            counts = Batch(config, Settings(), rows_file, output, held).run()
    if counts.answered != len(rows) or counts.failed:
        raise ScriptError(f"{counts.failed} of {counts.answered} rows failed: {counts.errors}")
    return counts.seconds, counts.completion_tokens


SIDES: dict[str, Callable[[Path, list[tuple[str, int]], int | None], tuple[float, int]]] = {
    "generate": of_generate,
    "batch": of_batch,
}


def main() -> int:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=16, help="words of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer, on average")
    parser.add_argument("--threads", type=int, help="default: one for each performance core")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.worker:
        side, *numbers = given.worker
        n, n_words, n_tokens, threads = map(int, numbers)
        print(json.dumps(SIDES[side](given.model, drawn_rows(n, n_words, n_tokens), threads or None)))
        return 0
    model = given.model or default_model()
    lengths = [given.rows, given.prompt, given.tokens, given.threads or 0]
    rounds = []
    for _ in range(given.rounds):
        found = {side: in_own_process(__file__, model, [side, *lengths]) for side in SIDES}
        if found["generate"][1] != found["batch"][1]:
            raise ScriptError(f"the sides generated different numbers of tokens: {found}")
        speeds = {side: n_tokens / seconds for side, (seconds, n_tokens) in found.items()}
        rounds.append({**speeds, "ratio": speeds["batch"] / speeds["generate"]})
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    if given.json:
        print(json.dumps({"model": model.name, "rows": given.rows, "rounds": rounds, "medians": medians}))
        return 0
    print(f"{model.name}, {given.rows} rows, new tokens per second\n")
    print("| LLM.generate | pyvelo batch | ratio |")
    print("|---:|---:|---:|")
    print(f"| {medians['generate']:.1f} | {medians['batch']:.1f} | {medians['ratio']:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
