"""Derive the declarations of the Python binding from native/api/velo.h and native/api/velo-chat.h.

Writes native/ffi/velo.cdef, which cffi reads, and pyvelo/native/_velo.pyi, the stub of the compiled module.
With --check it writes nothing; the exit status is 1 if a file differs from what the headers say.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT

HEADERS = [ROOT / "native/api/velo.h", ROOT / "native/api/velo-chat.h"]
CDEF = ROOT / "native/ffi/velo.cdef"
STUB = ROOT / "pyvelo/native/_velo.pyi"

NOTE = "Generated from the headers of native/api by scripts/build/ffi.py: change a header and run it again."

# Callbacks from C: pyvelo/native/_ffi.py binds the Python functions of these names.
CALLBACKS = """\
extern "Python" {
    void velo_py_log(int32_t level, const char *text, void *user);
    int32_t velo_py_progress(float progress, void *user);
}
"""

STUB_HEAD = '''\
# {note}
from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

class CData:
    """A C pointer, struct or array; cffi checks its type when it is used."""

    def __getitem__(self, index: int) -> Any: ...
    def __setitem__(self, index: int, value: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __bool__(self) -> bool: ...
    def __len__(self) -> int: ...

class _FFI:
    NULL: Final[CData]
    def new(self, cdecl: str, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str, value: Any) -> CData: ...
    def gc(self, cdata: CData, destructor: Callable[[CData], Any] | None, size: int = ...) -> CData: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def buffer(self, cdata: CData, size: int = ...) -> memoryview: ...
    def from_buffer(
        self, cdecl: str, buffer: npt.NDArray[Any] | bytes, require_writable: bool = ...
    ) -> CData: ...
    def new_handle(self, obj: object) -> CData: ...
    def from_handle(self, handle: CData) -> Any: ...
    def def_extern(
        self, name: str = ..., *, error: int = ..., onerror: Callable[..., Any] = ...
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...

class _Lib:
'''


class Function(NamedTuple):
    """One declaration of the header."""

    result: str
    name: str
    parameters: list[tuple[str, str]]  # C type, name


def declarations(header: str) -> str:
    """Return the C declarations alone: no preprocessor, no C++, no attribute."""
    text = re.sub(r"^#define (VELO_ABI_VERSION \d+)$", r"@define \1", header, flags=re.MULTILINE)
    text = re.sub(r'^#ifdef __cplusplus\n(extern "C" \{|\})\n#endif\n', "", text, flags=re.MULTILINE)
    text = re.sub(r'^extern "C" \{\n', "", text, flags=re.MULTILINE)
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("@define", "#define").replace("VELO_API ", "")
    text = re.sub(r"\s+VELO_NOEXCEPT\b", "", text)
    text = re.sub(r"[ \t]*//.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\S) {2,}", " ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def functions(cdef: str) -> list[Function]:
    """Return the functions that a cdef declares, in order."""
    found = []
    for match in re.finditer(r"^([\w \*]+?)\b(velo_\w+)\(([^()]*)\);", cdef, flags=re.MULTILINE):
        result, name, parameters = match.groups()
        if result.startswith(("typedef", "struct")):
            continue
        pairs = []
        for parameter in parameters.split(","):
            parts = re.fullmatch(r"\s*(.*?)(\w+)\s*", parameter, flags=re.DOTALL)
            if parts and parts.group(1):
                pairs.append((" ".join(parts.group(1).split()), parts.group(2)))
        found.append(Function(result.strip(), name, pairs))
    return found


def python_type(c_type: str, *, result: bool) -> str:
    """Return the Python type that cffi takes for a C type, or returns."""
    if "*" in c_type:
        is_text = c_type in ("const char *", "const void *")
        return "CData | bytes" if is_text and not result else "CData"
    if c_type in ("float", "double"):
        return "float"
    if c_type == "void":
        return "None"
    integers = ("int8_t", "uint8_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "size_t", "velo_status")
    if c_type in integers:
        return "int"
    return "CData"  # a struct by value, or a callback


def make_cdef(header: str) -> str:
    """Return the text of native/ffi/velo.cdef."""
    return f"/* {NOTE} */\n\n{declarations(header)}\n{CALLBACKS}"


def make_stub(header: str) -> str:
    """Return the text of pyvelo/native/_velo.pyi."""
    cdef = declarations(header)
    lines = [STUB_HEAD.format(note=NOTE)]
    for name in re.findall(r"^(?:#define|   ) (VELO_\w+)\b", cdef, flags=re.MULTILINE):
        lines.append(f"    {name}: Final[int]\n")
    for callback in re.findall(r"(velo_py_\w+)\(", CALLBACKS):
        lines.append(f"    {callback}: Final[CData]\n")
    for function in functions(cdef):
        taken = ["self"]
        for c_type, name in function.parameters:
            taken.append(f"{name}: {python_type(c_type, result=False)}")
        taken.append("/")
        result = python_type(function.result, result=True)
        lines.append(f"    def {function.name}({', '.join(taken)}) -> {result}: ...\n")
    lines.append("\nffi: Final[_FFI]\nlib: Final[_Lib]\n")
    return "".join(lines)


def main() -> int:
    """Write the two files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is stale, and write nothing")
    check: bool = parser.parse_args().check

    header = "\n".join(path.read_text(encoding="utf-8") for path in HEADERS)
    stale = []
    for path, text in ((CDEF, make_cdef(header)), (STUB, make_stub(header))):
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(("stale, run scripts/build/ffi.py: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
