#!/usr/bin/env python3
"""Checks on an NVIDIA card all that no other machine can: one command, one JSON, within 8 minutes.

    python scripts/gpu_check.py -o gpu.json [--only ops,foreign] [--stock-bench PATH/llama-bench]

The package must be built with PYVELO_CUDA; velo-op-bench and test-backend-ops are looked for beside its
libraries and under build/, or named. The exit status is 0 when every section that was chosen passed, 1 where
one did not (or what it needs is not there, or time ran out: the report says which), 2 for wrong arguments, 3
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_report import NO_GPU, Budget, Missing, OutOfTime, Section, exit_code, json_lines, run_section
from _gpu_sections import HERE, SECTIONS, Run, Tools, run_program

ROOT = HERE.parent
SECONDS = 470.0
WRONG = 2


def find_gpu(run: Run, wanted: str | None, op_bench: Path | None) -> tuple[dict[str, Any] | None, str]:
    """The GPU to check, as the package sees it; or None, and why there is none.

    Where the package cannot be imported, what needs none of it can still be checked: velo-op-bench is asked.
    """
    lister = [sys.executable, os.fspath(HERE / "_gpu_child.py"), "devices"]
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
    return None, "no GPU is seen: none is here, or this was built without PYVELO_CUDA"


def _list_devices(run: Run, command: Sequence[str], who: str) -> tuple[list[dict[str, Any]] | None, str]:
    try:
        done = run(command, 60, {})
    except (Missing, OutOfTime) as error:
        return None, str(error)
    if done.code != 0 or not json_lines(done.out):
        said = (done.err.strip() or "nothing").splitlines()[-1]
        return None, f"{who} cannot list the devices: {said}"
    return json_lines(done.out), ""


def driver(run: Run) -> str | None:
    """The driver's version; None where nvidia-smi does not tell."""
    try:
        done = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30, {})
    except (Missing, OutOfTime):
        return None
    lines = done.out.split()
    return lines[0] if done.code == 0 and lines else None


def check(names: Sequence[str], tools: Tools, seconds: float) -> list[Section]:
    """Runs the sections in their order, each within its time."""
    budget, sections = Budget(seconds), []
    for name in [name for name in SECTIONS if name in names]:
        function, share = SECTIONS[name]
        section = run_section(name, lambda limit, f=function: f(tools, limit), budget.left(share))  # type: ignore[misc]
        print(
            f"{name}: {section.outcome}{section.why and ': ' + section.why} ({section.seconds:.0f} s)",
            file=sys.stderr,
        )
        sections.append(section)
    return sections


def main(argv: Sequence[str] | None = None, run: Run = run_program) -> int:
    args = _parser().parse_args(argv)
    names = list(SECTIONS) if args.only is None else args.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        print(
            f"gpu_check: there is no section {unknown[0]!r}: choose from {', '.join(SECTIONS)}",
            file=sys.stderr,
        )
        return WRONG
    start = time.monotonic()
    op_bench = args.op_bench or _built("velo-op-bench")
    device, why = find_gpu(run, args.device, op_bench)
    report: dict[str, Any] = {"device": device, "driver": driver(run) if device else None, "sections": []}
    if device is None:
        report |= {"passed": False, "why": why}
        code = NO_GPU
        print(f"gpu_check: {why}", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as folder:
            tools = _tools(args, device["name"], op_bench, Path(folder), run)
            sections = check(names, tools, args.seconds - (time.monotonic() - start))
        code = exit_code(sections)
        report |= {"passed": code == 0, "sections": [section.as_json() for section in sections]}
    report["seconds"] = round(time.monotonic() - start, 1)
    text = json.dumps(report, indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return code


def _tools(args: argparse.Namespace, device: str, op_bench: Path | None, scratch: Path, run: Run) -> Tools:
    sanitizer = shutil.which("compute-sanitizer")
    return Tools(
        device=device,
        op_bench=op_bench,
        backend_ops=args.backend_ops or _built("test-backend-ops"),
        sanitizer=args.sanitizer or (Path(sanitizer) if sanitizer else None),
        stock_bench=args.stock_bench,
        model=args.model,
        small_models=tuple(args.small_model or _small_models(scratch, run)),
        scratch=args.scratch or scratch,
        run=run,
    )


def _built(name: str) -> Path | None:
    """The newest program of that name beside the package's libraries or under build/."""
    folders = [ROOT / "pyvelo/native/lib", ROOT / "build"]
    paths = [path for folder in folders for path in folder.rglob(name)]
    found = [path for path in paths if path.is_file() and os.access(path, os.X_OK)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _small_models(scratch: Path, run: Run) -> list[Path]:
    """The model inside the package, and a random one of exact weights where one can be made."""
    tiny = scratch / "tiny-f32.gguf"
    try:
        done = run(
            [sys.executable, os.fspath(HERE / "make_model.py"), "tiny", "--type", "f32", os.fspath(tiny)],
            60,
            {},
        )
    except (Missing, OutOfTime):
        return [ROOT / "pyvelo/assets/demo.gguf"]
    return [*([tiny] if done.code == 0 else []), ROOT / "pyvelo/assets/demo.gguf"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes; default: standard output")
    parser.add_argument("--only", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--device", help="such as CUDA1; default: the first GPU")
    parser.add_argument("--op-bench", type=Path, help="a velo-op-bench")
    parser.add_argument("--backend-ops", type=Path, help="a test-backend-ops of the patched tree")
    parser.add_argument("--sanitizer", type=Path, help="a compute-sanitizer")
    parser.add_argument("--stock-bench", type=Path, help="llama-bench of a stock CUDA build")
    parser.add_argument("--model", type=Path, help="a Llama-8B shape, Q4_K_M; default: made, in minutes")
    parser.add_argument("--small-model", type=Path, action="append", help="a small model; may be repeated")
    parser.add_argument("--scratch", type=Path, help="a folder in which a made model is kept")
    return parser


def use_checkout() -> None:
    """Programs that are started import the package of this checkout, where it is built."""
    if any((ROOT / "pyvelo/native").glob("_velo*")) and (ROOT / "pyvelo/native/lib").is_dir():
        paths = [os.fspath(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


if __name__ == "__main__":
    use_checkout()
    sys.exit(main())
