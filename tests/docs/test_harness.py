"""Tests of `snippets`: it finds a block that is wrong in any way."""

from __future__ import annotations

from pathlib import Path

import pytest

from .snippets import blocks_of, run_page, same


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "PAGE.md"


def no_command(arguments: list[str], typed: str) -> tuple[int, str]:
    raise AssertionError(f"nobody asked for {arguments}")


def fence(kind: str, code: str) -> str:
    return f"Words.\n\n```{kind}\n{code}\n```\n"


def test_a_block_without_marks_runs(page: Path) -> None:
    page.write_text(fence("python", "x = 1") + fence("python", "raise KeyError(x + 1)"))
    with pytest.raises(KeyError, match="2") as failed:
        run_page(page, no_command)
    last = failed.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 9), "the line of the page"


def test_blocks_share_names_and_print_what_is_shown(page: Path) -> None:
    page.write_text(
        fence("python", "x = 1") + fence("python", "print(x)\nprint('y')") + "\n```text\n1\ny\n```\n"
    )
    assert run_page(page, no_command) == 2
    page.write_text(page.read_text().replace("y\n```", "z\n```"))
    with pytest.raises(AssertionError, match=r"PAGE\.md:9 shows\n1\nz\n"):
        run_page(page, no_command)


def test_words_between_part_a_block_from_its_output(page: Path) -> None:
    page.write_text(fence("python", "print(1)") + fence("text", "a diagram"))
    assert run_page(page, no_command) == 1
    assert [block.shown for block in blocks_of(page)] == [None, None]


def test_theirs_is_compiled_and_does_not_run(page: Path) -> None:
    page.write_text(fence("python theirs", "import nowhere"))
    assert run_page(page, no_command) == 0
    page.write_text(fence("python theirs", "import from"))
    with pytest.raises(SyntaxError, match=r"PAGE\.md:4"):
        run_page(page, no_command)


@pytest.mark.parametrize("kind", ["", "py", "python3", "Python", "sh", "python ours"])
def test_what_does_not_say_what_it_is_is_refused(page: Path, kind: str) -> None:
    page.write_text(fence(kind, "x"))
    with pytest.raises(ValueError, match=r"PAGE\.md:3: "):
        blocks_of(page)


def test_broken_json_is_found(page: Path) -> None:
    page.write_text(fence("json", '{"a": 1,}'))
    with pytest.raises(ValueError, match=r"Expecting|Illegal"):
        run_page(page, no_command)


def test_commands_get_what_is_typed_and_write_what_is_shown(page: Path) -> None:
    asked: list[tuple[list[str], str]] = []

    def command(arguments: list[str], typed: str) -> tuple[int, str]:
        asked.append((arguments, typed))
        return 0, "one\ntwo\n"

    page.write_text(
        fence("console", '$ pip install x\n$ pyvelo chat -s "a b"  # so\n> hi\none\n> ho\ntwo\n$ pyvelo x')
    )
    assert run_page(page, command) == 2
    assert asked == [(["chat", "-s", "a b"], "hi\nho\n"), (["x"], "")]
    page.write_text(fence("console", "$ pyvelo x\none\nthree"))
    with pytest.raises(AssertionError, match="three"):
        run_page(page, command)
    page.write_text(fence("console theirs", "$ pyvelo x\none\nthree"))
    assert run_page(page, no_command) == 0


def test_a_command_that_fails_is_found_unless_its_error_is_shown(page: Path) -> None:
    def command(arguments: list[str], typed: str) -> tuple[int, str]:
        return 1, "pyvelo: no\n"

    page.write_text(fence("console", "$ pyvelo x"))
    with pytest.raises(AssertionError, match="pyvelo: no"):
        run_page(page, command)
    page.write_text(fence("console", "$ pyvelo x\npyvelo: no"))
    assert run_page(page, command) == 1


@pytest.mark.parametrize(
    ("printed", "shown", "alike"),
    [
        ("a\nb\n", "a\nb", True),
        ("a  \nb\n\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\nb\nc\n", "a\n...\nc\n", True),
        ("a\nc\n", "a\n...\nc\n", True),
        ("a\nb\nd\n", "a\n...\nc\n", False),
        ("12 of 30 (x)\n", "12 of ... (x)\n", True),
        ("12 of 30 (x)\n", "13 of ... (x)\n", False),
        ("a 1 b\nc\n", "a ... c\n", False),
        ("took 0.52 s, 12.1 per second\n", "took 1.4 s, 9 per second\n", True),
        ("12 sums\n", "13 sums\n", False),
        ("f(x) = 1.5\n", "f(x) = 1x5\n", False),
    ],
)
def test_what_counts_as_the_same(printed: str, shown: str, alike: bool) -> None:
    assert same(printed, shown) is alike
