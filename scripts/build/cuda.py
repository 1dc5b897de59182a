"""Build upstream's whole CUDA backend with our operator in it, and check the library.

Needs nvcc, and cuBLAS from the toolkit or from the PyPI package nvidia-cublas beside this Python, but neither
a GPU nor a driver. Checks that the library holds our kernels, that every symbol it needs is found, and that
it loads without a driver. Takes most of an hour for one architecture; with ccache the second build is short.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.build._cmake import build_targets, configure, launchers
from scripts.build.cuda_report import readable
from scripts.gpu._machine import not_found

BUILD = ROOT / "build" / "cuda"
LIBRARY = "libvelo-ggml-cuda.so"
KERNELS = 104
"""Three number types for K and for V: nine kernels if both are f16, else eight. Three types have ten kernels
each. One kernel merges."""


def configure_cuda(architectures: str, tree: Path | None, cublas: Path | None) -> None:
    """Configure the folder for any CPU with AVX2, with the programs that check and measure."""
    options: dict[str, str | bool] = {
        "PYVELO_CUDA": True,
        "PYVELO_NATIVE": False,
        "PYVELO_BUILD_TESTS": True,
        "PYVELO_UPSTREAM_TESTS": True,
        "CMAKE_CUDA_ARCHITECTURES": architectures,
        "Python_EXECUTABLE": Path(sys.executable).as_posix(),
    }
    options["PYVELO_TREE"] = tree.resolve().as_posix() if tree else ""  # CMake would keep the last one
    options["PYVELO_CUBLAS"] = cublas.resolve().as_posix() if cublas else ""
    for ccache in launchers().values():
        options["CMAKE_CUDA_COMPILER_LAUNCHER"] = ccache
    configure(ROOT / "native", BUILD, options)


def output(*command: str) -> str:
    """Return the output of a program.

    Raises: ScriptError if there is no such program.
    """
    program = shutil.which(command[0])
    if program is None:
        raise ScriptError(
            f"{command[0]} is needed to inspect {LIBRARY}: install binutils and the C library's"
        )
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    return done.stdout + done.stderr


def our_kernels(symbols: str) -> set[str]:
    """Return the instances of our kernels in the output of nm."""
    kernels = (line.split()[-1] for line in symbols.splitlines() if "_kernel" in line and "5paged" in line)
    return {readable(symbol) for symbol in kernels}


def main() -> int:
    """Build, check and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", default="90-real", help="as CMake names them (default: 90-real)")
    parser.add_argument("--tree", type=Path, help="a patched llama.cpp tree (default: made in the cache)")
    parser.add_argument("--cublas", type=Path, help="the folder of cuBLAS (default: searched for)")
    given = parser.parse_args()

    begin = time.perf_counter()
    configure_cuda(given.architectures, given.tree, given.cublas)
    build_targets(BUILD, ["ggml-cuda"])
    library = BUILD / "bin" / LIBRARY
    print(f"{library}: {library.stat().st_size >> 20} MiB in {time.perf_counter() - begin:.0f} s")
    kernels = our_kernels(output("nm", "--defined-only", str(library)))
    print(f"kernels of ours: {len(kernels)} of {KERNELS}")
    needed = output("ldd", "-r", str(library))
    missing = [name for names in not_found(needed) for name in names]
    print(f"not found: {'; '.join(missing) or 'nothing'}")
    if "libcuda.so" in needed:
        print("it needs the driver's library and does not load without it")
    return 0 if len(kernels) == KERNELS and not missing and "libcuda.so" not in needed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
