"""Check the English of docstrings, comments, messages, names and pages.

    python scripts/check/style.py
    python scripts/check/style.py pyvelo/engine docs/GUIDE.md

Without a path it checks all files of CHECKED. Each finding is a line: file, line number, the words, what to
write. The status is 1 if there is one. _style_rules.py has the words.
Code, text in backticks or double quotes, and the strings of tests and of DATA are not checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.check._style_rules import NO_VERB, QUESTION, RULES, THIRD_PERSON, Rule

CHECKED = [
    ".ci",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "docs",
    "examples",
    "native",
    "pyproject.toml",
    "pyvelo",
    "scripts",
    "tests",
]
"""Files and folders that a run without a path checks: the whole checkout but vendor."""

DATA = [
    "scripts/check/_style_rules.py",
    *(f"scripts/demo/_{name}.py" for name in ("about", "dialogues", "texts")),
    "scripts/demo/record_chat.py",
    "scripts/models/_vocab.py",
]
"""Files with strings that are data: RULES, words of vocabularies, and messages to models."""

KINDS = {".py", ".md", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".inc", ".cmake", ".toml", ".patch"}
NAMES = {"CMakeLists.txt", "run"}
OUTPUTS = {"build", "dist"}
"""Suffixes and names of files with prose, and folders of the checkout without our own."""


@dataclass
class Text:
    """Prose of a file. Code and quotations in it are blanks of the same length."""

    line: int
    text: str


@dataclass(frozen=True, order=True)
class Finding:
    """Words that break a rule, and what to write instead."""

    path: str
    line: int
    words: str
    write: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words} → {self.write}"


def without_code(text: str) -> str:
    """Return the text with code and double quotations blanked."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "~", match[0])

    text = re.sub(r"^( *)```.*?^\1```", blank, text, flags=re.S | re.M)
    text = re.sub(r"``.*?``|`[^`]*`", blank, text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)|<?https?://\S+", blank, text)
    return re.sub(r'"[^"\n]*(\n[^"\n]*)?"|“[^”]*”', blank, text)


def joined_comments(comments: list[tuple[int, bool, str]]) -> Iterator[Text]:
    """Yield comments; lines of one comment become one text.

    Args:
        comments: line, whether the comment is alone in its line, and the text without its sign.
    """
    now: Text | None = None
    last = 0
    for line, alone, text in comments:
        if now and alone and line == last + 1:
            now.text += "\n" + text
        else:
            if now:
                yield now
            now = Text(line, text)
        last = line
    if now:
        yield now


def python_comments(source: str) -> Iterator[Text]:
    """Yield the comments of Python code."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found.append((token.start[0], alone, token.string.lstrip("#: ")))
    return joined_comments(found)


@lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    """Return the syntax nodes of Python code."""
    return list(ast.walk(ast.parse(source)))


def python_strings(nodes: list[ast.AST], messages: bool) -> Iterator[Text]:
    """Yield docstrings and the docstrings of attributes; with `messages`, every string of several words."""
    docs = {id(node.value): node.value for node in nodes if isinstance(node, ast.Expr)}
    parts: set[int] = set()
    for node in nodes:
        if id(node) in parts or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        if isinstance(node, ast.JoinedStr):
            parts.update(id(child) for child in ast.walk(node))
            pieces = [str(part.value) if isinstance(part, ast.Constant) else "~" for part in node.values]
            text = "".join(pieces)
        elif isinstance(node.value, str):
            text = node.value
        else:
            continue
        if id(node) in docs or (messages and re.search(r"\w \w", text)):
            yield Text(node.lineno, text)


def python_names(nodes: list[ast.AST]) -> Iterator[Text]:
    """Yield the names of functions, classes and their arguments as words."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, line = node.name, node.lineno
        elif isinstance(node, ast.arg):
            name, line = node.arg, node.lineno
        else:
            continue
        yield Text(line, re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", name).strip())


def openings(nodes: list[ast.AST], path: str) -> Iterator[Finding]:
    """Yield docstrings that begin with the wrong kind of word."""
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        words = (ast.get_docstring(node) or "").split()
        if not words:
            continue
        first = re.sub(r"\W+$", "", words[0])
        line = node.body[0].lineno
        if isinstance(node, ast.Module):
            if QUESTION.fullmatch(first):
                yield Finding(path, line, first, "begin with what the module contains, or a command's verb")
        elif isinstance(node, ast.ClassDef):
            if QUESTION.fullmatch(first) or THIRD_PERSON.fullmatch(first):
                yield Finding(path, line, first, "begin with a noun phrase: what the class is")
        elif is_public(node, path) and not is_imperative(first):
            yield Finding(path, line, first, "begin with an imperative verb: Return ..., Raise ...")


def is_public(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> bool:
    """Return whether the function has a public name, is no property, and is no test."""
    is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
    return not node.name.startswith("_") and not is_property and not path.startswith("tests/")


def is_imperative(word: str) -> bool:
    """Return whether a docstring can begin with the word: no plural, no third person, no determiner."""
    if not re.fullmatch(r"[A-Z][a-z-]+", word) or NO_VERB.fullmatch(word):
        return False
    return word.endswith("ss") or not word.endswith("s")


C_TOKEN = re.compile(
    r'(?P<raw>R"(?P<mark>\w*)\(.*?\)(?P=mark)")|(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)'
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\")|'(?:\\[^']+|[^'\\])'",
    re.S,
)


def c_texts(source: str) -> Iterator[Text]:
    """Yield the comments and the messages of C, C++ and CUDA code."""
    comments, begin, line = [], 0, 1
    for token in C_TOKEN.finditer(source):
        line, begin = line + source.count("\n", begin, token.start()), token.start()
        before = source[source.rfind("\n", 0, begin) + 1 : begin].strip()
        if token["line"]:
            comments.append((line, not before, token["line"].lstrip("/ ")))
        elif token["block"]:
            yield Text(line, re.sub(r"(?m)^\s*\*+/?|^/\*+|\*/", "", token["block"]))
        elif token["string"] and re.search(r"\w \w", token["string"]) and not before.startswith("#"):
            yield Text(line, token["string"][1:-1])
    yield from joined_comments(comments)


def texts(path: str, source: str) -> Iterator[Text]:
    """Yield the prose of a file, by the kind that its name says."""
    if path.endswith(".md"):
        yield Text(1, source)
    elif path.endswith(".patch"):
        yield Text(1, source.partition("diff --git")[0])
    elif path.endswith((".cmake", ".toml", *NAMES)):
        lines = enumerate(re.findall("(.*)\n", source), 1)
        found = [(number, re.match(r"(.*?)(?<!\S)#+ (.*)", line)) for number, line in lines]
        yield from joined_comments(
            [(number, not match[1].strip(), match[2]) for number, match in found if match]
        )
    elif path.endswith(".py"):
        nodes = nodes_of(source)
        messages = not path.startswith("tests/") and path not in DATA
        yield from python_comments(source)
        yield from python_strings(nodes, messages)
        yield from python_names(nodes)
    else:
        yield from c_texts(source)


def flattened(text: str) -> tuple[str, list[int]]:
    """Return the text and the old position of each character; a paragraph, item or row is a line."""
    pieces: list[str] = []
    positions: list[int] = []
    for match in re.finditer(r"(\n\s*(?=[\n#|>]|[-*] |\w+: ))|\s+|\S+", text):
        pieces.append("\n" if match[1] else " " if match[0].isspace() else match[0])
        positions += range(match.start(), match.start() + len(pieces[-1]))
    return "".join(pieces), positions


ANY = re.compile("|".join(rule.words for rule in RULES), re.M)


def broken(rule: Rule, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a rule in a flat text."""
    for match in re.finditer(rule.words, text, re.M):
        if not rule.allowed or not re.search(
            rule.allowed, text[max(0, match.start() - 60) : match.end() + 60]
        ):
            yield match


def check(path: str, source: str) -> list[Finding]:
    """Return the findings of a file, in the order of its lines.

    Args:
        path: from the root of the checkout: some rules hold in some folders only.
    """
    rules = [rule for rule in RULES if re.match(rule.within, path)]
    found = set(openings(nodes_of(source), path)) if path.endswith(".py") else set()
    for each in texts(path, source):
        text, positions = flattened(without_code(each.text))
        for rule in rules if ANY.search(text) else ():
            for match in broken(rule, text):
                line = each.line + each.text.count("\n", 0, positions[match.end() - 1])
                found.add(Finding(path, line, match[0].strip(" -#|>*"), rule.write))
    return sorted(found)


def hidden(parts: tuple[str, ...]) -> bool:
    """Return whether a path of the checkout is a build's output, or in a hidden folder other than .ci."""
    return parts[0] in OUTPUTS or any(part[0] == "." and part != ".ci" for part in parts)


def files(paths: list[Path]) -> list[Path]:
    """Return the files with prose among the paths and in their folders, without outputs of builds."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            parts = file.relative_to(ROOT).parts
            if (file.suffix in KINDS or file.name in NAMES) and file.is_file() and not hidden(parts):
                found.append(file)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: all of CHECKED)")
    paths = [path.resolve() for path in parser.parse_args().paths] or [ROOT / path for path in CHECKED]
    if missing := [str(path) for path in paths if not path.exists() or not path.is_relative_to(ROOT)]:
        raise ScriptError(f"{missing[0]} is not in {ROOT}: give files and folders of the checkout")
    found = []
    for file in files(paths):
        found += check(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
