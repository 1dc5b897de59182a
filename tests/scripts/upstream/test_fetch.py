"""scripts/upstream/fetch.py against small archives and folders."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.upstream._pin import Pin, read_pin, sha256_file
from scripts.upstream.fetch import STAMP, download, locate, unpack

from .conftest import PYPROJECT, TOP, TREE, Repository, sdist_members, write_sdist, write_tree


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("text", ["{0} --hash=sha256:{1}\n", "# words\n{0} \\\n    --hash=sha256:{1}\n"])
def test_reads_the_pin(tmp_path: Path, text: str) -> None:
    (tmp_path / "upstream.txt").write_text(text.format("llama-cpp-python==0.3.36", "a" * 64))
    assert read_pin(tmp_path) == Pin("llama-cpp-python", "0.3.36", "a" * 64)


@pytest.mark.parametrize(
    "text", ["", "name==1.0\n", "name==1.0 --hash=sha256:abc\n", "name>=1 --hash=sha256:" + "a" * 64]
)
def test_refuses_a_pin_without_version_or_hash(tmp_path: Path, text: str) -> None:
    (tmp_path / "upstream.txt").write_text(text)
    with pytest.raises(ScriptError, match=r"name==version --hash"):
        read_pin(tmp_path)


def test_unpacks_only_llama(repository: Repository, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    unpack(repository.archive, target, "identity")
    assert files_of(target) == {*TREE, STAMP}
    assert (target / "src/llama.cpp").read_text() == TREE["src/llama.cpp"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no executable bit")
def test_unpacking_keeps_the_executable_bit(repository: Repository, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    unpack(repository.archive, target, "identity")
    assert (target / "run.sh").stat().st_mode & 0o111
    assert not (target / "CMakeLists.txt").stat().st_mode & 0o111


@pytest.mark.parametrize("name", ["../../../evil", "src/../../evil", "..\\..\\evil", "C:/evil"])
def test_refuses_a_member_that_leaves_the_folder(tmp_path: Path, name: str) -> None:
    archive = write_sdist(
        tmp_path / "bad.tar.gz", sdist_members() | {f"{TOP}/vendor/llama.cpp/{name}": "evil"}
    )
    target = tmp_path / "deep/er/target"
    target.mkdir(parents=True)
    with pytest.raises(ScriptError, match="outside its folder"):
        unpack(archive, target, "identity")
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_refuses_links_and_devices(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo(f"{TOP}/vendor/llama.cpp/src/link")
    link.type = kind
    link.linkname = "/etc/passwd"
    archive = write_sdist(tmp_path / "bad.tar.gz", sdist_members(), [link])
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ScriptError, match="neither a file nor a folder"):
        unpack(archive, target, "identity")


def test_refuses_an_archive_that_is_cut_off(repository: Repository, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar.gz"
    content = repository.archive.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ScriptError, match="obtain it again"):
        unpack(broken, target, "identity")


def test_an_archive_of_ones_own_is_unpacked_once(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYVELO_UPSTREAM", str(repository.archive))
    first = locate(repository.pin)
    assert files_of(first.path) == {*TREE, STAMP}
    before = (first.path / STAMP).stat().st_mtime_ns

    # nothing is needed any more, neither the archive nor a network
    monkeypatch.delenv("PYVELO_UPSTREAM")
    repository.archive.unlink()
    assert locate(repository.pin) == first
    assert (first.path / STAMP).stat().st_mtime_ns == before


def test_an_archive_with_another_hash_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_sdist(tmp_path / "other.tar.gz", sdist_members() | {f"{TOP}/more": "more"})
    monkeypatch.setenv("PYVELO_UPSTREAM", str(other))
    with pytest.raises(ScriptError, match=f"{sha256_file(other)}.*{repository.pin.sha256}"):
        locate(repository.pin)


def test_a_half_of_a_tree_is_made_again(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYVELO_UPSTREAM", str(repository.archive))
    tree = locate(repository.pin).path
    (tree / STAMP).unlink()
    (tree / "src/llama.cpp").unlink()
    assert files_of(locate(repository.pin).path) == {*TREE, STAMP}


def test_another_pin_of_the_same_version_is_fetched_anew(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYVELO_UPSTREAM", str(repository.archive))
    locate(repository.pin)
    other = write_sdist(
        tmp_path / "other.tar.gz", sdist_members() | {f"{TOP}/vendor/llama.cpp/new.txt": "new"}
    )
    monkeypatch.setenv("PYVELO_UPSTREAM", str(other))
    tree = locate(Pin(repository.pin.name, repository.pin.version, sha256_file(other)))
    assert (tree.path / "new.txt").read_text() == "new"


@pytest.mark.parametrize("inside", [".", "vendor/llama.cpp"])
def test_a_folder_of_ones_own_is_used_as_it_is(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    folder = write_tree(tmp_path / "mine" / inside)
    monkeypatch.setenv("PYVELO_UPSTREAM", str(tmp_path / "mine"))
    tree = locate(repository.pin)
    assert tree.path == folder
    assert files_of(folder) == set(TREE)

    # what is made of it is made again when it changes, and not when a build folder does
    (folder / "build").mkdir()
    (folder / "build" / "object.o").write_text("object")
    assert locate(repository.pin) == tree
    (folder / "src/other.cpp").write_text("int changed_now;\n")
    assert locate(repository.pin).identity != tree.identity


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_llama_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    folder = tmp_path / "empty"
    if made:
        folder.mkdir()
    monkeypatch.setenv("PYVELO_UPSTREAM", str(folder))
    with pytest.raises(ScriptError, match="holds no llama.cpp" if made else "does not exist"):
        locate(repository.pin)


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_downloads_by_name_without_building(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    assert files_of(locate(repository.pin).path) == {*TREE, STAMP}


def test_a_version_without_a_known_hash_is_downloaded_too(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    target = tmp_path / "downloads"
    target.mkdir()
    archive = download(Pin(repository.pin.name, "1.0", ""), target)
    assert sha256_file(archive) == repository.pin.sha256


def test_what_a_build_requires_may_be_a_wheel(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    monkeypatch.setattr(
        "scripts.upstream.fetch.importlib.util.find_spec", lambda name: None
    )  # no build backend here
    info = "small_tool-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "small_tool-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-tool\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    project = PYPROJECT.replace("requires = []", 'requires = ["small-tool"]')
    write_sdist(repository.archive, sdist_members() | {f"{TOP}/pyproject.toml": project})
    target = tmp_path / "downloads"
    target.mkdir()
    assert download(Pin(repository.pin.name, "1.0", ""), target).name == repository.archive.name


def test_a_download_with_another_hash_is_refused(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, tmp_path)
    with pytest.raises(ScriptError, match=f"does not have the sha256 {'0' * 64}"):
        locate(Pin(repository.pin.name, "1.0", "0" * 64))


def test_no_network_is_one_sentence_that_says_what_to_do(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = repository.run("upstream/fetch.py")
    assert done.returncode == 1
    assert done.stdout == ""
    sentence = done.stderr.splitlines()[-1]
    assert "could not download llama-cpp-small 1.0" in sentence
    assert "set PYVELO_UPSTREAM" in sentence
    assert "Traceback" not in done.stderr


def test_two_processes_at_once_share_one_tree(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYVELO_UPSTREAM", str(repository.archive))
    command = [sys.executable, str(repository.root / "scripts/upstream/fetch.py")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    paths = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 6
    (path,) = paths
    assert files_of(Path(path)) == {*TREE, STAMP}
    assert not list(Path(path).parent.glob(".making-*"))
