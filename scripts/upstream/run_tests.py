"""Build upstream's own tests on the patched tree, run the ones without a download, and print a table.

--quick runs fewer cases of the long tests and skips the tests of what no patch touches; its notes say what
was left out. The exit status is 0 if every test that ran passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, run_main
from scripts.build._cmake import build_targets, configure
from scripts.upstream.patches import apply

BUILD = ROOT / "build" / "upstream-tests"
TIMEOUT = 3600  # seconds for one test
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# The architectures of the quick run: one for each kind of attention and cache.
QUICK_ARCHS = ("llama", "gemma2", "deepseek2", "gpt-oss", "grok", "bloom", "jamba", "mamba", "qwen3moe")


@dataclass(frozen=True)
class Check:
    """One run of one of upstream's test programs.

    `counts` finds each passed case in the output (or, with two groups, passed and total); a run in which it
    finds none has tested nothing and fails. `quick` replaces `arguments` in the quick run; None skips the
    test. `cut` says what the quick run leaves out.
    """

    program: str
    arguments: tuple[str, ...] = ()
    counts: str = ""
    quick: tuple[str, ...] | None = None
    cut: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.program} {self.label}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """Result of a test: `failure` is empty if it passed."""

    test: Check
    seconds: float
    failure: str
    notes: list[str] = field(default_factory=list)


def backend_ops(operator: str, quick: str = "", cut: str = "") -> Check:
    """Return test-backend-ops for one operator on the CPU, compared with the reference kernels."""
    full = ("test", "-b", "CPU", "-o", operator, "-j", str(os.cpu_count() or 1))
    return Check(
        "test-backend-ops",
        full,
        counts=r"^ *(\d+)/(\d+) tests passed",
        quick=(*full, "-p", quick) if quick else full,
        cut=cut,
        label=operator,
    )


def always(program: str, *arguments: str, counts: str = "", label: str = "") -> Check:
    """Return a test that is short enough to run whole each time."""
    return Check(program, arguments, counts, quick=arguments, label=label)


def core_tests(models: Path) -> list[Check]:
    """Return the tests of what the patches touch: operators, graphs, caches, states."""
    archs = "|".join(QUICK_ARCHS)
    some = f"{len(QUICK_ARCHS)} architectures alone"
    make = ("-o", str(models))
    every = ("--models", str(models))
    llama = ("-m", str(models / "llama-dense.gguf"))
    threads = ("-p", "hello", "-n", "32", "-c", "256", "-ub", "32", "-np", "4", "-t", "2")
    return [
        backend_ops("PAGED_ATTN"),
        backend_ops("SET_ROWS"),
        backend_ops("FLASH_ATTN_EXT", quick="kv=113,nb=(1|3),", cut="113 cells, 1 and 3 queries alone"),
        backend_ops("MUL_MAT", quick="m=16,n=[1-3],k=256,", cut="16 rows, 1 to 3 columns alone"),
        Check("test-llama-archs", counts=r"\|\s*OK", quick=("-a", archs), cut=some),
        Check(
            "test-llama-archs", make, r"Saving \S+ model", (*make, "-a", archs), some, label="(makes models)"
        ),
        Check("test-save-load-state", every, r"^\S+\.gguf\s+PASS", every, some),
        Check("test-recurrent-state-rollback", every, r"^\S+\.gguf\s+PASS"),
        always("test-state-restore-fragmented", *llama, counts=r"SUCCESS"),
        always("test-thread-safety", *llama, *threads),
        always("test-gguf", counts=r"^(\d+)/(\d+) tests passed"),
        always("test-alloc"),
        always("test-batch-alloc"),
        always("test-c"),
    ]


def other_tests(models: Path, tree: Path) -> list[Check]:
    """Return the other tests that run without a network."""
    vocabs = sorted((tree / "models").glob("ggml-vocab-*.gguf.inp"))
    model = str(models / "llama-dense.gguf")
    plain = (
        "barrier col2im-1d opt rope quantize-fns tiled-mulmat sampling unicode log grammar-parser "
        "grammar-integration llama-grammar json-schema json-schema-to-grammar jinja peg-parser "
        "chat-peg-parser chat-template chat-auto-parser reasoning-budget model-resolution"
    )
    return [
        *(Check("test-" + name) for name in plain.split()),
        *(Check("test-" + name, (model,)) for name in ("model-load-cancel", "autorelease")),
        *(Check("test-tokenizer-0", (str(path.with_suffix("")),), label=path.name[11:-9]) for path in vocabs),
        Check("test-tokenizer-1-spm", (str(tree / "models" / "ggml-vocab-llama-spm.gguf"),)),
    ]


LEFT_OUT = (
    ("test-arg-parser", "downloads"),
    ("test-tokenizers-ggml-vocabs", "downloads"),
    ("test-gguf-model-data", "downloads"),
    ("test-quant-type-selection", "downloads"),
    ("test-backend-sampler", "needs a downloaded model"),
    ("test-chat", "needs upstream's server"),
    ("test-mtmd-c-api", "images: nothing of it is built"),
    ("test-mtmd-impl", "images: nothing of it is built"),
)


def build(programs: Sequence[str], tree: Path | None = None, at: Path = BUILD) -> Path:
    """Build upstream's test programs on the patched tree, the cached one by default; return their folder.

    An earlier build in `at`, for example pip's, is not built again.
    """
    tree = tree or apply(None)
    options: dict[str, str | bool] = {
        "PYVELO_UPSTREAM_TESTS": True,
        "PYVELO_TREE": tree.as_posix(),
        "Python_EXECUTABLE": Path(sys.executable).as_posix(),
    }
    configure(ROOT / "native", at, options)
    build_targets(at, sorted(set(programs)))
    folder = at / "bin"
    return folder / "Release" if (folder / "Release").is_dir() else folder


def run(test: Check, command: Sequence[str], quick: bool, tree: Path) -> Outcome:
    """Run a test in the folder `tree`; its output goes to build/upstream-tests/logs."""
    log = BUILD / "logs" / (re.sub(r"\W+", "-", test.name).strip("-") + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    failure = ""
    try:
        with log.open("wb") as stream:
            status = subprocess.run(
                command, cwd=tree, stdout=stream, stderr=subprocess.STDOUT, timeout=TIMEOUT
            ).returncode
        if status != 0:
            failure = f"exit status {status}"
    except subprocess.TimeoutExpired:
        failure = f"not done after {TIMEOUT} s"
    notes = [f"cut: {test.cut}"] if quick and test.cut else []
    if test.counts:
        passed, total = count(test.counts, COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace")))
        notes.insert(0, f"{passed} passed")
        if not failure and (passed == 0 or passed != total):
            failure = f"{passed} of {total} cases passed"
    return Outcome(test, time.perf_counter() - begin, failure, [f"see {log}", *notes] if failure else notes)


def count(pattern: str, text: str) -> tuple[int, int]:
    """Return passed cases and all cases: sums of the numbers that the pattern finds, else its matches."""
    found = re.compile(pattern, re.MULTILINE)
    if found.groups == 2:
        numbers = [(int(match[1]), int(match[2])) for match in found.finditer(text)]
        return sum(pair[0] for pair in numbers), sum(pair[1] for pair in numbers)
    places = len(found.findall(text))
    return places, places


def main() -> int:
    """Build, run and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some minutes instead of half an hour")
    parser.add_argument("--tree", type=Path, help="a patched llama.cpp tree (default: made in the cache)")
    parser.add_argument(
        "--build",
        type=Path,
        default=BUILD,
        metavar="DIR",
        help="build folder, for example the one in build/ that pip left (default: %(default)s)",
    )
    given = parser.parse_args()

    tree = given.tree.resolve() if given.tree else apply(None)
    models = BUILD / ("models-quick" if given.quick else "models")
    models.mkdir(parents=True, exist_ok=True)
    tests = core_tests(models)
    if not given.quick:
        tests += other_tests(models, tree)
    chosen = [(test, test.quick if given.quick else test.arguments) for test in tests]

    begin = time.perf_counter()
    programs = [test.program for test, arguments in chosen if arguments is not None]
    folder = build(programs, tree, given.build.resolve())
    print(f"{'test':42} {'result':8} {'seconds':>7}  note")
    print(f"{'(build)':42} {'ok':8} {time.perf_counter() - begin:7.1f}", flush=True)
    failed = 0
    for test, arguments in chosen:
        if arguments is None:
            print(f"{test.name:42} {'not run':8} {'':7}  in the full run alone")
            continue
        outcome = run(test, [str(folder / test.program), *arguments], given.quick, tree)
        failed += bool(outcome.failure)
        note = "; ".join([outcome.failure, *outcome.notes] if outcome.failure else outcome.notes)
        print(
            f"{test.name:42} {'FAILED' if outcome.failure else 'ok':8} {outcome.seconds:7.1f}  {note}",
            flush=True,
        )
    for name, reason in LEFT_OUT:
        print(f"{name:42} {'not run':8} {'':7}  {reason}")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
