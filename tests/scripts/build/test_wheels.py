"""scripts/build/wheels.py, all but building: names, contents, which CPU backend a processor shall take."""

from __future__ import annotations

import contextlib
import shutil
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.build import _wheel_arm
from scripts.build._wheel_check import (
    COMPILERS,
    VARIANTS,
    ask,
    best_variant,
    flags_here,
    libraries,
    loaded_variant,
    needs_avx512,
    without_compilers,
)
from scripts.build.wheels import check_contents, check_glibc, only, platform

HASWELL = "fpu sse sse2 ssse3 fma sse4_1 sse4_2 movbe popcnt aes avx f16c bmi1 avx2 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg"
ZEN4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN4} avx_vnni avx512_fp16 amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "variant"),
    [
        ("fpu sse sse2", "x64"),
        ("fpu sse sse2 sse4_1 sse4_2 popcnt", "sse42"),
        ("sse4_2 avx", "sandybridge"),
        ("sse4_2 avx f16c", "ivybridge"),
        ("sse4_2 avx f16c fma", "piledriver"),
        (HASWELL, "haswell"),
        (f"{HASWELL} avx_vnni", "alderlake"),
        (SKYLAKE_X, "skylakex"),
        (f"{SKYLAKE_X} avx512_vnni", "cascadelake"),
        (f"{SKYLAKE_X} avx512_vnni avx512_bf16", "cooperlake"),
        (ICE_LAKE, "icelake"),
        (ZEN4, "zen4"),
        (SAPPHIRE_RAPIDS, "sapphirerapids"),
        (SAPPHIRE_RAPIDS.replace("amx_int8", ""), "zen4"),
        (" ".join(flag for flag in SAPPHIRE_RAPIDS.split() if "avx512" not in flag), "alderlake"),
        (SKYLAKE_X.replace("avx512bw", ""), "haswell"),  # Knights Landing has a part of AVX-512
    ],
)
def test_a_processor_takes_what_it_can_run(flags: str, variant: str) -> None:
    assert best_variant(flags.split()) == variant


def test_which_variants_an_older_processor_has() -> None:
    older = {name for name in VARIANTS if not needs_avx512(name)}
    assert older == {"x64", "sse42", "sandybridge", "ivybridge", "piledriver", "haswell", "alderlake"}


def test_flags_are_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: vnmi\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert flags_here(cpuinfo) == {"fpu", "avx2"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd\n")
    with pytest.raises(ScriptError, match="x86-64"):
        flags_here(cpuinfo)


HOME = Path("/tmp/a folder/environment")


def maps(*paths: Path | str) -> set[Path]:
    """What is read out of a memory map with these files in it, each in two segments."""
    lines = ["7ffe-7fff rw-p 00000000 00:00 0    [stack]", "7f00-7f01 rw-p 00000000 00:00 0 "]
    lines += [f"7f0{i}-7f0{i + 1} r-xp 00000000 fe:01 123    {path}" for path in paths for i in (1, 5)]
    return libraries("\n".join(lines))


def test_the_variant_of_a_process() -> None:
    backend = HOME / "lib/pyvelo/native/lib/libggml-cpu-zen4.so"
    gomp = HOME / "lib/pyvelo.libs/libgomp-24e2.so.1.0.0"
    base = HOME / "lib/pyvelo/native/lib/libvelo-ggml-base.so"
    mapped = maps(backend, gomp, base, "/usr/bin/python3.11", "/usr/lib/locale/C.utf8/LC_CTYPE")
    assert mapped == {backend, gomp, base}
    assert loaded_variant(mapped, HOME) == "zen4"

    second = backend.with_name("libggml-cpu-haswell.so")
    for wrong, said in (
        ({gomp}, "none"),
        ({backend, second, gomp}, "haswell"),
        ({backend}, "libgomp"),
        ({backend, gomp, Path("/usr/lib/libgomp.so.1")}, "/usr/lib/libgomp.so.1"),
        ({backend, Path("/usr/lib/libgomp.so.1")}, "from the wheel"),
        ({Path("/elsewhere", backend.name), gomp}, "from the wheel"),
    ):
        with pytest.raises(ScriptError, match=said):
            loaded_variant(wrong, HOME)


def program(folder: Path, text: str) -> Path:
    """A folder of programs: this Python, and a `pyvelo` of that text."""
    programs = folder / "environment" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "pyvelo").write_text(text)
    return programs


def test_what_fails_is_said(tmp_path: Path) -> None:
    programs = program(tmp_path, "import sys; print('no model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ScriptError, match=r"pyvelo run .* failed \(status 3\): no model$"):
        ask(programs, "here", (), "x64")


def test_the_process_that_answers_is_the_one_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"one libggml-cpu-\*, from the wheel: it loaded none"):
        ask(program(tmp_path, "print('so 42.')"), "here", (), "x64")


@pytest.mark.parametrize(
    ("answer", "expected", "said"),
    [("so 42.", "zen4", None), ("so 421.", "zen4", "answered with 42"), ("so 42.", "x64", "took zen4")],
)
def test_answer_and_variant_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: str, said: str | None
) -> None:
    monkeypatch.setattr("scripts.build._wheel_check.loaded_variant", lambda mapped, environment: "zen4")
    programs = program(tmp_path, f"import sys; assert sys.argv[1:3] == ['run', '-p']; print('{answer}')")
    with pytest.raises(ScriptError, match=said) if said else contextlib.nullcontext():
        ask(programs, "here", (), expected)


def test_this_process_maps_its_libraries() -> None:
    import pyvelo.native

    pyvelo.native.devices()
    names = {path.name for path in libraries(Path("/proc/self/maps").read_text())}
    assert {"libvelo.so", "libvelo-ggml-base.so", "_velo.abi3.so"} <= names


def test_compilers_are_hidden(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    programs = tmp_path / "programs"
    for folder in (elsewhere, programs):
        folder.mkdir()
        program = folder / ("gcc" if folder == elsewhere else "pyvelo")
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    base = {"PATH": str(elsewhere), "CC": "gcc", "PYTHONPATH": "/x", "LD_PRELOAD": "y.so", "HOME": "/home/me"}
    environment = without_compilers(programs, base)
    assert environment == {"PATH": str(programs), "HOME": "/home/me"}
    assert shutil.which("gcc", path=base["PATH"])
    assert not any(shutil.which(name, path=environment["PATH"]) for name in COMPILERS)
    assert shutil.which("pyvelo", path=environment["PATH"])


@pytest.mark.parametrize(
    ("platforms", "machine", "oldest"),
    [
        ("manylinux_2_34_x86_64", "x86_64", (2, 34)),
        ("manylinux2014_x86_64.manylinux_2_17_x86_64", "x86_64", (2, 17)),
        ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", "x86_64", (2, 27)),
        ("manylinux_2_35_aarch64", "aarch64", (2, 35)),
    ],
)
def test_the_platform_of_a_name(platforms: str, machine: str, oldest: tuple[int, int]) -> None:
    assert platform(Path(f"pyvelo-0.1.0-cp310-abi3-{platforms}.whl")) == (machine, oldest)


def test_a_wheel_for_new_systems_alone_is_refused() -> None:
    check_glibc((2, 34))
    with pytest.raises(ScriptError, match=r"needs glibc 2\.35, newer than 2\.34"):
        check_glibc((2, 35))


@pytest.mark.parametrize(
    "tag",
    ["cp310-abi3-linux_x86_64", "cp311-cp311-manylinux_2_34_x86_64", "cp310-abi3-manylinux_2_34_armv7l"],
)
def test_a_name_that_does_not_travel(tag: str) -> None:
    with pytest.raises(ScriptError, match="manylinux"):
        platform(Path(f"pyvelo-0.1.0-{tag}.whl"))


LIBRARIES = [f"libggml-cpu-{name}.so" for name in VARIANTS] + [
    "libvelo-ggml-base.so",
    "libgomp.txt",  # its licence
    "libvelo-ggml.so",
    "libvelo.so",
]


def wheel(folder: Path, names: Iterable[str]) -> Path:
    path = folder / "pyvelo.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(f"pyvelo/native/lib/{name}", b"")
    return path


def test_contents(tmp_path: Path) -> None:
    gomp = "libgomp-24e2.so.1.0.0"
    check_contents(wheel(tmp_path, [*LIBRARIES, gomp]))
    for names, said in (
        (LIBRARIES, "OpenMP libraries: none"),
        ([*LIBRARIES, gomp, "libgomp-e985.so.1.0.0"], "libgomp-e985"),
        ([*LIBRARIES[1:], gomp], "x64"),
        ([*LIBRARIES, gomp, "libggml-cpu-armv9.so"], "armv9"),
        ([*LIBRARIES, gomp, "libvelo-lab.so"], "development"),
        ([*LIBRARIES, gomp, "libvelo-ggml-cpu.so"], "development"),
    ):
        with pytest.raises(ScriptError, match=said):
            check_contents(wheel(tmp_path, names))


def test_contents_for_arm(tmp_path: Path) -> None:
    names = [f"libggml-cpu-{name}.so" for name in _wheel_arm.VARIANTS]
    check_contents(wheel(tmp_path, names), "aarch64")
    check_contents(wheel(tmp_path, [*names, "libggml-cpu-armv9.2_1.so"]), "aarch64")
    for wrong, said in (
        (names[1:], "armv8.0_1"),
        ([*names, "libggml-cpu-zen4.so"], "zen4"),
        ([*names, "libgomp-24e2.so"], "libgomp-24e2"),  # the cross compiler's
    ):
        with pytest.raises(ScriptError, match=said):
            check_contents(wheel(tmp_path, wrong), "aarch64")


def emulator(folder: Path, text: str) -> tuple[str, ...]:
    """A program that stands for qemu and prints this."""
    path = folder / "emulator"
    path.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    path.chmod(0o755)
    return (str(path), "-cpu", "max")


@pytest.mark.parametrize(
    ("answer", "variants", "said"),
    [
        ("so 42.", ["armv8.2_2"], None),
        ("so 41.", ["armv8.2_2"], "answered with 42"),
        ("so 42.", [], "it loaded none"),
        ("so 42.", ["armv8.2_2", "armv8.6_1"], "it loaded armv8"),
    ],
)
def test_an_emulated_processor_is_judged(
    tmp_path: Path, answer: str, variants: list[str], said: str | None
) -> None:
    lines = [f"7f01-7f02 r-xp 00000000 fe:01 123    /site/libggml-cpu-{name}.so" for name in variants]
    command = emulator(tmp_path, "\n".join([answer, *lines]))
    with pytest.raises(ScriptError, match=said) if said else contextlib.nullcontext():
        assert _wheel_arm.ask(command, tmp_path / "python", tmp_path / "site") == variants[0]


def test_one_file_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="holds 0"):
        only(tmp_path, "*.whl")
    path = wheel(tmp_path, [])
    assert only(tmp_path, "*.whl") == path
    (tmp_path / "another.whl").touch()
    with pytest.raises(ScriptError, match="holds 2"):
        only(tmp_path, "*.whl")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scripts.build import wheels

    monkeypatch.setattr(sys, "argv", ["wheels.py", "--only-check", str(tmp_path / "no.whl")])
    with pytest.raises(ScriptError, match="no wheel"):
        wheels.main()
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ScriptError, match="pip install build auditwheel"):
        wheels.main()
