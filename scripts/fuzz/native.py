"""Run libFuzzer over loading a model and running it for a token, all native code under AddressSanitizer.

    python scripts/fuzz/native.py --minutes 60
    python scripts/fuzz/native.py --raw                   without the scan that normally runs before C
    python scripts/fuzz/native.py --replay build/fuzz/findings/crash-...
    python scripts/fuzz/native.py --keep tests/native/corpus      a few files that reach most of the code

Needs Clang 14 or later with libFuzzer (`clang-14 libfuzzer-14-dev` on Debian). Everything lies under
build/fuzz: the build, `corpus`, and `findings`, which are files that ended the process, asked for more
than --memory MiB, or took longer than --limit seconds. A new run continues from both.
"""

from __future__ import annotations

import argparse
import lzma
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT
from scripts.fuzz._velo_fuzz import passes, small_vocabulary, without_weights
from scripts.models._shapes import ARCHS, NEED_EXPERTS, Shape
from scripts.models.make import MakeError, write_model

BUILD = ROOT / "build" / "fuzz"
SHAPE = Shape(layers=1, embd=32, ffn=32, heads=1, kv_heads=1, head_dim=32, ctx=256)
KEPT_BYTES = 2500  # of a file, compressed
FLAGS = "-O1 -gline-tables-only -DNDEBUG"
SETTINGS = {
    "PYVELO_FUZZ": "ON",
    "PYVELO_SANITIZE": "address;fuzzer-no-link",
    "PYVELO_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    "CMAKE_C_FLAGS_RELWITHDEBINFO": FLAGS,
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO": FLAGS,
}


def build(args: argparse.Namespace) -> Path:
    """Build the fuzzer; return its path."""
    compilers = {"CC": args.clang, "CXX": args.clang.replace("clang", "clang++")}
    options = [f"-D{name}={value}" for name, value in SETTINGS.items()] + args.cmake
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja", *options]
    subprocess.run(configure, check=True, env={**os.environ, **compilers}, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", str(BUILD), "-j", str(args.jobs), "--target", "velo-fuzz"]
    subprocess.run(command, check=True)
    return BUILD / "fuzz" / "velo-fuzz"


def make_seeds(folder: Path) -> None:
    """Write a model of a few KiB of every architecture that can be that small."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        for arch in ARCHS:
            layers = 2 if arch in ("lfm2", "granitehybrid", "qwen35", "gemma4") else 1
            shape = replace(SHAPE, arch=arch, layers=layers, experts=2 * (arch in NEED_EXPERTS))
            for type_name in ("q8_0", "f32"):
                with suppress(MakeError):  # rows too short for q8_0
                    write_model(shape, path, type_name=type_name)
                    (folder / f"{arch}-{type_name}").write_bytes(small_vocabulary(path))


def run(program: Path, args: argparse.Namespace, arguments: list[str]) -> int:
    """Run the fuzzer with libFuzzer's `arguments`; return its status."""
    settings = {
        **os.environ,
        "VELO_FUZZ_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024",
    }
    if args.raw:
        settings["VELO_FUZZ_RAW"] = "1"
    limits = [f"-rss_limit_mb={args.memory}", f"-timeout={args.limit}", "-max_len=65536"]
    return subprocess.run([str(program), *limits, *arguments], env=settings, check=False).returncode


def fuzz(program: Path, args: argparse.Namespace) -> int:
    """Run for --minutes, continuing after findings; return their number."""
    corpus, findings, seeds = BUILD / "corpus", BUILD / "findings", BUILD / "seeds"
    for folder in (corpus, findings):
        folder.mkdir(exist_ok=True)
    make_seeds(seeds)
    going_on = ["-fork=1", "-ignore_crashes=1", "-ignore_ooms=1", "-ignore_timeouts=1"]
    where = [f"-artifact_prefix={findings}/", str(corpus), str(seeds)]
    run(program, args, [*going_on, f"-max_total_time={round(60 * args.minutes)}", *where])
    found = sorted(findings.iterdir())
    for path in found:
        print(f"finding: {path}")
    return len(found)


def keep(program: Path, args: argparse.Namespace) -> int:
    """Write some of the files that together reach what the corpus reaches, without weights, compressed.

    The seeds come first, then the files that the scan lets through; --keep-bytes at most.
    """
    args.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        status = run(program, args, ["-set_cover_merge=1", name, str(BUILD / "corpus"), str(BUILD / "seeds")])
        seeds = sorted((BUILD / "seeds").iterdir())
        found = sorted(Path(name).iterdir(), key=lambda path: (not passes(str(path)), path.name))
        left = args.keep_bytes
        for path in [*seeds, *found]:  # sorted by the hashes in their names: some of every kind
            data = lzma.compress(without_weights(path.read_bytes()))
            if len(data) > KEPT_BYTES or len(data) > left:
                continue
            left -= len(data)
            (args.keep / f"{path.name[:16]}.xz").write_bytes(data)
    return status


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--limit", type=int, default=20, help="seconds for one file")
    parser.add_argument("--memory", type=int, default=3072, help="MiB that the process may take")
    parser.add_argument("--raw", action="store_true", help="skip the scan in Python")
    parser.add_argument("--replay", type=Path, nargs="+", help="run these files, and nothing else")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write a small corpus to this folder")
    parser.add_argument("--keep-bytes", type=int, default=60_000)
    parser.add_argument(
        "--clang", default="clang-14", help="the C compiler; the C++ compiler is found by its name"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cmake", action="append", default=[], help="an argument for CMake")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if nothing was found."""
    args = _arguments(argv)
    program = build(args)
    if args.replay:
        return run(program, args, [str(path) for path in args.replay])
    if args.keep:
        return keep(program, args)
    return 1 if fuzz(program, args) else 0


if __name__ == "__main__":
    sys.exit(main())
