"""Write the instruction sets that the CPU backend is compiled for: cpu_flags.py OUTPUT COMPILER [FLAGS...]

It prints a digest of all that FLAGS mean on this machine. The output has Linux's names of instruction sets,
which pyvelo.cpu compares with the processor before anything of the library runs. It leaves out what
/proc/cpuinfo does not list on this machine if FLAGS compile for it: its kernel does not know the names, and
compiled code runs here.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NAMES = {  # of x86, then of ARM
    **{"__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2"},
    **{"__POPCNT__": "popcnt", "__LZCNT__": "abm", "__MOVBE__": "movbe"},
    **{"__BMI__": "bmi1", "__BMI2__": "bmi2"},
    **{"__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c", "__AVXVNNI__": "avx_vnni"},
    **{"__AVX512F__": "avx512f", "__AVX512CD__": "avx512cd", "__AVX512BW__": "avx512bw"},
    **{"__AVX512DQ__": "avx512dq", "__AVX512VL__": "avx512vl", "__AVX512IFMA__": "avx512ifma"},
    **{"__AVX512VBMI__": "avx512vbmi", "__AVX512VBMI2__": "avx512_vbmi2", "__AVX512VNNI__": "avx512_vnni"},
    **{"__AVX512BITALG__": "avx512_bitalg", "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq"},
    **{"__AVX512BF16__": "avx512_bf16", "__AVX512FP16__": "avx512_fp16", "__GFNI__": "gfni"},
    **{"__SSE4A__": "sse4a", "__FMA4__": "fma4", "__XOP__": "xop", "__TBM__": "tbm"},
    **{"__VAES__": "vaes", "__VPCLMULQDQ__": "vpclmulqdq"},
    **{"__AMX_TILE__": "amx_tile", "__AMX_INT8__": "amx_int8", "__AMX_BF16__": "amx_bf16"},
    **{"__ARM_FEATURE_CRC32": "crc32", "__ARM_FEATURE_QRDMX": "asimdrdm", "__ARM_FEATURE_RCPC": "lrcpc"},
    **{"__ARM_FEATURE_ATOMICS": "atomics", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp"},
    **{"__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_MATMUL_INT8": "i8mm", "__ARM_FEATURE_BF16": "bf16"},
    **{"__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_SVE2": "sve2", "__ARM_FEATURE_SME": "sme"},
}
"""Linux's names of instruction sets, by the macros of compilers."""


def compiled_flags(macros: str) -> list[str]:
    """Return the names of the instruction sets that a compiler's list of macros has."""
    defined = {line.split()[1] for line in macros.splitlines() if line.startswith("#define ")}
    return [name for macro, name in NAMES.items() if macro in defined]


def is_native(flags: Iterable[str]) -> bool:
    """Return whether the flags compile for this machine."""
    return any(flag.endswith("=native") or "=native+" in flag for flag in flags)


def main() -> None:
    output, compiler, *flags = sys.argv[1:]
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", "-"]
    macros = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    names = compiled_flags(macros)
    cpuinfo = Path("/proc/cpuinfo")
    if is_native(flags) and cpuinfo.exists():
        here = set(cpuinfo.read_text(encoding="utf-8").split())
        names = [name for name in names if name in here]
    print(hashlib.sha256(macros.encode()).hexdigest()[:16])
    Path(output).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


if __name__ == "__main__":
    main()
