"""`pyvelo rm` removes a model, and nothing that another one needs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from pyvelo.cli.completion import cached_names, model_names
from pyvelo.cli.models import remove_model

from .conftest import Shell
from .server import Hub

pytest.importorskip("huggingface_hub")


def cached(shell: Shell) -> list[str]:
    return [model["name"] for model in json.loads(shell.run("list", "--json")[1])["models"]]


def disk(shell: Shell) -> int:
    return sum(p.stat().st_size for p in shell.home.rglob("*") if p.is_file() and not p.is_symlink())


def test_the_only_model_of_a_repository(shell: Shell) -> None:
    path = Path(shell.run("pull", "org/one")[1].strip())
    size = path.stat().st_size
    shell.run("pull", "org/choice:Q8_0")
    code, out, err = shell.run("rm", "org/one", "--yes", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["name"], report["repo"], report["bytes"]) == ("org/one:Q8_0", "org/one", size)
    assert report["files"] == [str(path)]
    assert not path.exists()
    assert cached(shell) == ["org/choice:Q8_0"]
    assert [path.parent.name for path in shell.home.rglob("models--org--one")] in ([], [".locks"])


def test_one_of_several_quantizations(shell: Shell, hub: Hub, tiny_model: Path) -> None:
    paths = {tag: Path(shell.run("pull", f"org/choice:{tag}")[1].strip()) for tag in ("Q4_K_M", "Q8_0")}
    before = disk(shell)
    code, out, err = shell.run("rm", "org/choice:q4_k_m", "-y")
    assert (code, err) == (0, "")
    assert out.startswith("removed org/choice:Q4_K_M, ")
    assert before - disk(shell) >= tiny_model.stat().st_size
    assert cached(shell) == ["org/choice:Q8_0"]
    assert paths["Q8_0"].read_bytes() == tiny_model.read_bytes()
    shell.run("pull", "org/choice:Q4_K_M")  # comes anew
    assert [file for file, _ in hub.downloads()].count("tiny-Q4_K_M.gguf") == 2


def test_a_content_that_another_file_has_stays(shell: Shell, hub: Hub, tiny_model: Path) -> None:
    hub.repos["org/choice"].files["tiny-Q4_K_M.gguf"] = tiny_model.read_bytes()  # as of tiny-Q8_0
    paths = {tag: Path(shell.run("pull", f"org/choice:{tag}")[1].strip()) for tag in ("Q4_K_M", "Q8_0")}
    code, out, _ = shell.run("rm", "org/choice:Q4_K_M", "--yes", "--json")
    assert (code, json.loads(out)["bytes"]) == (0, 0)
    assert not os.path.lexists(paths["Q4_K_M"])
    assert paths["Q8_0"].read_bytes() == tiny_model.read_bytes()


@pytest.mark.parametrize("linked", ["snapshot", "blob"])
@pytest.mark.parametrize("tags", [("Q4_K_M",), ("Q4_K_M", "Q8_0")])
def test_a_file_outside_the_cache_stays(
    shell: Shell, tmp_path: Path, tags: tuple[str, ...], linked: str
) -> None:
    link, *_ = [Path(shell.run("pull", f"org/choice:{tag}")[1].strip()) for tag in tags]
    content, mine = link.read_bytes(), tmp_path / "mine.gguf"
    mine.write_bytes(content)
    place = link if linked == "snapshot" else link.resolve()
    place.unlink()
    place.symlink_to(mine)
    code, out, err = shell.run("rm", "org/choice:Q4_K_M", "--yes", "--json")
    assert (code, err, json.loads(out)["bytes"]) == (0, "", 0)
    assert mine.read_bytes() == content
    assert not os.path.lexists(link)
    assert cached(shell) == [f"org/choice:{tag}" for tag in tags[1:]]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ("org/none", "--yes"),
            1,
            "org/none is not in the cache, which has org/choice:Q8_0, org/choice:Q4_K_M",
        ),
        (("org/choice", "--yes"), 1, "2 models go by that name; the cache has "),
        (("org/choice:Q5_0", "--yes"), 1, "org/choice:Q5_0 is not in the cache"),
        (("../etc", "--yes"), 1, "is no name on the hub"),
        (("/tmp/model.gguf", "--yes"), 1, "is no name on the hub"),
        (("org/choice:Q8_0",), 2, "give --yes"),
    ],
)
def test_what_is_not_removed(shell: Shell, words: tuple[str, ...], code: int, said: str) -> None:
    for tag in ("Q4_K_M", "Q8_0"):
        shell.run("pull", f"org/choice:{tag}")
    found, out, err = shell.run("rm", *words)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert said in err
    assert cached(shell) == ["org/choice:Q8_0", "org/choice:Q4_K_M"]


def test_a_shell_completes_the_names(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shell.run("pull", "org/one")[1].strip())
    shell.run("pull", "org/choice:Q8_0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(path.parents[3]))
    assert cached_names("org/") == ["org/choice:Q8_0", "org/one:Q8_0"]
    assert cached_names("org/o") == model_names("org/o") == ["org/one:Q8_0"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/x")
    assert cached_names("") == []


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("Yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_the_user_is_asked(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, left: int
) -> None:
    path = Path(shell.run("pull", "org/one")[1].strip())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(path.parents[3]))
    stdin = io.StringIO(typed)
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)
    assert remove_model("org/one", ask=True, as_json=False) == left
    said = capsys.readouterr()
    assert said.err.startswith("remove org/one:Q8_0, ")
    assert path.exists() is bool(left)
    assert len(cached(shell)) == left
