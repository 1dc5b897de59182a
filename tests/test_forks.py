"""A forked command behaves as a command of a new Python."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import forks

REPORT = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ.get("SEEN"), sys.stdin.read())
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty())
print("\\u00e9", file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("kind", ["code", "file", "module"])
def test_a_fork_is_as_a_new_process(kind: str, encoding: str, unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "reporting.py").write_text(REPORT)
    given = {"code": ["-c", REPORT], "file": [str(tmp_path / "reporting.py")], "module": ["-m", "reporting"]}
    command = [forks.PYTHON, *given[kind], "one", "3"]
    settings = {"SEEN": "yes", "PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": unbuffered}
    environment = {**os.environ, **settings}
    forked = forks.run(command, input=b"typed", env=environment, cwd=tmp_path)
    anew = subprocess.run(command, input=b"typed", env=environment, cwd=tmp_path, capture_output=True)
    assert forked.stdout == anew.stdout
    assert (forked.returncode, forked.stderr) == (anew.returncode, anew.stderr)
    assert forked.returncode == 3


ENDING = """
import atexit, threading
class Owner:
    def __del__(self):
        print("dropped")
one, other = Owner(), Owner()
other.me = other
atexit.register(print, "at exit")
go_on = threading.Event()
threading.Thread(target=lambda: (go_on.wait(), print("thread"))).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
go_on.set()
"""


@pytest.mark.parametrize("last", ["", "import sys; sys.exit(3)", "import sys; sys.exit('text')"])
def test_a_fork_ends_as_a_new_process(last: str) -> None:
    """It waits for its threads, runs what is registered, and drops its objects."""
    command = [forks.PYTHON, "-c", ENDING + last]
    forked, anew = forks.run(command), subprocess.run(command, capture_output=True)
    assert forked.stdout == anew.stdout == b"thread\nat exit\ndropped\ndropped\n"
    assert (forked.returncode, forked.stderr) == (anew.returncode, anew.stderr)


def test_closed_streams_are_none(tmp_path: Path) -> None:
    code = "import sys; sys.exit([sys.stdin, sys.stdout, sys.stderr].count(None))"
    assert forks.start([forks.PYTHON, "-c", code], [None, None, None]).wait() == 3
    with open(tmp_path / "out", "wb") as file:
        assert forks.start([forks.PYTHON, "-c", code], [None, file, None]).wait() == 2


def test_a_signal_ends_a_fork() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    done = forks.run([forks.PYTHON, "-c", code])
    assert done.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in done.stderr


def test_a_fork_is_killed_at_its_limit() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run([forks.PYTHON, "-c", "import time; time.sleep(600)"], timeout=0.05)
    assert forks.run([forks.PYTHON, "-c", "print('next')"], text=True).stdout == "next\n"
