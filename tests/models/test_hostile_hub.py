"""A hostile hub: no answer writes a file outside the cache, or raises anything but VeloError."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.errors import ModelError
from pyvelo.models.hub_download import check_etag, read_listing

from .conftest import Shell
from .server import Hub, Repo, describe, git_sha1

pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef" * 2 + "01234567"


def files_below(folder: Path) -> set[str]:
    """Return all files and links, without the library's notes on the machine."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file())
        and path.name not in ("CACHEDIR.TAG", ".check_for_update_done")
    }


@pytest.mark.parametrize(
    "etag",
    [
        "../../../outside",
        "{}/outside",
        "d41d8cd98f00b204-2",
        "",
        "A" * 64,
        "a" * 63,
        "a" * 40 + "\t",
    ],
)
def test_an_etag_that_is_no_digest_is_refused_before_anything_is_written(
    shell: Shell, hub: Hub, tmp_path: Path, etag: str
) -> None:
    before = files_below(tmp_path)
    hub.etags = [etag.format(tmp_path)] * 9
    code, out, err = shell.run("pull", "org/one")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "ETag" in err
    assert "which is no digest" in err
    assert files_below(tmp_path) == before
    assert hub.downloads() == []


def test_the_etag_that_was_checked_is_the_one_that_names_the_file(
    shell: Shell, hub: Hub, tmp_path: Path, tiny_model: Path
) -> None:
    data = tiny_model.read_bytes()
    hub.etags = [git_sha1(data), *["../../../outside"] * 9]
    before = files_below(tmp_path)
    code, out, err = shell.run("pull", "org/one")
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == data
    new = files_below(tmp_path) - before
    assert all(name.startswith("hf home/") for name in new)
    assert Path(out.strip()).resolve().name == git_sha1(data)


@pytest.mark.parametrize("digest", ["git", "sha256"])
def test_content_is_verified_by_either_digest(shell: Shell, hub: Hub, tiny_model: Path, digest: str) -> None:
    hub.honest = False
    if digest == "git":
        hub.etags = [git_sha1(tiny_model.read_bytes())] * 9
    code, out, err = shell.run("pull", "org/one")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "tiny-Q8_0.gguf is damaged and was removed" in err
    assert shell.parts() == []


def test_another_commit_than_the_one_that_was_asked_for_is_refused(
    shell: Shell, hub: Hub, tmp_path: Path
) -> None:
    before = files_below(tmp_path)
    hub.commit = "../../../../outside"
    code, out, err = shell.run("pull", "org/one")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "changed on the hub" in err
    assert files_below(tmp_path) == before


def test_what_is_too_large_for_http_comes_over_xet_into_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, file_download

    from pyvelo.models import hub_download

    def xet_get(*, incomplete_path: Path, **_: object) -> None:
        incomplete_path.write_bytes(b"x" * 11)

    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 10)
    monkeypatch.setattr(file_download, "xet_get", xet_get)
    facts = SimpleNamespace(size=11, xet_file_data=object())
    part = tmp_path / "part"
    hub_download._download("http://127.0.0.1:9/x", {}, part, facts, "x.gguf")
    hub_download._check(part, 11, git_sha1(b"x" * 11), "x.gguf")
    with pytest.raises(ModelError, match="is damaged and was removed"):
        hub_download._check(part, 11, git_sha1(b"y" * 11), "x.gguf")
    assert not part.exists()


# ---- the JSON ----

WRONG: list[Any] = [
    *(None, True, -1, 1.5, 10**30, float("nan"), "", "x", [], {}, [[["x"]]], {"rfilename": 7}, ["a"]),
    *(
        "../x.gguf",
        "/x.gguf",
        "a//b.gguf",
        "a/../b.gguf",
        "a\\b.gguf",
        "a\0.gguf",
        "a\x1b[2J.gguf",
        "\ud800.gguf",
    ),
]
PLACES: list[tuple[str | int, ...]] = [
    (), ("sha",), ("siblings",), ("siblings", 1), ("siblings", 1, "rfilename"), ("siblings", 1, "size"),
    ("id",), ("tags",),
]  # fmt: skip
MISSING = object()


def changed(answer: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return the answer with another value at a place, or without the place."""
    if not place:
        return None if value is MISSING else value
    copy = json.loads(json.dumps(answer))
    inner = copy
    for step in place[:-1]:
        inner = inner[step]
    if value is MISSING:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return copy


def wrong_answers(answer: Any) -> Iterator[bytes]:
    for place in PLACES:
        for value in [*WRONG, MISSING]:
            yield json.dumps(changed(answer, place, value)).encode()
    yield from (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"sha":' * 100_000, b"1" * 10_000)


PULL_OFTEN = """
import sys
from pyvelo.errors import VeloError
from pyvelo.models.hub import pull
for _ in range({n}):
    try:
        pull("org/one")
        print("pulled")
    except VeloError as error:
        print(type(error).__name__, "".join(map(str, [len(str(error)) < 1000, str(error).isprintable()])))
"""


def test_json_of_any_types_is_pulled_or_refused(shell: Shell, hub: Hub, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    hub.answers = list(wrong_answers(describe("org/one", hub.repos["org/one"])))
    n = len(hub.answers)
    lines = shell.python(PULL_OFTEN.format(n=n)).splitlines()
    assert len(lines) == n
    assert set(lines) == {"pulled", "ModelError TrueTrue", "ModelChoiceError TrueTrue"}
    assert lines.count("ModelError TrueTrue") > 90
    assert lines[0] == "ModelError TrueTrue"
    assert all(name.startswith("hf home/") for name in files_below(tmp_path) - before)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["rfilename", "size"]), inner)
    ),
)


@given(JSON)
def test_any_json_is_a_listing_or_a_model_error(answer: Any) -> None:
    for asked in (answer, {"sha": COMMIT, "siblings": answer}, {"sha": COMMIT, "siblings": [answer]}):
        try:
            commit, sizes = read_listing(asked, "org/one")
        except ModelError:
            continue
        assert commit == COMMIT
        assert all(type(size) is int and size >= 0 for size in sizes.values())


@given(st.lists(st.sampled_from(["a", "..", ".", "", "/", "\\", "\0", "\x9b", " ", "é"])).map("".join))
def test_a_name_stays_below_its_folder(name: str) -> None:
    answer = {"sha": COMMIT, "siblings": [{"rfilename": name + "x.gguf"}]}
    try:
        _, sizes = read_listing(answer, "org/one")
    except ModelError:
        return
    (kept,) = sizes
    folder = Path("/cache/snapshots") / COMMIT
    assert kept == name + "x.gguf"
    assert folder in (folder / kept).parents
    assert not {"..", "."} & set(kept.split("/"))
    assert kept.isprintable()


@given(st.text(alphabet="0123456789abcdefg./", max_size=70) | st.sampled_from(["f" * 40, "0" * 64]))
def test_only_digests_are_etags(etag: str) -> None:
    if len(etag) in (40, 64) and set(etag) <= set("0123456789abcdef"):
        assert check_etag("x.gguf", etag) == etag
    else:
        with pytest.raises(ModelError, match="no digest"):
            check_etag("x.gguf", etag)


# ---- many files ----


def test_a_hundred_thousand_models_are_named_in_linear_time() -> None:
    """A quadratic algorithm takes minutes."""
    code = (
        "from pyvelo.models.hub import choice_names\n"
        "from pyvelo.models.gguf_names import find_models\n"
        "models = find_models({f'model-{n}.gguf': n for n in range(100_000)})\n"
        "print(len({choice['name'] for choice in choice_names(models)}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "100000\n"


def test_a_choice_among_many_is_a_short_message(shell: Shell, hub: Hub) -> None:
    hub.repos["org/many"] = Repo({f"model-{n}.gguf": b"x" for n in range(500)})
    code, out, err = shell.run("pull", "org/many")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "and 480 more" in err
    assert len(err) < 1000
    choices = json.loads(shell.run("pull", "org/many", "--json")[1])["choices"]
    assert len(choices) == 500


def test_a_cache_that_is_no_folder_is_an_error(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (["list"], ["run", "org/one", "-p", "x"]):
        code, out, err = shell.run(*command, HF_HUB_CACHE=str(tmp_path / "file"))
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "cannot read the cache" in err
