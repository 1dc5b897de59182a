"""scripts/build/cuda_report.py and scripts/build/cuda.py read what compilers and linkers print."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.build import cuda, cuda_report

KERNEL = "_ZN5paged13attend_kernelILi1ELi2ELi8ENS_12half_numbersE{v}EEvNS_6paramsENS_9row_rangeEi"
SAME, OTHER = "S1_", "NS_14bfloat_numbersE"
KNOWN = "_ZN5paged13attend_kernelILi0ELi1ELi8ENS_13known_numbersILi8ELi128EEES2_EEvNS_6paramsENS_9row_rangeEi"
MERGE = "_ZN5pagedL12merge_kernelENS_6paramsE"


def entry(symbol: str, stack: int = 0, stores: int = 0, loads: int = 0, registers: int = 96) -> str:
    """What ptxas -v prints of a kernel."""
    return (
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_90'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers, 16 bytes smem, 556 bytes cmem[0]\n"
        "ptxas info    : Compile time = 812.498 ms\n"
    )


def compiler(folder: Path, text: str, status: int = 0) -> str:
    """A program that prints a report, as nvcc does; it knows no compute capability before 7.5."""
    path = folder / "nvcc"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "if '--list-gpu-arch' in sys.argv:\n"
        "    print('compute_75\\ncompute_90\\ncompute_120')\n    sys.exit()\n"
        f"sys.stderr.write({text!r})\nsys.exit({status})\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cuda_report.py", *arguments])
    return cuda_report.main()


def test_a_report() -> None:
    text = entry(KERNEL.format(v=SAME), 16, 12, 32, 168) + entry(MERGE)
    assert cuda_report.read_report(text, "9.0") == [
        cuda_report.Usage("attend by rows: 128 rows, K half, V half, 128 columns", "9.0", 168, 16, 44, 16),
        cuda_report.Usage("merge", "9.0", 96, 0, 0, 16),
    ]
    found = cuda_report.read_report(entry(KERNEL.format(v=OTHER)), "8.0")
    assert found[0].name == "attend by rows: 128 rows, K half, V bfloat, 128 columns"
    found = cuda_report.read_report(entry(KNOWN), "8.0")
    assert found[0].name == "attend by tokens: 8 rows, q8_0 of 128"
    name = "paged::attend_kernel<0, 1, 8, paged::known_numbers<8, 128>, paged::known_numbers<8, 128>>"
    assert cuda_report.instance(found[0].symbol) == name


def section(name: int, offset: int, size: int) -> bytes:
    """A section's header in an ELF file of 64 bits."""
    return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)


def test_bytes_of_machine_code() -> None:
    names = b"\0.text.one\0.text.other_kernel\0.data\0"
    body = names + section(0, 64, len(names)) + section(1, 0, 640) + section(11, 0, 128) + section(30, 0, 9)
    head = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<QIHHHHHH", 64 + len(names), 0, 64, 0, 0, 64, 4, 0)
    assert cuda_report.code_bytes(head + body) == {"one": 640, "other_kernel": 128}
    assert cuda_report.code_bytes(b"no ELF") == {}


def test_tiles_of_columns() -> None:
    found = [cuda_report.Kernel(2, m, v, "half", "half").name for m, v in ((1, 8), (4, 4))]
    assert found == [f"attend by columns: {n} rows, K half, V half, 512 columns" for n in (16, 64)]


def test_a_function_that_is_called_counts_too() -> None:
    text = (
        "ptxas info    : Function properties for helper\n"
        "    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    )
    for report in (text, text + entry(MERGE), entry(MERGE) + text):
        assert ("helper", False) in [
            (usage.name, usage.clean) for usage in cuda_report.read_report(report, "9.0")
        ]


@pytest.mark.skipif(os.name == "nt", reason="the compiler of this test is a script with a #! line")
class TestProgram:
    """The whole script, over compilers that only print."""

    @pytest.fixture(autouse=True)
    def old_compiler(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
        """Replace CUDA 12's compiler by one that always succeeds; return the kernels that it compiles."""
        asked: list[tuple[str, ...]] = []

        def compile_with_nvrtc(
            source: str, names: Sequence[str], options: Sequence[str], include: Path
        ) -> tuple[bool, str]:
            assert "-arch=sm_70" in options
            asked.append(tuple(names))
            return True, entry(KERNEL.format(v=SAME), registers=222) + entry(MERGE)

        monkeypatch.setattr(cuda_report, "compile_with_nvrtc", compile_with_nvrtc)
        return asked

    def test_what_nvcc_has_dropped(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        old_compiler: list[tuple[str, ...]],
    ) -> None:
        """Is compiled by another, for the same kernels, whether nvcc is asked for any or not."""
        nvcc = compiler(tmp_path, entry(KERNEL.format(v=OTHER), registers=123) + entry(MERGE))
        assert run(monkeypatch, "--nvcc", nvcc, "--capability", "7.0") == 0
        out = capsys.readouterr().out
        assert "222" in out
        assert "123" not in out
        assert set(old_compiler) == {
            ("paged::attend_kernel<1, 2, 8, paged::half_numbers, paged::bfloat_numbers>",)
        }
        assert run(monkeypatch, "--nvcc", nvcc, "--capability", "7.0", "--capability", "12.0") == 0
        out = capsys.readouterr().out
        assert "222" in out
        assert "123" in out

    def test_what_the_old_compiler_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(cuda_report, "compile_with_nvrtc", lambda *given: (False, "no such thing"))
        nvcc = compiler(tmp_path, entry(KERNEL.format(v=SAME)))
        with pytest.raises(ScriptError, match=r"do not compile for 7\.0: the reason is above"):
            run(monkeypatch, "--nvcc", nvcc, "--capability", "7.0")
        assert "no such thing" in capsys.readouterr().err

    def test_without_spills(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nvcc = compiler(tmp_path, entry(KERNEL.format(v=SAME), registers=123) + entry(MERGE))
        assert run(monkeypatch, "--nvcc", nvcc) == 0
        out = capsys.readouterr().out
        row = next(
            line for line in out.splitlines() if line.startswith("attend by rows: 128 rows, K half, V half")
        )
        assert row.split("columns")[1].split().count("123,") == 4
        assert "0 with spills or a stack frame" in out

    def test_quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compiles each file for one capability: floats for the oldest, the others for the newest."""
        compiled: list[tuple[str, str]] = []

        def compile_one(nvcc: str, source: Path, capability: str, folder: Path) -> list[cuda_report.Usage]:
            compiled.append((source.name, capability))
            return [cuda_report.Usage(source.name, capability, 100, 0, 0, 0)]

        monkeypatch.setattr(cuda_report, "compile_one", compile_one)
        monkeypatch.setattr(cuda_report, "known_to", lambda nvcc: ["7.5", "9.0"])
        sources = [Path("k-bfloat.cu"), Path("k-float.cu"), Path("k-known.cu")]
        found = cuda_report.report("nvcc", sources, ["9.0", "7.5"], 1, quick=True)
        assert compiled == [("k-bfloat.cu", "9.0"), ("k-float.cu", "7.5"), ("k-known.cu", "9.0")]
        assert len(found) == 3

    @pytest.mark.parametrize(("stack", "stores", "loads"), [(0, 4, 0), (0, 0, 4), (8, 0, 0)])
    def test_any_spill_or_stack_frame_fails(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        stack: int,
        stores: int,
        loads: int,
    ) -> None:
        nvcc = compiler(tmp_path, entry(MERGE) + entry(KERNEL.format(v=SAME), stack, stores, loads))
        assert run(monkeypatch, "--nvcc", nvcc, "--capability", "9.0") == 1
        assert f"for 9.0: {stack} bytes of stack, {stores + loads} of spills" in capsys.readouterr().err

    def test_a_report_without_kernels(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ScriptError, match="reported on no kernel"):
            run(monkeypatch, "--nvcc", compiler(tmp_path, ""))

    def test_what_does_not_compile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(ScriptError, match=r"does not compile for \d\.\d: the reason is above"):
            run(monkeypatch, "--nvcc", compiler(tmp_path, "error: no such thing\n", 2))
        assert "no such thing" in capsys.readouterr().err


def test_no_old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.build._nvrtc.nvidia_folders", lambda: [tmp_path])
    with pytest.raises(ScriptError, match="pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"):
        cuda_report.compile_dropped(["paged::merge_kernel"], "7.0")


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    with pytest.raises(ScriptError, match="there is no nvcc on PATH: install the CUDA toolkit"):
        run(monkeypatch)
    with pytest.raises(ScriptError, match="nothere is no program"):
        run(monkeypatch, "--nvcc", "nothere")


def test_a_capability_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScriptError, match="sm_90 is no compute capability"):
        run(monkeypatch, "--capability", "sm_90")


def test_kernels_in_a_library() -> None:
    """Each once, however many symbols it has; what is not ours is not counted."""
    kernel = KERNEL.format(v=OTHER)
    symbols = (
        f"0 W {kernel}\n0 t _ZL111__device_stub_{kernel}\n0 t {MERGE}\n0 t {MERGE}\n0 T _Z11some_kernelv\n"
    )
    assert cuda.our_kernels(symbols) == {"attend by rows: 128 rows, K half, V bfloat, 128 columns", "merge"}


def test_what_a_library_does_not_find() -> None:
    text = (
        "\tlibcublas.so.13 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n"
        "undefined symbol: cuInit\t(./libvelo-ggml-cuda.so)\n"
    )
    assert cuda.not_found(text + text) == (["libcublas.so.13"], ["cuInit"])
    assert cuda.not_found("\tlibc.so.6 => /lib/libc.so.6 (0x1)\n") == ([], [])
