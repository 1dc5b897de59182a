"""The code of every page runs, and prints the output that the page shows."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from pyvelo.cli.app import execute
from pyvelo.demo import DEMO_MODEL
from scripts.models import lora
from tests.cli.stand_ins import stand_in
from tests.models.conftest import Shell
from tests.models.server import Hub, Repo, serve

from .snippets import Run, run_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# what must run at least, so that none of it is lost
LEAST = {
    "README.md": 5,
    "BATCH.md": 3,
    "GUIDE.md": 14,
    "FROM_LLAMA_CPP_PYTHON.md": 8,
    "FROM_VLLM.md": 8,
    "MEMORY.md": 4,
    "SERVER.md": 6,
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter for the demo model."""
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    pairs = lora.random_pairs(DEMO_MODEL, 4, gain=0.2)
    lora.write_adapter(path, lora.architecture_of(DEMO_MODEL), pairs, type_name="f16")
    return path


ADDRESS = "127.0.0.1:8000"
"""Address of `pyvelo serve` in the pages."""


@pytest.fixture
def places() -> dict[str, str]:
    """Return what the pages' address is while a page runs."""
    return {}


def serve_page(arguments: list[str], places: dict[str, str], servers: ExitStack) -> tuple[int, str]:
    """Start `pyvelo serve` on a free port for the rest of the page; return what it prints."""
    command = [sys.executable, "-m", "pyvelo", *arguments, "--port", "0"]
    server = servers.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    servers.callback(server.terminate)
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"http://(\S+)/v1", line)
    assert found, line
    places[ADDRESS] = found[1]
    return 0, line.replace(found[1], ADDRESS)


@pytest.fixture
def run(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str]
) -> Iterator[Run]:
    """Run `pyvelo` in a folder with the models of the pages, and a hub with the model that they pull."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command line has its own
    Path("model.gguf").symlink_to(DEMO_MODEL)
    Path("docs").mkdir()
    Path("adapter.gguf").symlink_to(adapter)
    repo = Repo({"repo-Q4_K_M.gguf": DEMO_MODEL.read_bytes()})
    with serve(Hub({"org/repo": repo})) as hub, ExitStack() as servers:
        shell = Shell(hub, tmp_path / "hf home")

        def run(arguments: list[str], typed: str) -> tuple[int, str]:
            if arguments[0] in ("pull", "list"):  # whose library looks for its server when it is imported
                code, out, err = shell.run(*arguments)
                return code, err + out
            if arguments[0] == "serve":
                return serve_page(arguments, places, servers)
            if arguments[0] == "info" and not Path(arguments[1]).exists():
                stand_in(Path(arguments[1]))
            return in_process(arguments, typed, monkeypatch)

        yield run


def in_process(arguments: list[str], typed: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return exit code and all output of a command."""
    written = io.StringIO()
    with monkeypatch.context() as patch, redirect_stdout(written), redirect_stderr(written):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code = execute(arguments)
    return code, written.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, run: Run, places: dict[str, str]) -> None:
    assert run_page(page, run, places) >= LEAST.get(page.name, 0)
