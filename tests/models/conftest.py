"""A hub on loopback with a cache of its own, and commands that know both by their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forks
from tests.cli_schema import check

from .server import Hub, Repo, serve


@dataclass(frozen=True)
class Shell:
    """Runner of pyvelo commands, each in its own process, with its own home folder."""

    hub: Hub
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return {
            **kept,
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pyvelo.cli", *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # a job in the background is born with Ctrl+C ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error of a command; check the output of --json."""
        command = [forks.PYTHON, "-m", "pyvelo.cli", *arguments]
        done = forks.run(command, env={**self.environment, **environment}, text=True)
        if "--json" in arguments and done.stdout:
            check(arguments[0], done.stdout)
        return done.returncode, done.stdout, done.stderr

    def python(self, code: str, **environment: str) -> str:
        """Return the output of a program."""
        command = [forks.PYTHON, "-c", code]
        done = forks.run(command, env={**self.environment, **environment}, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def parts(self) -> list[Path]:
        """Return the files of interrupted downloads."""
        return sorted(self.home.rglob("*.incomplete"))


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    """Return a hub with two repositories: one with a model and its projector, one with several models."""
    model = tiny_model.read_bytes()
    one = Repo({"README.md": b"one", "tiny-Q8_0.gguf": model, "mmproj-tiny-F16.gguf": b"no text model"})
    choice = Repo(
        {"tiny-Q8_0.gguf": model, "tiny-Q4_K_M.gguf": model + bytes(32), "tiny-UD-Q2_K_XL.gguf": b"x"}
    )
    with serve(Hub({"org/one": one, "org/choice": choice})) as served:
        yield served


@pytest.fixture
def shell(hub: Hub, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path / "hf home")
