"""Default model, stock build, prompts and processes of the benchmarks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._common import ROOT, ScriptError, cache_root

PRESET = "qwen3-0.6b"


def default_model(preset: str = PRESET) -> Path:
    """Return the file of a preset of models/make.py in the cache; make it if it is missing."""
    path = cache_root() / "models" / f"{preset}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"making the {preset} preset …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, str(ROOT / "scripts/models/make.py"), preset, str(path)], check=True)
    return path


def stock_folder(named: Path | None, *options: str) -> Path:
    """Return the folder of stock's programs: the named one, VELO_STOCK_BIN, or the one build/stock.py makes.

    Args:
        options: of build/stock.py.
    """
    if folder := named or os.environ.get("VELO_STOCK_BIN"):
        return Path(folder)
    command = [sys.executable, str(ROOT / "scripts/build/stock.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ScriptError("stock llama.cpp could not be built (see above): mend that, or give --stock-bin")
    return Path(done.stdout.splitlines()[-1])


def check_programs(folder: Path | None, *names: str) -> None:
    """Raise ScriptError if a folder that the user has named lacks a program."""
    for name in names:
        if folder is not None and not (folder / name).exists():
            raise ScriptError(f"{folder} has no {name}")


def wait_for_store(llm: Any) -> None:
    """Wait until the KV store of a model is in use, if it has one: its file is read first."""
    persistence = llm._engine.persistence
    if persistence is not None:
        _ = persistence.identity


def random_prompt(llm: Any, count: int, draw: random.Random | None = None) -> list[int]:
    """Return random tokens; without `draw` the same ones each time."""
    draw = draw or random.Random(0)
    return [draw.randrange(llm.vocab.n_tokens) for _ in range(count)]


def output_of(command: Sequence[str]) -> str:
    """Run a program and return its output; raise ScriptError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ScriptError(f"{Path(command[0]).name} failed: {reason}")
    return done.stdout


def in_own_process(script: str, model: Path, arguments: Sequence[object]) -> Any:
    """Run `script MODEL --worker ARGUMENTS...` and return the JSON that it prints."""
    return json.loads(output_of([sys.executable, script, str(model), "--worker", *map(str, arguments)]))
