"""Functions of the library as a whole: errors, log, devices, generated files."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyvelo
from pyvelo.errors import ConfigError, ModelError
from pyvelo.native import Model, devices, set_log, system_info
from pyvelo.native._ffi import created, ffi, interrupt, lib

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quiet_afterwards() -> Iterator[None]:
    yield
    set_log(None)


def test_generated_files_are_fresh() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/build/ffi.py"), "--check"], check=True)


def test_binaries_do_not_tell_where_they_were_built() -> None:
    folder = Path(pyvelo.__file__).parent / "native"
    built = [path for path in folder.rglob("*") if path.suffix in (".so", ".dylib", ".dll", ".pyd")]
    named = {
        name for path in built for name in re.findall(rb"[\w./+:\\-]*\bggml-?[a-z]*\.c\b", path.read_bytes())
    }
    assert b"llama.cpp/ggml/src/ggml.c" in named  # in messages about a failed check
    assert not [name for name in named if not name.startswith((b"llama.cpp/", b"ggml"))]


def test_the_cpu_is_a_device() -> None:
    (cpu,) = (device for device in devices() if device.name == "CPU")
    assert cpu.kind == "cpu"
    assert cpu.description
    assert 0 < cpu.memory_free <= cpu.memory_total


def test_system_info_names_the_cpu_backend() -> None:
    assert "CPU" in system_info()


def test_every_status_has_a_name() -> None:
    names = {ffi.string(lib.velo_status_name(status)) for status in range(9)}
    assert len(names) == 9
    assert ffi.string(lib.velo_status_name(99)) == b"unknown status"


def test_quiet_by_default(tiny_model: Path) -> None:
    code = f"from pyvelo.native import Model; Model({str(tiny_model)!r}).close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.usefixtures("quiet_afterwards")
def test_log_comes_line_by_line_with_its_level(tiny_model: Path) -> None:
    lines: list[tuple[str, str]] = []
    set_log(lambda level, line: lines.append((level, line)), "info")
    Model(tiny_model).close()
    assert {level for level, _ in lines} <= {"info", "warning"}
    assert any("tiny" in line or "llama" in line for _, line in lines)
    assert not any("\n" in line or line == "" for _, line in lines)

    n = len(lines)
    set_log(None)
    Model(tiny_model).close()
    assert len(lines) == n


@pytest.mark.usefixtures("quiet_afterwards")
def test_log_of_errors_only(tiny_model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    set_log(lambda level, line: lines.append(level), "error")
    Model(tiny_model).close()
    assert lines == []
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError):
        Model(tmp_path / "bad.gguf")
    assert set(lines) == {"error"}


@pytest.mark.usefixtures("quiet_afterwards")
def test_an_exception_of_a_log_callback_is_printed_and_the_call_goes_on(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(level: str, line: str) -> None:
        raise LookupError("no such line")

    set_log(refuse, "info")
    Model(tiny_model).close()
    assert "LookupError: no such line" in capfd.readouterr().err
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError) as caught:
        Model(tmp_path / "bad.gguf")
    assert caught.value.__cause__ is None


@pytest.mark.usefixtures("quiet_afterwards")
def test_an_interrupt_in_a_log_callback_ends_the_call_of_its_thread_once(tiny_model: Path) -> None:
    def interrupted(level: str, line: str) -> None:
        set_log(None)
        raise KeyboardInterrupt

    set_log(interrupted, "info")
    with pytest.raises(KeyboardInterrupt):
        Model(tiny_model)
    Model(tiny_model).close()


def test_an_object_whose_creation_is_interrupted_is_freed() -> None:
    out, freed = ffi.new("velo_context **", ffi.cast("velo_context *", 64)), []
    interrupt.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        created(0, out, freed.append)
    gc.collect()
    assert freed == [out[0]]
    handle = created(0, out, freed.append)
    assert (handle, len(freed)) == (out[0], 1)


def test_an_unknown_log_level_raises() -> None:
    with pytest.raises(ConfigError, match="no level 'loud'"):
        set_log(None, "loud")  # type: ignore[arg-type]
    assert lib.velo_log_set(ffi.NULL, ffi.NULL, 0) == lib.VELO_INVALID
    assert lib.velo_log_set(ffi.NULL, ffi.NULL, 5) == lib.VELO_INVALID
