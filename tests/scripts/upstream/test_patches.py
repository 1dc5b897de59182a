"""scripts/upstream/patches.py against a small series; and the rules of the real one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.upstream import patches
from scripts.upstream._pin import VENDOR
from scripts.upstream._series import (
    HEADER_FIELDS,
    MAX_CHANGED_LINES,
    MAX_PATCHES,
    is_applied,
    parse_patch,
    read_series,
)

from .conftest import HEADER, LLAMA, TOP, TREE, Repository, make_patch, sdist_members, write_sdist, write_tree


@pytest.fixture(autouse=True)
def _archive(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYVELO_UPSTREAM", str(repository.archive))


def snapshot(tree: Path) -> dict[str, bytes]:
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def git(tree: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.run(
        ["git", *settings, *arguments], cwd=tree, check=True, capture_output=True, text=True
    ).stdout


# the real series


def test_the_real_series_keeps_the_rules() -> None:
    series = read_series(VENDOR)
    assert 0 < len(series) <= MAX_PATCHES
    assert 0 < sum(patch.changed_lines for patch in series) <= MAX_CHANGED_LINES
    for patch in series:
        assert patch.missing_fields == []
        assert patch.files
        assert patch.text == (VENDOR / "patches" / patch.name).read_text()


# apply


def test_apply_makes_a_patched_copy_and_leaves_the_pristine_tree(repository: Repository) -> None:
    copy = patches.apply(None, repository.vendor)
    assert "line_10; int hook;" in (copy / "src/llama.cpp").read_text()
    assert (copy / "src/other.cpp").read_text() == "int other;\nint hook;\n"
    pristine = copy.parent.parent / "llama.cpp"
    assert (pristine / "src/llama.cpp").read_text() == LLAMA


def test_apply_is_a_no_op_the_second_time(repository: Repository) -> None:
    copy = patches.apply(None, repository.vendor)
    (copy / "witness").touch()
    assert patches.apply(None, repository.vendor) == copy
    assert (copy / "witness").exists()


def test_apply_mends_a_copy_that_was_changed(repository: Repository) -> None:
    copy = patches.apply(None, repository.vendor)
    (copy / "src/other.cpp").write_text("int other;\n")
    assert patches.apply(None, repository.vendor) == copy
    assert (copy / "src/other.cpp").read_text() == "int other;\nint hook;\n"


def test_another_series_gets_another_copy(repository: Repository) -> None:
    before = patches.apply(None, repository.vendor)
    repository.set_series(only=make_patch("src/other.cpp", TREE["src/other.cpp"], "int another;\n"))
    after = patches.apply(None, repository.vendor)
    assert after != before
    assert (after / "src/other.cpp").read_text() == "int another;\n"
    assert (after / "src/llama.cpp").read_text() == LLAMA


def test_a_folder_of_the_user_is_copied(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = write_tree(tmp_path / "mine")
    git(mine, "init", "--quiet")
    (mine / "build").mkdir()
    (mine / "build" / "object.o").write_text("object")
    before = snapshot(mine)
    monkeypatch.setenv("PYVELO_UPSTREAM", str(mine))
    copy = patches.apply(None, repository.vendor)
    assert "hook" in (copy / "src/llama.cpp").read_text()
    assert snapshot(mine) == before
    assert not (copy / ".git").exists()
    assert not (copy / "build").exists()


def test_apply_in_place_skips_what_is_applied(repository: Repository, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    series = read_series(repository.vendor)
    subprocess.run(["git", "apply", "-"], cwd=tree, input=series[1].text, text=True, check=True)
    patches.apply(tree, repository.vendor)
    patched = snapshot(tree)
    assert all(is_applied(tree, patch) for patch in series)
    patches.apply(tree, repository.vendor)
    assert snapshot(tree) == patched


def test_a_tree_that_drifted_is_refused_by_the_patch_s_name(repository: Repository, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    (tree / "src/other.cpp").write_text("int something_else;\n")
    with pytest.raises(ScriptError, match=r"0002-second.patch does not apply"):
        patches.apply(tree, repository.vendor)
    assert (tree / "src/other.cpp").read_text() == "int something_else;\n"


def test_apply_refuses_a_folder_without_llama(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"holds no llama.cpp"):
        patches.apply(tmp_path, repository.vendor)


def test_a_repository_around_the_tree_does_not_matter(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    tree = write_tree(outer / "deep" / "tree")
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outer))
    patches.apply(tree, repository.vendor)
    assert "hook" in (tree / "src/llama.cpp").read_text()


def test_no_git_is_one_sentence(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    done = repository.run("upstream/patches.py", "apply")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "patches.py: git is needed to apply the patches to llama.cpp: install it and see that it is in PATH\n"
    )


def test_only_the_path_is_on_stdout(repository: Repository, tmp_path: Path) -> None:
    done = repository.run("upstream/patches.py", "apply")
    assert done.returncode == 0
    assert (Path(done.stdout.strip()) / "src/llama.cpp").is_file()
    tree = write_tree(tmp_path / "tree")
    done = repository.run("upstream/patches.py", "apply", str(tree))
    assert (done.stdout, done.stderr) == (
        f"{tree}\n",
        "applied 0001-first.patch\napplied 0002-second.patch\n",
    )


# check


def test_check_counts(repository: Repository) -> None:
    assert patches.check(repository.vendor) == (
        f"2 patches of {MAX_PATCHES}, 3 changed lines of {MAX_CHANGED_LINES}, 2 files of upstream: all apply"
    )


@pytest.mark.parametrize("field", HEADER_FIELDS)
@pytest.mark.parametrize("value", ["", f"{'{field}'}:\n"])
def test_check_refuses_a_header_without_a_field(repository: Repository, field: str, value: str) -> None:
    header = "".join(
        value.format(field=field) if line.startswith(f"{field}:") else line
        for line in HEADER.splitlines(keepends=True)
    )
    repository.set_series(first=make_patch("src/other.cpp", "int other;\n", "int more;\n", header))
    with pytest.raises(ScriptError, match=rf"0001-first.patch has no {field}:"):
        patches.check(repository.vendor)


def test_check_refuses_too_many_lines(repository: Repository) -> None:
    more = "int other;\n" + "int more;\n" * MAX_CHANGED_LINES
    repository.set_series(first=make_patch("src/other.cpp", "int other;\n", more))
    assert f"{MAX_CHANGED_LINES} changed lines of" in patches.check(repository.vendor)
    repository.set_series(first=make_patch("src/other.cpp", "int other;\n", more + "int last;\n"))
    with pytest.raises(ScriptError, match=f"{MAX_CHANGED_LINES + 1} changed lines are over the budget"):
        patches.check(repository.vendor)


def test_check_refuses_too_many_patches(repository: Repository) -> None:
    series = {}
    text = ""
    for number in range(MAX_PATCHES + 1):
        series[f"p{number}"] = make_patch(f"new{number}.cpp", text, "int x;\n")
    repository.set_series(**series)
    with pytest.raises(ScriptError, match=f"{MAX_PATCHES + 1} patches are over the budget of {MAX_PATCHES}"):
        patches.check(repository.vendor)


def test_check_refuses_a_patch_that_does_not_apply(repository: Repository) -> None:
    repository.set_series(first=make_patch("src/other.cpp", "int nobody;\n", "int hook;\n"))
    with pytest.raises(ScriptError, match=r"0001-first.patch does not apply"):
        patches.check(repository.vendor)


def test_check_refuses_patches_that_stand_on_one_another(repository: Repository) -> None:
    repository.set_series(
        first=make_patch("src/other.cpp", "int other;\n", "int hook;\n"),
        second=make_patch("src/other.cpp", "int hook;\n", "int hooked;\n"),
    )
    with pytest.raises(ScriptError, match=r"0001-first.patch .*join the two"):
        patches.check(repository.vendor)


def test_series_and_folder_must_agree(repository: Repository) -> None:
    stray = repository.vendor / "patches" / "0009-stray.patch"
    stray.write_text(make_patch("src/other.cpp", "int other;\n", "int hook;\n"))
    with pytest.raises(ScriptError, match=r"0009-stray.patch is not in"):
        patches.check(repository.vendor)
    stray.unlink()
    (repository.vendor / "patches" / "0001-first.patch").unlink()
    with pytest.raises(ScriptError, match=r"names 0001-first.patch, which"):
        patches.check(repository.vendor)


def test_changed_lines_are_counted_in_hunks() -> None:
    diff = (
        "diff --git a/x.lua b/x.lua\n--- a/x.lua\n+++ b/x.lua\n"
        "@@ -1,3 +1,3 @@ title\n context\n--- a removed comment\n+++ an added one\n last\n"
        "@@ -9 +9,2 @@\n-old\n+new\n+newer\n\\ No newline at end of file\n"
    )
    assert parse_patch("x.patch", f"{HEADER}+ not a change\n\n{diff}").changed_lines == 5


def test_a_patch_without_a_diff_is_refused() -> None:
    with pytest.raises(ScriptError, match="diff --git"):
        parse_patch("x.patch", HEADER)


# edit and refresh


@pytest.fixture
def edited(repository: Repository, tmp_path: Path) -> Path:
    """A tree made by `patches.py edit`."""
    tree = tmp_path / "edited"
    assert repository.run("upstream/patches.py", "edit", str(tree)).returncode == 0
    return tree


def test_edit_and_refresh_change_nothing(repository: Repository, edited: Path) -> None:
    patches.refresh(edited, repository.vendor)
    first = snapshot(repository.vendor)
    patches.refresh(edited, repository.vendor)
    assert snapshot(repository.vendor) == first
    assert (repository.vendor / "series").read_text() == "0001-first.patch\n0002-second.patch\n"
    assert patches.check(repository.vendor).startswith(f"2 patches of {MAX_PATCHES}, 3 changed lines")


def test_an_edited_commit_becomes_the_patch(repository: Repository, edited: Path) -> None:
    (edited / "src/other.cpp").write_text("int other;\nint hook_two;\n")
    git(edited, "commit", "--quiet", "--all", "--amend", "--no-edit")
    patches.refresh(edited, repository.vendor)
    second = (repository.vendor / "patches" / "0002-second.patch").read_text()
    assert second.startswith(HEADER + "\ndiff --git a/src/other.cpp")
    assert "+int hook_two;" in second
    copy = patches.apply(None, repository.vendor)
    assert (copy / "src/other.cpp").read_text() == "int other;\nint hook_two;\n"


def test_a_commit_more_and_a_commit_less(repository: Repository, edited: Path) -> None:
    git(edited, "reset", "--quiet", "--hard", "HEAD~1")
    (edited / "LICENSE").write_text("MIT, patched\n")
    git(edited, "commit", "--quiet", "--all", "-m", f"0003-third.patch\n\n{HEADER}")
    patches.refresh(edited, repository.vendor)
    assert [patch.name for patch in read_series(repository.vendor)] == [
        "0001-first.patch",
        "0003-third.patch",
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (f"a hook\n\n{HEADER}", "is called 'a hook'"),
        ("0003-third.patch\n\nReason: none.", "no Touches: line"),
    ],
)
def test_a_commit_that_is_no_patch_is_refused(
    repository: Repository, edited: Path, message: str, reason: str
) -> None:
    before = snapshot(repository.vendor)
    (edited / "LICENSE").write_text("MIT, patched\n")
    git(edited, "commit", "--quiet", "--all", "-m", message)
    with pytest.raises(ScriptError, match=reason):
        patches.refresh(edited, repository.vendor)
    assert snapshot(repository.vendor) == before


def test_changes_without_a_commit_are_refused(repository: Repository, edited: Path) -> None:
    (edited / "src/other.cpp").write_text("int lost;\n")
    with pytest.raises(ScriptError, match=r"changes without a commit .*src/other.cpp"):
        patches.refresh(edited, repository.vendor)


def test_edit_refuses_a_folder_with_something_in_it(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = repository.run("upstream/patches.py", "edit", str(tmp_path / "full"))
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


# another version of upstream


def pip_finds(monkeypatch: pytest.MonkeyPatch, folder: Path, changes: dict[str, str]) -> None:
    """Has pip find version 1.0, which is what the tests call the other version, with changed files."""
    folder.mkdir()
    members = sdist_members() | {f"{TOP}/vendor/llama.cpp/{name}": text for name, text in changes.items()}
    write_sdist(folder / f"{TOP}.tar.gz", members)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_version_where_everything_applies(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_finds(monkeypatch, tmp_path / "index", {"src/llama.cpp": "// moved down\n" * 5 + LLAMA})
    done = repository.run("upstream/patches.py", "refresh", "--to", "1.0")
    assert done.returncode == 0
    assert done.stdout.startswith("ok    0001-first.patch\nok    0002-second.patch\n0 failures")
    assert "llama-cpp-small==1.0 --hash=sha256:" in done.stdout


def test_a_version_with_failing_hunks(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = LLAMA.replace("line_10;", "line_10; int hook;").replace("line_30;", "line_30; int hook;")
    repository.set_series(
        first=make_patch("src/llama.cpp", LLAMA, both),
        second=make_patch("src/other.cpp", TREE["src/other.cpp"], "int other;\nint hook;\n"),
    )
    pip_finds(monkeypatch, tmp_path / "index", {"src/llama.cpp": LLAMA.replace("line_30;", "renamed;")})
    kept = tmp_path / "kept"
    before = snapshot(repository.vendor)
    done = repository.run("upstream/patches.py", "refresh", "--to", "1.0", str(kept))
    assert done.returncode == 1
    assert done.stdout.startswith(
        "FAILS 0001-first.patch\nok    0002-second.patch\n"
        "  0001-first.patch: src/llama.cpp: hunk 2 (line 28)\n1 failures"
    )
    assert snapshot(repository.vendor) == before

    # the kept tree has what applied, and the rest for mending; it is no series until that is done
    assert "line_10; int hook;" in (kept / "src/llama.cpp").read_text()
    assert (kept / "src/llama.cpp.rej").is_file()
    with pytest.raises(ScriptError, match="changes without a commit"):
        patches.refresh(kept, repository.vendor)


def test_a_version_without_the_file(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.set_series(first=make_patch("src/gone.cpp", "int gone;\n", "int hook;\n"))
    pip_finds(monkeypatch, tmp_path / "index", {})
    done = repository.run("upstream/patches.py", "refresh", "--to", "1.0")
    assert done.returncode == 1
    assert "0001-first.patch: src/gone.cpp: the file is gone" in done.stdout
