"""Build the portable package (PYVELO_PORTABLE) and run the engine's tests on each of its CPU backends.

    python scripts/check/portable.py
    python scripts/check/portable.py --variants haswell x64

Each backend is tried in a copy of the package that holds no other; backends that this processor cannot run
are named. The operator's own tests run against single builds, by PYVELO_LAB (see tests/ops/lab.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.build._cmake import build_targets, cmake, configure, copy_package

BUILD = ROOT / "build" / "portable"
PREFIX = "libggml-cpu-"
LEFT_OUT = {
    "test_rows_hold_the_bytes_of_stock": "stock is built for this machine, and others round otherwise",
    "laboratory": "all that are marked so: it has one backend",
}
# upstream packs no weights for these
WITHOUT_AVX2 = ("x64", "sse42", "sandybridge", "ivybridge", "piledriver")


def build() -> Path:
    """Build the package; return its folder."""
    configure(ROOT / "native", BUILD, {"PYVELO_PORTABLE": True, "PYVELO_BUILD_TESTS": False})
    build_targets(BUILD, ["all"])
    folder = BUILD / "package"
    shutil.rmtree(folder, ignore_errors=True)
    copy_package(folder)
    install = [cmake(), "--install", str(BUILD), "--component", "pyvelo", "--prefix", str(folder)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ScriptError(f"the package could not be laid out: {done.stderr.strip()}")
    return folder


def try_variant(package: Path, variant: str) -> str:
    """Return the last line of the tests' output on one backend."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "package")
        shutil.copytree(package, copy)
        for path in copy.rglob(f"{PREFIX}*"):
            if path.stem != PREFIX + variant:
                path.unlink()
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        starts = [sys.executable, "-c", "from pyvelo.native import devices; devices()"]
        done = subprocess.run(
            starts, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return "cannot run on this processor" if "runs on this processor" in done.stderr else done.stderr
        # not "python -m pytest", which would find the checkout's package
        tests = [str(Path(sys.executable).parent / "pytest"), "-q", "-p", "no:cacheprovider"]
        left_out = [*LEFT_OUT, *(["packing"] if variant in WITHOUT_AVX2 else [])]
        tests += ["tests/native", "tests/e2e", "-k", " and ".join(f"not {name}" for name in left_out)]
        done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        return lines[-1] if done.returncode == 0 else "\n".join(["FAILED", *lines[-25:]])


def main() -> int:
    """Return 1 if a backend failed or none could be run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", help="default: all")
    given = parser.parse_args()
    package = build()
    present = sorted(path.stem.removeprefix(PREFIX) for path in package.rglob(f"{PREFIX}*"))
    if unknown := set(given.variants or []) - set(present):
        raise ScriptError(f"unknown variant {', '.join(unknown)}: choose from {', '.join(present)}")
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    print(f"left out of {', '.join(WITHOUT_AVX2)}: packing: there is none")
    said = {}
    for variant in given.variants or present:
        said[variant] = try_variant(package, variant)
        print(f"{variant:>16}: {said[variant]}", flush=True)
    passed = [variant for variant, text in said.items() if " passed" in text and "FAILED" not in text]
    failed = [variant for variant, text in said.items() if variant not in passed and "cannot run" not in text]
    return int(bool(failed) or not passed)


if __name__ == "__main__":
    sys.exit(run_main(main))
