"""Build the unpatched llama.cpp as a reference, and print the folder of its programs and libraries.

The build lies in the per-user cache, one for each version, set of options and kind of processor. It holds
llama-bench, llama-batched-bench and llama-quantize, on request llama-server or llama-completion, and
libvelo-contiguous: native/lab/contiguous.cpp over the stock library.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, run_main
from scripts.build._cmake import build_targets, configure
from scripts.upstream._pin import exclusive, read_pin
from scripts.upstream.fetch import locate

LIBRARIES = ("llama", "velo-contiguous")
TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")
SERVER = ("llama-server",)
COMPLETION = ("llama-completion",)
SUPERPROJECT = ROOT / "native" / "lab" / "stock" / "CMakeLists.txt"

# as native/cmake/Upstream.cmake configures the patched tree, tools aside
OPTIONS: dict[str, str | bool] = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": True,
    "GGML_NATIVE": True,
    "LLAMA_OPENSSL": False,
    "LLAMA_BUILD_COMMON": True,
    "LLAMA_BUILD_TOOLS": True,
    "LLAMA_BUILD_TESTS": False,
    "LLAMA_BUILD_EXAMPLES": False,
    "LLAMA_BUILD_SERVER": True,
    "LLAMA_USE_PREBUILT_UI": False,  # nothing is downloaded
    "LLAMA_BUILD_APP": False,
}

PROCESSORS: dict[str, dict[str, str | bool]] = {
    "native": {},
    "avx2": {"GGML_NATIVE": False},
    "avx-vnni": {"GGML_NATIVE": False, "GGML_AVX_VNNI": True},
}
"""Options of builds for the processors of laptops, as PYVELO_NATIVE=OFF makes ours."""


def processor() -> str:
    """Return the instruction sets of this machine, for which GGML_NATIVE compiles."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        flags = sorted(
            {line for line in lines if line.startswith(("flags", "Features", "isa", "model name"))}
        )
        return f"{platform.machine()} {flags}"
    return f"{platform.machine()} {platform.processor()}"


def build_stock(targets: Sequence[str], changes: Mapping[str, str | bool] | None = None) -> Path:
    """Build the targets that are not built yet; return the folder of programs and libraries.

    `changes` are options that differ from OPTIONS; each set of options has its own folder.
    """
    tree, options = locate(read_pin()), OPTIONS | dict(changes or {})
    superproject = SUPERPROJECT.read_bytes()
    key = hashlib.sha256(f"{tree.identity} {options} {processor()}".encode() + superproject).hexdigest()[:12]
    home = tree.cache / f"stock-{key}"
    with exclusive(home.with_suffix(".lock")):
        # a copy, so that all checkouts share one build
        source = home / "source"
        source.mkdir(parents=True, exist_ok=True)
        copy = source / "CMakeLists.txt"
        if not copy.exists() or copy.read_bytes() != superproject:
            copy.write_bytes(superproject)
        paths = {"STOCK_TREE": tree.path.as_posix(), "PYVELO_NATIVE_SOURCE": (ROOT / "native").as_posix()}
        if not (home / "bin").exists():
            print(f"building stock llama.cpp in {home}, for some minutes …", file=sys.stderr, flush=True)
        configure(source, home, options | paths)
        build_targets(home, targets)
    return home / "bin"


def main() -> int:
    """Print the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--libs-only", action="store_true", help="only the libraries, for tests: no programs")
    what.add_argument("--server", action="store_true", help="llama-server too")
    what.add_argument("--completion", action="store_true", help="llama-completion too")
    parser.add_argument("--cpu", choices=PROCESSORS, default="native", help="instructions that it may use")
    given = parser.parse_args()
    for_cpu = PROCESSORS[given.cpu]
    if given.libs_only:
        print(build_stock(LIBRARIES, {"STOCK_FOR_TESTS": True} | for_cpu))
    else:
        targets = LIBRARIES + TOOLS + SERVER * given.server + COMPLETION * given.completion
        print(build_stock(targets, for_cpu))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
