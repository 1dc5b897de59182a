"""Python commands in processes of their own, forked from one process that has imported the package.

Such a command has its own environment, folder, streams and exit, but starts in hundredths of a second. It
differs from a new Python in four things. Its modules are imported already, except huggingface-hub, which
reads its variables then. It ignores Python's own variables, except PYTHONUNBUFFERED and the encoding of
PYTHONIOENCODING. Its engines have one thread by default. At its end the modules are not torn down.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyvelo

PYTHON = sys.executable
LIMIT = 120.0  # seconds
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = dict(os.environ)
PRELOADED = (
    *("pyvelo.cli.app", "pyvelo.cli.bench", "pyvelo.cli.chat_loop", "pyvelo.cli.embed", "pyvelo.cli.info"),
    *("pyvelo.cli.report", "pyvelo.cli.run", "pyvelo.cli.simulate", "pyvelo.cli.models", "pyvelo.cli.talker"),
    *("pyvelo.chat.sandbox", "pyvelo.llm", "numpy.random"),
    *("rich._emoji_codes", "rich.console", "rich.progress", "rich.table"),
)
OPTIONAL = (
    *("filelock", "gguf", "httpx", "httpx2", "llguidance", "prompt_toolkit", "tqdm.auto", "yaml"),
    *("anyio.streams.tls", "anyio.to_thread", "configparser", "h11", "httpcore", "httpcore2", "truststore"),
)
_HEAD = struct.Struct("!II")
_REPLY = struct.Struct("!i")


@dataclass(frozen=True)
class _Request:
    command: list[str]  # without the interpreter
    environment: dict[str, str]
    folder: str
    streams: tuple[bool, bool, bool]  # which of 0, 1 and 2 are open
    own_session: bool


def heed_signals() -> None:
    """Take the signals that a caller may ignore: before a command is executed, as `preexec_fn`.

    A job in the background is born with Ctrl+C ignored, and one of nohup with SIGHUP.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Fork:
    """Running command."""

    def __init__(self, server: _Server, command: Sequence[str], pid: int) -> None:
        self.args, self.pid = command, pid
        self._server = server
        self.returncode: int | None = None

    def wait(self, timeout: float = LIMIT) -> int:
        """Return the exit code, or minus the number of the signal that ended the command."""
        if self.returncode is None:
            self.returncode = self._server.result(self, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str],
    streams: Sequence[int | IO[Any] | None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    start_new_session: bool = False,
) -> Fork:
    """Start `[PYTHON, "-m", MODULE, ...]`, `[PYTHON, "-c", CODE, ...]` or `[PYTHON, FILE, ...]`.

    `streams` are standard input, output and error; None is a closed one. One command runs at a time.
    """
    assert command[0] == PYTHON
    files = [stream if stream is None or isinstance(stream, int) else stream.fileno() for stream in streams]
    stdin, stdout, stderr = (file is not None for file in files)
    request = _Request(
        [os.fsdecode(word) for word in command[1:]],
        dict(os.environ if env is None else env),
        os.fspath(cwd or os.getcwd()),
        (stdin, stdout, stderr),
        start_new_session,
    )
    return _server().start(command, request, [file for file in files if file is not None])


def run(
    command: Sequence[str],
    *,
    input: bytes | str = b"",
    stdout: IO[Any] | None = None,
    text: bool = False,
    check: bool = False,
    timeout: float = LIMIT,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end as `subprocess.run` does with `capture_output`."""
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(input.encode() if isinstance(input, str) else input)
        given.seek(0)
        code = start(command, (given, stdout or out, err), env=env, cwd=cwd).wait(timeout)
        shown, errors = _content(out, text), _content(err, text)
    if check and code:
        raise subprocess.CalledProcessError(code, command, shown, errors)
    return subprocess.CompletedProcess(command, code, shown, errors)


def _content(file: IO[bytes], text: bool) -> bytes | str:
    file.seek(0)
    data = file.read()
    return data.decode() if text else data


class _Server:
    """Client side of the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [PYTHON, __file__, str(theirs.fileno())]
        # not the environment of the test that happens to be the first
        folders = os.pathsep.join([os.fspath(Path(pyvelo.__file__).parents[1]), os.fspath(ROOT)])
        environment = {**ENVIRONMENT, "PYTHONPATH": folders}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        self._last: Fork | None = None
        atexit.register(self._close)

    def start(self, command: Sequence[str], request: _Request, files: list[int]) -> Fork:
        """Start a command; first end the one before it, if its test has failed and left it."""
        if self._last is not None and self._last.returncode is None:
            self._last.kill()
            self._last.wait()
        self._last = Fork(self, command, self._ask(request, files))
        return self._last

    def _ask(self, request: _Request, files: list[int]) -> int:
        body = pickle.dumps(request.__dict__)
        socket.send_fds(self._socket, [_HEAD.pack(len(body), len(files))], files)
        self._socket.sendall(body)
        return self._reply()

    def result(self, fork: Fork, timeout: float) -> int:
        self._socket.settimeout(timeout)
        try:
            return self._reply()
        except TimeoutError:
            os.kill(fork.pid, signal.SIGKILL)
            self._socket.settimeout(None)
            fork.returncode = self._reply()
            raise subprocess.TimeoutExpired(list(fork.args), timeout) from None
        finally:
            self._socket.settimeout(None)

    def _reply(self) -> int:
        number: int = _REPLY.unpack(_exactly(self._socket, _REPLY.size))[0]
        return number

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError("the other end has closed")
        data += piece
    return data


# ---- the process that forks ----


def _serve(connection: socket.socket) -> _Request | None:
    """Fork for each request; return it in the new process, and None at the end."""
    from pyvelo.memory.cores import Cores

    for name in PRELOADED:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _parse_a_command()
    # tests run beside each other: threads that share a core spin for most of their time
    importlib.import_module("pyvelo.memory.cores").find_cores = lambda: Cores(64, 1, 1, None)
    gc.collect()
    gc.freeze()
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [folder for folder in sys.path if folder not in folders]
    while True:
        head, files, _, _ = socket.recv_fds(connection, _HEAD.size, 3)
        if not head:
            return None
        request = _Request(**pickle.loads(_exactly(connection, _HEAD.unpack(head)[0])))
        pid = os.fork()
        if pid == 0:
            connection.close()
            given = request.environment.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:] = [*filter(None, given), *own]
            _become(request, files)
            return request
        for file in files:
            os.close(file)
        connection.sendall(_REPLY.pack(pid))
        status = os.waitpid(pid, 0)[1]
        connection.sendall(_REPLY.pack(os.waitstatus_to_exitcode(status)))


def _parse_a_command() -> None:
    """Let typer import what it imports with the first command."""
    from pyvelo.cli.app import execute

    with contextlib.redirect_stderr(io.StringIO()):
        execute(["report", "/no/such/trace"])


def _become(request: _Request, files: list[int]) -> None:
    """Take the environment, folder and streams of a request."""
    if request.own_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    for number, is_open in enumerate(request.streams):
        if is_open:
            os.dup2(files[0], number)
            os.close(files.pop(0))
        else:
            os.close(number)
        name = ("stdin", "stdout", "stderr")[number]
        stream = _stream(number, request.environment) if is_open else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, environment: Mapping[str, str]) -> io.TextIOWrapper:
    """Return a standard stream as Python opens it."""
    encoding = environment.get("PYTHONIOENCODING", "").partition(":")[0] or "utf-8"
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    buffering = 0 if unbuffered and number else -1
    raw: Any = open(number, "wb" if number else "rb", buffering=buffering, closefd=False)  # noqa: SIM115
    errors = "backslashreplace" if number == 2 else "strict"
    lines = not unbuffered and (number == 2 or raw.isatty())
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=lines, write_through=unbuffered)


def _execute(command: list[str]) -> None:
    """Run a command as Python does that gets these words."""
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def _status(command: list[str]) -> int:
    """Run a command; return its exit code. Other endings than an ordinary one are Python's."""
    try:
        _execute(command)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _end(status: int) -> None:
    """End as Python does, but leave the modules: to tear them down copies every page of the process.

    Returns if a stream cannot be flushed, which Python then reports.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return
    sys.modules.pop("__main__", None)
    gc.collect()  # objects of the command
    ctypes.PyDLL(None).exit(status)  # C's, with the destructors of libraries


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        status = _status(request.command)
        _end(status)
        sys.exit(status)
