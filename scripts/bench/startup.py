"""Measure startup, from the command to the first token: medians of whole processes, one after the other.

    python scripts/bench/startup.py
    python scripts/bench/startup.py --rounds 21 --stock-bin $(python scripts/build/stock.py --completion)

Every figure stands beside `python -c pass`. A run begins when its process is created and ends with the first
byte of the answer. The default model is the one in the package. Stock's llama-completion answers the same
prompt, in turns with ours, if the named folder has it. The first round of each is not counted: after it, byte
code and files are in the system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.demo import DEMO_MODEL
from scripts._common import ScriptError, run_main

PASS = "python -c pass"
STOCK = "llama-completion, to the first token"
LOAD = """
import sys
from time import perf_counter as now
from pyvelo import LLM
start = now()
with LLM(sys.argv[1], deterministic=sys.argv[2] == "plain"):
    print(now() - start)
"""


@dataclass(frozen=True)
class Figure:
    """Seconds of every round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def whole(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds of a process; raise ScriptError if it fails."""
    start = now()
    _finish(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return now() - start


def to_first_byte(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds until a process writes its first byte; raise ScriptError if it writes none."""
    start = now()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = now() - start
        process.stdout.read()
        process.communicate()
        log.seek(0)
        _check(process, log.read())
    if not first:
        raise ScriptError(f"{Path(command[0]).name} wrote no answer")
    return seconds


def load_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds that LOAD prints."""
    return float(_finish(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)))


def _finish(process: subprocess.Popen[bytes]) -> bytes:
    out, err = process.communicate()
    _check(process, err)
    return out


def _check(process: subprocess.Popen[bytes], err: bytes | None) -> None:
    if process.returncode:
        lines = (err or b"").decode("utf-8", "replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
        raise ScriptError(f"{process.args!r} failed: {reason}")


Measure = tuple[Callable[[Sequence[str], Mapping[str, str]], float], list[str]]


def measures(model: Path, prompt: str, tokens: int, ctx: int, stock: Path | None) -> dict[str, Measure]:
    """Return the measurements in the order of the table."""
    python = [sys.executable, "-c"]
    cli = [sys.executable, "-m", "pyvelo.cli"]
    asked = [str(model), "-p", prompt, "-n", str(tokens), "--ignore-eos"]
    found: dict[str, Measure] = {
        PASS: (whole, [*python, "pass"]),
        "import pyvelo": (whole, [*python, "import pyvelo"]),
        "from pyvelo import LLM": (whole, [*python, "from pyvelo import LLM"]),
        "pyvelo --help": (whole, [*cli, "--help"]),
        "pyvelo run, to the first token": (to_first_byte, [*cli, "run", *asked, "--ctx", str(ctx)]),
        "LLM(model), once imported": (load_seconds, [*python, LOAD, str(model), "packed"]),
        "LLM(model, deterministic=True)": (load_seconds, [*python, LOAD, str(model), "plain"]),
    }
    if stock is not None:
        options = ["-c", str(ctx), "--temp", "0", "--no-display-prompt", "-no-cnv"]
        found[STOCK] = (to_first_byte, [str(stock), "-m", *asked, *options])
    return found


def race(wanted: Mapping[str, Measure], rounds: int) -> list[Figure]:
    """Run each in turn, `rounds` times after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as byte_code:
        environment = {
            **os.environ,
            "PYTHONPYCACHEPREFIX": byte_code,  # as in an installed package
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(rounds + 1):
            for name, (measure, command) in wanted.items():
                taken = measure(command, environment)
                if number:
                    seconds[name].append(taken)
    return [Figure(name, tuple(times)) for name, times in seconds.items()]


def show(figures: Sequence[Figure], model: Path) -> None:
    """Print a Markdown table."""
    unit = next(figure.median for figure in figures if figure.name == PASS)
    size = model.stat().st_size / 1e6
    print(f"{model.name} ({size:.0f} MB), medians of {len(figures[0].seconds)} rounds, milliseconds\n")
    print("| | median | least | most | beside python -c pass |")
    print("|---|---:|---:|---:|---:|")
    for figure in figures:
        numbers = (figure.median, min(figure.seconds), max(figure.seconds))
        cells = " | ".join(f"{1e3 * seconds:.0f}" for seconds in numbers)
        print(f"| {figure.name} | {cells} | {figure.median / unit:.1f} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL, help="a GGUF file")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--prompt", default="What is 12 + 30?")
    parser.add_argument(
        "--tokens", type=int, default=16, help="tokens of the answer; the first may have no text"
    )
    parser.add_argument("--ctx", type=int, default=2048, help="longest sequence of a run")
    parser.add_argument("--stock-bin", type=Path, help="a folder with stock's llama-completion")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    given = _arguments()
    if given.rounds < 1 or given.tokens < 1:
        raise ScriptError("give --rounds and --tokens of 1 or more")
    stock = given.stock_bin and given.stock_bin.resolve() / "llama-completion"
    if stock and not stock.exists():
        raise ScriptError(f"there is no {stock}: scripts/build/stock.py --completion builds one")
    model = given.model.resolve()
    os.chdir(Path(__file__).parent)  # has no folder that hides the installed package
    figures = race(measures(model, given.prompt, given.tokens, given.ctx, stock), given.rounds)
    if given.json:
        print(json.dumps([asdict(figure) | {"median": figure.median} for figure in figures]))
    else:
        show(figures, given.model)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
