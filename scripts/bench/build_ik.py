"""Build ik_llama.cpp, a peer of bench/laptop.py, from a folder with its sources; print the programs' folder.

    python scripts/bench/build_ik.py ../ik_llama.cpp
    python scripts/bench/build_ik.py ../ik_llama.cpp --cpu avx-vnni

The build is made like stock's (build/stock.py), in a folder within the sources.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.build._cmake import build_targets, configure
from scripts.build.stock import PROCESSORS

TARGETS = ("llama-bench", "llama-batched-bench")
OPTIONS: dict[str, str | bool] = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": True,
    "GGML_IQK_FA_ALL_QUANTS": False,  # f16 and q8_0 are enough, and are built many times as fast
    "LLAMA_BUILD_TESTS": False,
    "LLAMA_BUILD_SERVER": False,
}


def build(source: Path, cpu: str) -> Path:
    """Build the programs for a processor of PROCESSORS, and return their folder.

    Raises: ScriptError if the folder has no such sources, or the build fails.
    """
    if not (source / "ggml/src/iqk").is_dir():
        raise ScriptError(f"{source} has no sources of ik_llama.cpp: there is no folder ggml/src/iqk")
    home = source / f"build-{cpu}"
    configure(source, home, OPTIONS | PROCESSORS[cpu] | {"GGML_AVXVNNI": cpu == "avx-vnni"})  # its own name
    build_targets(home, TARGETS)
    return home / "bin"


def main() -> int:
    """Print the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("--cpu", choices=PROCESSORS, default="avx2", help="instructions that it may use")
    given = parser.parse_args()
    print(build(given.source.resolve(), given.cpu))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
