"""Write the C source of pyvelo.native._velo: build_ffi.py VELO.CDEF OUTPUT.C"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI


def main() -> None:
    cdef, output = map(Path, sys.argv[1:])
    ffi = FFI()
    ffi.cdef(cdef.read_text(encoding="utf-8"))
    ffi.set_source("pyvelo.native._velo", '#include "velo-chat.h"')
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
