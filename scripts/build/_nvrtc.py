"""NVIDIA's runtime compiler of CUDA 12, from PyPI: machine code for GPUs that nvcc no longer supports."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from scripts._common import ScriptError
from scripts.gpu._machine import nvidia_folders

PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")
"""The compiler, and CUDA's headers."""

_LIBRARY = "libnvrtc.so.12"

# it has no C++ library
_CSTDINT = b"""
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
"""


def compile_with_nvrtc(
    source: str, names: Sequence[str], options: Sequence[str], include: Path
) -> tuple[bool, str]:
    """Compile a program with the kernels of these names; return whether it compiled, and the compiler's log.

    Raises: ScriptError if its packages are not installed.
    """
    folders = nvidia_folders()
    libraries = [folder / _LIBRARY for folder in folders if (folder / _LIBRARY).is_file()]
    includes = [folder.parent / "include" for folder in folders if folder.parent.name == "cuda_runtime"]
    if not libraries or not includes:
        raise ScriptError(
            f"this takes the compiler of CUDA 12, which is not installed: pip install {' '.join(PACKAGES)}"
        )
    nvrtc = ctypes.CDLL(str(libraries[0]))
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 2)(_CSTDINT, _CSTDINT), (ctypes.c_char_p * 2)(b"cstdint", b"stdint.h")
    _require(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 2, *headers))
    try:
        for name in names:
            _require(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        words = [*options, f"-I{include}", f"-I{includes[0]}"]
        given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        status = nvrtc.nvrtcCompileProgram(program, len(words), given)
        size = ctypes.c_size_t()
        _require(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _require(nvrtc.nvrtcGetProgramLog(program, log))
        return status == 0, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _require(status: int) -> None:
    if status != 0:
        raise ScriptError(f"a call of nvrtc failed with status {status}")
