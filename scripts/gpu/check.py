"""Run all checks that need an NVIDIA card: one command, one JSON, within 8 minutes.

    python scripts/gpu/check.py -o gpu.json [--only ops,foreign] [--model llama-8b-q4_k_m.gguf]

scripts/gpu/bundle.py builds what it needs, on any machine with nvcc and cuBLAS, with a card or without:

    python scripts/gpu/bundle.py                build/gpu, and its archive build/gpu.tar.xz

Copy the checkout and build/gpu.tar.xz (some 30 MiB) to the machine with the card and run the first command
there: it builds and downloads nothing. That machine needs a driver, cuBLAS for the same CUDA (libcublas and
libcublasLt are too large for the archive: from a toolkit, or the PyPI package nvidia-cublas), numpy and
jinja2; for `tests` pytest and hypothesis; for `memcheck`, `racecheck` and `synccheck` compute-sanitizer.
Without build/gpu the package in the checkout, or the installed one, is checked with the programs beside it or
below build/.

The report names the device, the driver and the libraries that were not found, and for every section its
outcome, its seconds, its figures and what is wrong with them. The exit status is 0 if every chosen section
passed, 1 if one did not (or lacked something, or ran out of time: the report says which), 2 for wrong
arguments, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT
from scripts.gpu._figures import LargeModel, roomy_folder
from scripts.gpu._machine import (
    BUNDLE,
    Places,
    Run,
    find_sanitizer,
    library_folders,
    run_program,
    settle,
)
from scripts.gpu._report import (
    NO_GPU,
    Budget,
    Missing,
    OutOfTime,
    Section,
    exit_code,
    json_lines,
    run_section,
)
from scripts.gpu._sections import MEASURE, SECTIONS, Tools

SECONDS = 470.0
WRONG = 2
CUDA_LIBRARY = "libvelo-ggml-cuda.so"
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def find_gpu(run: Run, wanted: str | None, op_bench: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Return the GPU to check as the package sees it, or None and the reason.

    If the package cannot be imported, velo-op-bench is asked: its sections do not need the package.
    """
    lister = [sys.executable, os.fspath(ROOT / "scripts/gpu/_child.py"), "devices"]
    found, why = _list_devices(run, lister, "the package")
    if found is None and op_bench is not None:
        found, _ = _list_devices(run, [os.fspath(op_bench), "devices"], "velo-op-bench")
    if found is None:
        return None, why
    gpus = [device for device in found if device["kind"] == "gpu"]
    for device in gpus:
        if wanted in (None, device["name"]):
            return device, ""
    if gpus:
        return None, f"there is no GPU {wanted}; there are {', '.join(device['name'] for device in gpus)}"
    return None, (
        "no GPU found: there is none, or no driver, or the build is without PYVELO_CUDA "
        f"(scripts/gpu/bundle.py makes one that has it: {BUNDLE.name}.tar.xz)"
    )


def _list_devices(run: Run, command: Sequence[str], program: str) -> tuple[list[dict[str, Any]] | None, str]:
    try:
        done = run(command, 60, {})
    except (Missing, OutOfTime) as error:
        return None, str(error)
    if done.code != 0 or not json_lines(done.out):
        said = (done.err.strip() or "nothing").splitlines()[-1]
        return None, f"{program} cannot list the devices: {said}"
    return json_lines(done.out), ""


def driver(run: Run) -> str | None:
    """Return the driver's version, from nvidia-smi or else the kernel; None if neither has it."""
    try:
        done = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30, {})
        if done.code == 0 and done.out.split():
            return done.out.split()[0]
    except (Missing, OutOfTime):
        pass
    try:
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", KERNEL_DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def check(names: Sequence[str], tools: Tools, budget: Budget, jobs: int) -> list[Section]:
    """Run the sections within their times: `jobs` of them at once, and then the measurements, in order."""

    def one(name: str) -> Section:
        function, share = SECTIONS[name]
        section = run_section(name, lambda limit: function(tools, limit), budget.left(share))
        print(
            f"{name}: {section.outcome}{section.why and ': ' + section.why} ({section.seconds:.0f} s)",
            file=sys.stderr,
        )
        return section

    chosen = [name for name in SECTIONS if name in names]
    with ThreadPoolExecutor(jobs) as pool:
        sections = list(pool.map(one, [name for name in chosen if name not in MEASURE]))
    return sections + [one(name) for name in chosen if name in MEASURE]


def with_libraries(run: Run, places: Places) -> tuple[Places, list[str]]:
    """Return the places with NVIDIA's libraries, and the names of the libraries that were not found."""
    library = places.libraries and places.libraries / CUDA_LIBRARY
    if library is None or not library.exists():
        return places, []
    folders, nowhere = library_folders(run, library)
    return replace(places, nvidia=tuple(folders)), nowhere


def within(run: Run, environment: Mapping[str, str]) -> Run:
    """Return a function that runs programs with these variables."""
    return lambda command, seconds, extra: run(command, seconds, {**environment, **extra})


def main(argv: Sequence[str] | None = None, run: Run = run_program) -> int:
    args = _parser().parse_args(argv)
    names = list(SECTIONS) if args.only is None else [name.strip() for name in args.only.split(",")]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        choice = f"choose from {', '.join(SECTIONS)}"
        print(f"check.py: there is no section {unknown[0]!r}: {choice}", file=sys.stderr)
        return WRONG
    if wrong := _wrong_arguments(args):
        print(f"check.py: {wrong}", file=sys.stderr)
        return WRONG
    start, budget = time.monotonic(), Budget(args.seconds)
    try:
        places = settle(args.bundle, args.stock_bin)
    except Missing as missing:
        print(f"check.py: {missing}", file=sys.stderr)
        return WRONG
    places, nowhere = with_libraries(run, places)
    run = within(run, places.environment())
    op_bench = args.op_bench or places.program("velo-op-bench")
    device, why = find_gpu(run, args.device, op_bench)
    report: dict[str, Any] = {"device": device, "driver": driver(run) if device else None}
    report |= {"libraries_not_found": nowhere, "sections": []}
    if device is None:
        why = f"{why}; not found: {', '.join(nowhere)}" if nowhere else why
        report |= {"passed": False, "why": why}
        code = NO_GPU
        print(f"check.py: {why}", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory(dir=roomy_folder()) as folder:
            tools = _tools(args, device["name"], places, op_bench, Path(folder), run)
            try:
                if {"single", "serving"} & set(names):
                    tools.model.begin(run, budget.left(args.seconds))
                sections = check(names, tools, budget, args.jobs)
            finally:
                tools.model.close()
        code = exit_code(sections)
        report |= {"passed": code == 0, "sections": [section.as_json() for section in sections]}
    report["seconds"] = round(time.monotonic() - start, 1)
    text = json.dumps(report, indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return code


def _wrong_arguments(args: argparse.Namespace) -> str | None:
    """Return what is wrong with the arguments, before anything runs; None if nothing is."""
    if args.jobs < 1:
        return f"--jobs {args.jobs}: give 1 or more"
    if not 0 <= args.seconds < math.inf:
        return f"--seconds {args.seconds:g}: give 0 or more"
    if args.model is not None and not args.model.is_file():
        return f"there is no model {args.model}; without --model one is made"
    if args.output is not None and (args.output.is_dir() or not args.output.parent.is_dir()):
        return f"--output {args.output} is no file in an existing folder"
    return None


def _tools(
    args: argparse.Namespace, device: str, places: Places, op_bench: Path | None, scratch: Path, run: Run
) -> Tools:
    return Tools(
        device=device,
        places=places,
        op_bench=op_bench,
        backend_ops=args.backend_ops or places.program("test-backend-ops"),
        sanitizer=args.sanitizer or find_sanitizer(),
        model=LargeModel(args.model, args.scratch or scratch),
        small_models=tuple(args.small_model or _small_models(scratch, run)),
        run=run,
    )


def _small_models(scratch: Path, run: Run) -> list[Path]:
    """Return the model inside the package, and a random f32 one if it can be made."""
    tiny, demo = scratch / "tiny-f32.gguf", ROOT / "pyvelo/assets/demo.gguf"
    maker = [
        sys.executable,
        os.fspath(ROOT / "scripts/models/make.py"),
        "tiny",
        "--type",
        "f32",
        os.fspath(tiny),
    ]
    try:
        done = run(maker, 60, {})
    except (Missing, OutOfTime):
        return [demo]
    return [*([tiny] if done.code == 0 else []), demo]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def path(text: str) -> Path:
        return Path(text).resolve()  # programs run in another folder

    parser.add_argument("-o", "--output", type=path, help="file for the JSON; default: standard output")
    parser.add_argument("--only", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for the whole run")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="sections that run at once, without the measurements; default: half of the CPUs, at most 8",
    )
    parser.add_argument("--device", help="such as CUDA1; default: the first GPU")
    parser.add_argument(
        "--bundle", type=path, default=BUNDLE, help="what gpu/bundle.py made; default: build/gpu"
    )
    parser.add_argument(
        "--stock-bin", type=path, help="programs of a stock CUDA build; default: the bundle's"
    )
    parser.add_argument("--op-bench", type=path, help="a velo-op-bench")
    parser.add_argument("--backend-ops", type=path, help="a test-backend-ops of the patched tree")
    parser.add_argument("--sanitizer", type=path, help="a compute-sanitizer")
    parser.add_argument("--model", type=path, help="a Llama-8B shape, Q4_K_M; default: made during the run")
    parser.add_argument("--small-model", type=path, action="append", help="a small model; may be repeated")
    parser.add_argument("--scratch", type=path, help="a folder in which to keep a made model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
