"""Compile our CUDA kernels and read the compiler's report; fail if a register is kept in memory.

Compiles the files of native/ops/cuda to machine code for each compute capability, without ggml; a table shows
what every kernel uses. A spill (a register that is stored and loaded again) or a stack frame (an array that
does not fit into registers) is a failure: in a loop over the cache it costs more than anything else.
With --occupancy a second table shows, for usual calls, the tiles' shared memory and how many thread blocks
and warps a multiprocessor holds at once.

Capabilities that nvcc no longer supports, such as --capability 7.0 from CUDA 13 on, are compiled by the
runtime compiler of CUDA 12 from PyPI.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.build._nvrtc import compile_with_nvrtc
from scripts.build._occupancy import print_occupancy

SOURCES = ROOT / "native" / "ops" / "cuda"
CAPABILITIES = ("7.5", "8.0", "8.9", "9.0")
# as upstream's CMakeLists.txt compiles the backend
FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "-Xptxas", "-v", "-cubin")
RUNTIME_FLAGS = ("-std=c++17", "-default-device", "-use_fast_math", "--ptxas-options=-v")
RUNTIME_SOURCE = """
#define INFINITY __int_as_float(0x7f800000)
#include "paged-kernels.cuh"
"""

_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_NUMBERS = r"NS_\d+([a-z]+)_numbers(?:ILi(\d+)ELi(\d+)EE)?E"
_ATTEND = re.compile(rf"attend_kernelILi(\d+)ELi(\d+)ELi(\d+)E{_NUMBERS}(?:{_NUMBERS}|S\d*_)")
DIVISIONS = ("tokens", "rows", "columns")
"""How the warps of a thread block divide a tile, in the order of native/ops/cuda's `division`."""
TYPES = {1: "f16", 2: "q4_0", 8: "q8_0"}
"""Types with kernels of their own, by ggml's number."""


@dataclass(frozen=True)
class Usage:
    """Registers and bytes that the compiler reports for a function."""

    name: str
    capability: str
    registers: int
    stack: int
    spills: int
    shared: int
    """Static shared memory; a tile's is chosen at launch."""
    symbol: str = field(default="", compare=False, repr=False)
    code: int = field(default=0, compare=False)
    """Bytes of machine code; 0 if unknown."""

    @property
    def clean(self) -> bool:
        """Whether all of a thread's values are in registers."""
        return self.stack == 0 and self.spills == 0


@dataclass(frozen=True)
class Kernel:
    """Template arguments of a kernel of attention."""

    division: int
    m_tiles: int
    """Tiles of 16 rows of a warp."""
    v_tiles: int
    """Sixteens of columns of V in a warp's registers."""
    k: str
    """Numbers of K: their name, or the number of a type and a head size."""
    v: str

    @property
    def name(self) -> str:
        """Readable name."""
        rows = self.m_tiles * {"tokens": 8, "rows": 64, "columns": 16}[DIVISIONS[self.division]]
        warps = (4 if self.m_tiles == 1 else 8) if DIVISIONS[self.division] == "columns" else 1
        columns = 16 * self.v_tiles * warps
        head = f"attend by {DIVISIONS[self.division]}: {rows} rows"
        if " " in self.k:
            number, size = self.k.split()
            return f"{head}, {TYPES[int(number)]} of {size}"
        return f"{head}, K {self.k}, V {self.v}, {columns} columns"

    @property
    def instance(self) -> str:
        """Name in C++."""
        k, v = (
            f"paged::known_numbers<{one.replace(' ', ', ')}>" if " " in one else f"paged::{one}_numbers"
            for one in (self.k, self.v)
        )
        return f"paged::attend_kernel<{self.division}, {self.m_tiles}, {self.v_tiles}, {k}, {v}>"


def template_arguments(symbol: str) -> Kernel | None:
    """Return the template arguments in a symbol; None if the kernel is no template."""
    if (found := _ATTEND.search(symbol)) is None:
        return None
    k = f"{found[5]} {found[6]}" if found[5] else found[4]
    v = f"{found[8]} {found[9]}" if found[8] else found[7] or k
    return Kernel(int(found[1]), int(found[2]), int(found[3]), k, v)


def readable(symbol: str) -> str:
    """Return a kernel's name from the symbol that the compiler prints."""
    if kernel := template_arguments(symbol):
        return kernel.name
    plain = re.search(r"\d([a-z]+)_kernel", symbol)
    return plain[1] if plain else symbol


def instance(symbol: str) -> str | None:
    """Return the C++ name of the kernel with its template arguments; None if it is no template."""
    kernel = template_arguments(symbol)
    return kernel.instance if kernel else None


def read_report(text: str, capability: str) -> list[Usage]:
    """Return the functions of a report of ptxas -v, in order."""
    functions: list[Usage] = []
    symbol, frame = "", (0, 0, 0)

    def add(registers: int, shared: int) -> None:
        stack, stores, loads = frame
        functions.append(
            Usage(readable(symbol), capability, registers, stack, stores + loads, shared, symbol)
        )

    for line in text.splitlines():
        if found := _FUNCTION.search(line):
            if symbol:  # the report has nothing more on a called function
                add(0, 0)
            symbol = found[1]
        elif found := _FRAME.search(line):
            frame = (int(found[1]), int(found[2]), int(found[3]))
        elif (found := _USED.search(line)) and symbol:
            add(int(found[1]), int(found[2] or 0))
            symbol = ""
    if symbol:
        add(0, 0)
    return functions


def code_bytes(binary: bytes) -> dict[str, int]:
    """Return the bytes of machine code of each function in a cubin, a 64-bit ELF file, by symbol."""
    if binary[:5] != b"\x7fELF\x02":
        return {}
    (table,) = struct.unpack_from("<Q", binary, 40)
    each, n, index_of_names = struct.unpack_from("<HHH", binary, 58)
    sections = [struct.unpack_from("<I20xQQ", binary, table + i * each) for i in range(n)]
    names = sections[index_of_names][1]
    found = {}
    for name, _, size in sections:
        word = binary[names + name : binary.index(b"\0", names + name)].decode()
        if word.startswith(".text."):
            found[word.removeprefix(".text.")] = size
    return found


def find_nvcc(given: str | None) -> str:
    """Return the path of nvcc: the named one, else from CUDACXX, PATH, CUDA_PATH or the usual folder.

    Raises: ScriptError if it is not found.
    """
    named = given or os.environ.get("CUDACXX")
    places = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "bin")]
    found = shutil.which(named) if named else shutil.which("nvcc") or shutil.which("nvcc", path=places[0])
    if found is None:
        wanted = f"{named} is no program" if named else "there is no nvcc on PATH"
        raise ScriptError(
            f"our kernels are compiled with NVIDIA's compiler, and {wanted}: install the CUDA toolkit "
            f"(its package cuda-nvcc is enough) or name nvcc with --nvcc"
        )
    return found


def known_to(nvcc: str) -> list[str]:
    """Return the compute capabilities that a compiler supports, the oldest first."""
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    return [f"{major}.{minor}" for major, minor in re.findall(r"compute_(\d+)(\d)$", done.stdout, re.M)]


def compile_one(nvcc: str, source: Path, capability: str, folder: Path) -> list[Usage]:
    """Return the report on one file for one compute capability.

    Raises: ScriptError with the compiler's message if it does not compile.
    """
    architecture = "sm_" + capability.replace(".", "")
    output = folder / f"{source.stem}-{architecture}.cubin"
    command = [nvcc, *FLAGS, f"-arch={architecture}", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise ScriptError(f"{source.name} does not compile for {capability}: the reason is above")
    sizes = code_bytes(output.read_bytes()) if output.is_file() else {}
    functions = read_report(done.stdout + done.stderr, capability)
    return [replace(usage, code=sizes.get(usage.symbol, 0)) for usage in functions]


def compile_dropped(instances: Sequence[str], capability: str) -> list[Usage]:
    """Return the report on these kernels for a compute capability that nvcc no longer supports.

    Raises: ScriptError if they do not compile, or if there is no compiler for them.
    """
    flags = [*RUNTIME_FLAGS, f"-arch=sm_{capability.replace('.', '')}"]
    done, words = compile_with_nvrtc(RUNTIME_SOURCE, instances, flags, SOURCES)
    if not done:
        print(words, file=sys.stderr)
        raise ScriptError(f"the kernels do not compile for {capability}: the reason is above")
    return read_report(words, capability)


def report(
    nvcc: str, sources: Sequence[Path], capabilities: Sequence[str], jobs: int, quick: bool = False
) -> list[Usage]:
    """Return the reports on all files for all compute capabilities, compiled `jobs` at a time.

    `quick` compiles each file for the newest capability, but floats, whose products need most registers, for
    the oldest.

    nvcc's report lists the kernels. If it knows none of the wanted capabilities, it compiles for its oldest
    one to list them.

    Raises: ScriptError if a file does not compile or a report cannot be read.
    """
    known = known_to(nvcc)
    dropped = [one for one in capabilities if known and float(one) < float(known[0])]
    offered = [one for one in capabilities if one not in dropped]
    listed = offered or known[:1]
    work = [(source, capability) for capability in listed for source in sources]
    if quick:
        oldest, newest = min(listed, key=float), max(listed, key=float)
        work = [(one, oldest if one.stem.endswith("-float") else newest) for one in sources]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        reports = list(pool.map(lambda one: compile_one(nvcc, one[0], one[1], Path(folder)), work))
        each = reports[: len(sources)]  # of the first compute capability
        groups = [sorted(filter(None, {instance(usage.symbol) for usage in one})) for one in each]
        again = [(group, one) for one in dropped for group in groups]
        old = list(pool.map(lambda one: compile_dropped(*one), again))
    if not all([*old, *reports]):
        raise ScriptError("the compiler reported on no kernel: is ptxas -v still the way to ask it?")
    found = [usage for one in [*old, *reports] for usage in one]
    return [
        one for one in dict.fromkeys(found) if one.capability in capabilities
    ]  # all files have the merge kernel


def print_table(functions: Sequence[Usage]) -> None:
    """Print a row for each kernel and a column for each compute capability: registers, code, spills."""
    capabilities = list(dict.fromkeys(usage.capability for usage in functions))
    cells = {(usage.name, usage.capability): usage for usage in functions}
    width = max(len(usage.name) for usage in functions)
    print(
        f"{'registers and code of':{width}} " + " ".join(f"{capability:>22}" for capability in capabilities)
    )
    for name in dict.fromkeys(usage.name for usage in functions):
        row = []
        for capability in capabilities:
            usage = cells.get((name, capability))
            text = "" if usage is None else str(usage.registers)
            if usage is not None and usage.code:
                text += f", {usage.code / 1024:.0f} KiB"
            if usage is not None and usage.shared:
                text += f", {usage.shared} B shared"
            if usage is not None and not usage.clean:
                text += f", {usage.stack} stack, {usage.spills} spilled"
            row.append(f"{text:>22}")
        print(f"{name:{width}} " + " ".join(row))


def main() -> int:
    """Compile, print the table, and return 1 if a kernel spills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability", action="append", help=f"such as 7.0 (default: {', '.join(CAPABILITIES)})"
    )
    parser.add_argument("--quick", action="store_true", help="each file for one of these")
    parser.add_argument(
        "--occupancy", action="store_true", help="also print how many warps a multiprocessor holds"
    )
    parser.add_argument("--nvcc", help="the compiler (default: the one in PATH)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    given = parser.parse_args()
    for capability in given.capability or ():
        if not re.fullmatch(r"\d+\.\d", capability):
            raise ScriptError(f"{capability} is no compute capability: give one like 9.0")

    begin = time.perf_counter()
    capabilities = given.capability or CAPABILITIES
    sources = sorted(SOURCES.glob("paged-kernels-*.cu"))
    functions = report(find_nvcc(given.nvcc), sources, capabilities, max(1, given.jobs), given.quick)
    print_table(functions)
    if given.occupancy:
        used = {(usage.name, usage.capability): usage.registers for usage in functions}

        def registers_of(kernel: tuple[int, int, int, str, str], capability: str) -> tuple[str, int] | None:
            name = Kernel(*kernel).name
            registers = used.get((name, capability))
            return None if registers is None else (name, registers)

        print_occupancy(capabilities, registers_of)
    wrong = [usage for usage in functions if not usage.clean]
    for usage in wrong:
        print(
            f"{usage.name} for {usage.capability}: {usage.stack} bytes of stack, {usage.spills} of spills",
            file=sys.stderr,
        )
    print(
        f"{len(functions)} kernels for {', '.join(capabilities)} in {time.perf_counter() - begin:.0f} s: "
        f"{len(wrong)} with spills or a stack frame"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
