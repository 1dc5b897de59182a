"""llama.cpp's log in Python's: levels, threads, and the end of the process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvelo.errors import ModelError
from pyvelo.native import Model, set_log

LOGGER = logging.getLogger("pyvelo.llama")


@pytest.fixture(autouse=True)
def _as_at_the_start() -> Iterator[None]:
    yield
    LOGGER.setLevel(logging.CRITICAL)
    set_log(None)


def works(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
def test_levels(tiny_model: Path, tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    LOGGER.setLevel(level)
    Model(tiny_model).close()
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError):
        Model(tmp_path / "bad.gguf")
    seen = {record.levelname for record in caplog.records}
    order = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    assert seen <= set(order[order.index(level) :])
    assert ("DEBUG" in seen, "INFO" in seen) == (level == "DEBUG", level in ("DEBUG", "INFO"))
    assert ("ERROR" in seen) == (level != "CRITICAL")
    assert {record.name for record in caplog.records} <= {"pyvelo.llama"}
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_a_callback_takes_the_place_of_the_logger(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    LOGGER.setLevel("INFO")
    lines: list[str] = []
    set_log(lambda level, line: lines.append(line), "info")
    Model(tiny_model).close()
    assert lines
    assert not caplog.records
    set_log(None)
    n = len(lines)
    Model(tiny_model).close()
    assert (len(lines), bool(caplog.records)) == (n, True)


def test_a_line_is_printed_by_nothing_but_handlers(tmp_path: Path) -> None:
    """Python prints warnings for which there is no handler: not these, whose error is raised."""
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    code = (
        "import logging, sys; from pyvelo.native import Model\n"
        "logging.getLogger('pyvelo.llama').setLevel('DEBUG')\n"
        "try: Model(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__)"
    )
    assert works(code, tmp_path / "bad.gguf") == "ModelError\n"


def test_a_level_that_was_set_before_the_import(tiny_model: Path) -> None:
    code = (
        "import logging, sys; logging.basicConfig(); logging.getLogger('pyvelo.llama').setLevel('INFO')\n"
        "from pyvelo.native import Model; Model(sys.argv[1]).close()"
    )
    assert "INFO:pyvelo.llama:" in works(code, tiny_model)


def test_a_handler_that_loads_a_model_or_raises(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A handler's own calls give no lines; what a filter raises is printed, and no call fails."""

    class Handler(logging.Handler):
        n = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.n += 1
            if self.n == 3:
                Model(tiny_model, vocab_only=True).close()

    def refuse(record: logging.LogRecord) -> bool:
        raise LookupError(record.getMessage())

    handler = Handler()
    LOGGER.addHandler(handler)
    LOGGER.setLevel("INFO")
    try:
        Model(tiny_model).close()
        assert handler.n > 3
        LOGGER.addFilter(refuse)
        Model(tiny_model).close()
        assert "LookupError" in capfd.readouterr().err
    finally:
        LOGGER.removeFilter(refuse)
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.CRITICAL)


def test_many_threads_and_changes_of_the_level(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    over, errors = threading.Event(), []

    def load() -> None:
        try:
            while not over.is_set():
                Model(tiny_model, vocab_only=True).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(60):
        LOGGER.setLevel(("DEBUG", "CRITICAL", "INFO")[number % 3])
        set_log(None if number % 2 else (lambda level, line: None), "debug")
        caplog.clear()
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_threads_that_log_when_the_process_ends(tiny_model: Path, seconds: float) -> None:
    """Daemons load on while the interpreter ends: nothing is said then, and nothing crashes or hangs."""
    code = """
import atexit, logging, sys, threading, time
over = False
class Handler(logging.Handler):
    def emit(self, record):
        if over:
            print("late", flush=True)
        time.sleep(0.0005)
def end():
    global over
    over = True
atexit.register(end)  # runs after what the import below registers
from pyvelo.errors import Cancelled, ClosedError
from pyvelo.native import Model
log = logging.getLogger("pyvelo.llama")
log.addHandler(Handler()); log.setLevel("DEBUG"); log.propagate = False
begun = threading.Barrier(4)
def load():
    begun.wait()
    try:
        while True:
            Model(sys.argv[1], vocab_only=True).close()
    except Exception as error:
        assert isinstance(error, (Cancelled, ClosedError)), error
for _ in range(3):
    threading.Thread(target=load, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[2]))
"""
    for _ in range(3):
        assert works(code, tiny_model, seconds) == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_a_process_that_logs(tiny_model: Path) -> None:
    code = """
import logging, os, sys, threading, time, warnings
warnings.simplefilter("ignore")
from pyvelo.native import Model
log = logging.getLogger("pyvelo.llama")
class Handler(logging.Handler):
    def emit(self, record):
        time.sleep(0.0005)
log.addHandler(Handler()); log.setLevel("DEBUG"); log.propagate = False
over = threading.Event()
def load():
    while not over.is_set():
        Model(sys.argv[1], vocab_only=True).close()
threads = [threading.Thread(target=load) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(5):
    time.sleep(0.02)
    start, child = time.monotonic(), os.fork()
    if not child:
        Model(sys.argv[1], vocab_only=True).close()
        log.setLevel("CRITICAL")
        Model(sys.argv[1], vocab_only=True).close()  # waits for no thread of the other process
        os._exit(0 if time.monotonic() - start < 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
over.set()
for thread in threads: thread.join()
print("done")
"""
    assert works(code, tiny_model) == "done\n"
