"""scripts/check/style.py: the words and openings that the house style replaces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts._common import ROOT
from scripts.check._style_rules import RULES, Rule
from scripts.check.style import CHECKED, check
from tests import forks

PYTHON = '''"""Tokens of a request."""


def take(whoever: int) -> int:
    """Return the blocks of whoever waits."""
    # of a preempted request, what
    # gives way
    raise ValueError("nothing is promised here")
'''


def findings(path: str, source: str) -> list[tuple[int, str]]:
    """Return the line and the words of each finding."""
    return [(finding.line, finding.words) for finding in check(path, source)]


def test_each_kind_of_text_in_python_is_checked() -> None:
    found = [(4, "whoever"), (5, "whoever"), (7, "gives way"), (8, "promised")]
    assert findings("pyvelo/kv/pool.py", PYTHON) == found


def test_the_strings_of_tests_and_data_are_not_checked() -> None:
    assert (8, "promised") not in findings("tests/kv/test_pool.py", PYTHON)
    assert (8, "promised") not in findings("scripts/demo/_about.py", PYTHON)


@pytest.mark.parametrize("path", ["native/api/pool.cpp", "native/ops/cuda/gpu.cuh"])
def test_comments_and_messages_of_c_are_checked(path: str) -> None:
    source = (
        "// Blocks that nobody\n// holds.\nint n = 1'000; // whoever waits\n"
        '/* the thread\n * is asleep */\nconst char * url = "a//b"; fail("who asks");\n'
        '#include "who knows.h"\n'
    )
    found = [(1, "nobody"), (3, "whoever"), (5, "asleep"), (6, "who")]
    assert findings(path, source) == found


@pytest.mark.parametrize(
    "path", ["native/CMakeLists.txt", "native/cmake/Cuda.cmake", "pyproject.toml", ".ci/run"]
)
def test_comments_after_a_hash_are_checked(path: str) -> None:
    source = 'set(who 1) # whoever asks\n# nobody\n# waits\nname = "a#who"\n'
    assert findings(path, source) == [(1, "whoever"), (2, "nobody")]


def test_the_header_of_a_patch_is_checked() -> None:
    source = "Reason: so that\nnobody waits.\n\ndiff --git a/who b/who\n+ who\n"
    assert findings("vendor/patches/0001-a.patch", source) == [(2, "nobody")]


def test_pages_are_checked_without_code_and_quotations() -> None:
    page = (
        "# Blocks\n\nA block is free. Of a full one nothing is\nread.\n\n```python\n# whoever asks\n```\n\n"
        '`nobody()` and "who wrote this?" are code. The sequence\ngives\nway.\n\n| Of all | who |\n'
    )
    assert findings("docs/GUIDE.md", page) == [(3, "Of a"), (12, "gives way"), (14, "Of all"), (14, "who")]


def test_a_finding_names_file_line_words_and_what_to_write() -> None:
    (finding,) = check("docs/CHAT.md", "Text.\n\nThe block is kept.\n")
    assert str(finding) == "docs/CHAT.md:3: block is kept → cached block"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("Where a table is full, it grows.", "The folder where the model lies."),
        ("Returns None where there is none.", "Return None if there is none."),
        ("The engine stops, where nothing waits.", "The table says where the blocks lie."),
        ("A request rests.", "The rest is free."),
        ("The branch is longer.", "The commit is on a branch of git."),
        ("Longer than that of vLLM.", "Longer than vLLM's, of that I am sure."),
        ("The block is there.", "Then there is a block. Is there one?"),
        ("It stops, for there is none.", "It stops for a moment, for all sequences."),
        ("Sequences who wait.", "Users who wait."),
        ("Fast for those who wait.", "Those tokens are cached."),
    ],
)
def test_a_rule_leaves_other_uses_of_its_words(words: str, right: str) -> None:
    assert findings("docs/GUIDE.md", words + "\n")
    assert findings("docs/GUIDE.md", right + "\n") == []


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("pyvelo/a.py", '"""What runs."""', "What"),
        ("pyvelo/a.py", 'class A:\n    """Holds blocks."""', "Holds"),
        ("pyvelo/a.py", 'def a():\n    """The blocks."""', "The"),
        ("pyvelo/a.py", 'def a():\n    """Blocks of a table."""', "Blocks"),
        ("scripts/a.py", 'def a():\n    """Returns blocks."""', "Returns"),
        ("scripts/a.py", 'class A:\n    def a(self):\n        """`x` as text."""', "`x"),
    ],
)
def test_a_docstring_begins_with_what_its_kind_needs(path: str, source: str, words: str) -> None:
    assert [one.words for one in check(path, source)] == [words]


@pytest.mark.parametrize(
    "source",
    [
        '"""Blocks of a table."""\n\n\nclass A:\n    """Pool of blocks."""',
        'def a():\n    """Return the blocks."""',
        'def a():\n    """Pass the blocks on."""',
        'def _a():\n    """Blocks, for this file alone."""',
        'class A:\n    @property\n    def a(self):\n        """Blocks of a table."""',
        "def a():\n    return 1",
    ],
)
def test_right_openings_pass(source: str) -> None:
    assert check("pyvelo/a.py", source) == []


def test_names_are_read_as_words() -> None:
    source = "class EngineDriver:\n    def test_a_request_gives_way(self, allowance): ...\n"
    assert findings("tests/a.py", source) == [(1, "Driver"), (2, "allowance"), (2, "gives way")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.words)
def test_each_rule_says_what_to_write(rule: Rule) -> None:
    assert rule.write


def test_the_listed_folders_exist_and_the_first_rules_hold() -> None:
    """`.ci/run` checks all of them."""
    assert [path for path in CHECKED if not (ROOT / path).exists()] == []
    paths = [str(ROOT / path) for path in ("scripts/check", "docs/MEMORY.md", "native/CMakeLists.txt")]
    done = forks.run([forks.PYTHON, str(ROOT / "scripts/check/style.py"), *paths], text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_findings_are_printed_and_counted(tmp_path: Path) -> None:
    """In a copy of the scripts, whose root is another one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "native").mkdir()
    (tmp_path / "native/a.h").write_text("// Blocks that nobody holds.\n")
    command = [forks.PYTHON, str(tmp_path / "scripts/check/style.py"), str(tmp_path / "native")]
    done = forks.run(command, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (1, "1 findings\n")
    assert done.stdout.startswith("native/a.h:1: nobody → ")


def test_a_path_outside_the_checkout_is_refused() -> None:
    done = forks.run([forks.PYTHON, str(ROOT / "scripts/check/style.py"), "/"], text=True)
    assert done.returncode == 1
    assert "give files and folders of the checkout" in done.stderr
