"""GBNF means what it means to upstream: at every place of random answers the same tokens are allowed.

Left out is what upstream does wrong: tokens that are not whole characters (it allows bytes that are in no
UTF-8, and refuses parts of characters beside an excluded one), and control tokens (it takes them for text).
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from pyvelo import SamplingParams
from pyvelo.errors import RequestError
from pyvelo.grammar.compiler import GrammarCompiler
from pyvelo.native import Model

ROOT = Path(__file__).resolve().parents[2]
CDEF = """
void * stock_vocab_open(const char *);
void stock_vocab_close(void *);
int32_t stock_grammar_masks(void *, const char *, const int32_t *, int32_t, uint8_t *);
"""


class Both:
    """Upstream's grammars and ours over one vocabulary."""

    def __init__(self, library: Path, path: Path) -> None:
        self._ffi = FFI()
        self._ffi.cdef(CDEF)
        self._lab = self._ffi.dlopen(str(library))
        self._stock = self._lab.stock_vocab_open(str(path).encode())
        self.model = Model(path, vocab_only=True)
        self.compiler = GrammarCompiler(self.model)
        self.text = self.model.all_token_bytes()
        self.drawn = np.array([whole(text) for text in self.text])
        self.compared = self.drawn.copy()
        self.compared[[*self.model.end_tokens]] = True

    def close(self) -> None:
        self._lab.stock_vocab_close(self._stock)
        self.model.close()

    def theirs(self, grammar: str, tokens: list[int]) -> np.ndarray | None:
        """Return bool [n_vocab], the tokens that may follow; None if the grammar is refused."""
        masks = np.zeros((len(tokens) + 1, len(self.text)), np.uint8)
        given = np.array(tokens, np.int32)
        n = self._lab.stock_grammar_masks(
            self._stock, grammar.encode(), self._ffi.from_buffer("int32_t[]", given), len(tokens),
            self._ffi.from_buffer("uint8_t[]", masks),
        )  # fmt: skip
        if n < 0:
            return None
        assert n == len(tokens) + 1, "it allowed each of them"
        return masks[-1].astype(bool)

    def differences(self, matcher: Any, theirs: np.ndarray) -> list[bytes]:
        """Tokens that only one of them allows."""
        ours = bits(matcher.mask(), len(self.text))
        return [self.text[token] for token in np.flatnonzero((ours != theirs) & self.compared)]

    def walk(self, grammar: str, draws: random.Random, n_steps: int) -> int:
        """Follows both for so many tokens at most; the number of masks that were compared."""
        matcher: Any = self.compiler.compile(SamplingParams(grammar=grammar))
        matcher = matcher.copy()
        tokens: list[int] = []
        for step in range(n_steps):
            theirs = self.theirs(grammar, tokens)
            assert theirs is not None
            before = b"".join(self.text[token] for token in tokens)
            assert self.differences(matcher, theirs) == [], (grammar, before)
            allowed = np.flatnonzero(theirs & self.drawn).tolist()
            if not allowed:
                return step + 1
            tokens.append(draws.choice(allowed))
            matcher.accept(tokens[-1])
        return n_steps


def whole(text: bytes) -> bool:
    try:
        return bool(text.decode()) and not text.startswith(b"\0")
    except UnicodeDecodeError:
        return False


def bits(mask: bytes, n: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:n].astype(bool)


@pytest.fixture(scope="module")
def both(tiny_model: Path, patched_library: Path) -> Iterator[Both]:
    made = Both(patched_library, tiny_model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def upstream() -> Path:
    command = [sys.executable, str(ROOT / "scripts/upstream/fetch.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


# ---- random grammars ----

CHARACTERS = [
    *"abcabc",
    "é",
    "日",
    "~",
    "&",
    "-",
    "🙂",
    r"\n",
    r"\"",
    r"\\",
    r"\u00e9",
    r"\x41",
    r"\U0001f642",
]
MEMBERS = [
    "a-c",
    r"\u00e0-\u00ff",
    "~",
    "&&",
    r"\]",
    r"\[",
    r"\-",
    r"\\",
    "a",
    "b",
    "é",
    "日",
    r"\n",
    " ",
]
COUNTS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "{0,1}"]


def literal(draws: random.Random) -> str:
    return '"' + "".join(draws.choices(CHARACTERS, k=draws.randint(1, 3))) + '"'


def item(draws: random.Random, depth: int, names: list[str]) -> str:
    kind = draws.random()
    if kind < 0.25:
        return (
            "[" + draws.choice(["", "", "^"]) + "".join(draws.choices(MEMBERS, k=draws.randint(1, 4))) + "]"
        )
    if kind < 0.3:
        return "."
    if kind < 0.5 and names:
        return draws.choice(names)
    if kind < 0.7 and depth:
        parts = [sequence(draws, depth - 1, names) for _ in range(draws.randint(1, 3))]
        return "(" + draws.choice([" | ", "\n| # or\n "]).join(parts) + ")"
    return literal(draws)


def sequence(draws: random.Random, depth: int, names: list[str]) -> str:
    items = [item(draws, depth, names) + draws.choice(COUNTS) for _ in range(draws.randint(0, 3))]
    return " ".join(items)


def random_grammar(draws: random.Random) -> str:
    """Each alternative begins with a character, since upstream refuses left recursion."""
    names = ["x", "start", "y-1"][: draws.randint(0, 3)]
    lines = []
    for name in ["root", *names]:
        parts = [f"{literal(draws)} {sequence(draws, 2, names)}" for _ in range(draws.randint(1, 3))]
        lines.append(f"{name} ::= {draws.choice(['', '', '| '])}{' | '.join(parts)} # {name}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "seed", [seed if seed < 3 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(8)]
)
def test_random_grammars_allow_the_same_tokens(both: Both, seed: int) -> None:
    draws = random.Random(seed)
    n_masks = n_followed = 0
    for _ in range(60):
        grammar = random_grammar(draws)
        if both.theirs(grammar, []) is None:  # nullable repetitions, which are no trouble here
            both.compiler.compile(SamplingParams(grammar=grammar))
            continue
        n_followed += 1
        n_masks += both.walk(grammar, draws, 8)
    assert n_followed > 20
    assert n_masks > 100


# ---- written by hand ----

GRAMMARS = {
    "code points": r'root ::= "\u00e9ab" | "\U0001F642\x41" | "\xe9"',
    "doubled signs in a class": "root ::= [a~~b] [&&a]{3} [+--]",
    "signs of a class": r"root ::= [\]\[\\^-] [^\]\-] [-a] [a-] [a\-c]",
    "longest is not right": 'root ::= "(" root ")" | "a" "bc" | "ab" "d" | [a-z]+ "!"',
    "a rule named start": 'root ::= start\nstart ::= "x" start | "y"',
    "digits and dashes": 'root ::= 1 a-b\n1 ::= "1"\na-b ::= 1{2} "-"',
    "over lines": 'root ::= # first\n  "a" |\n  ( "b"\n  | "c"\n  ) "d"\r\nother ::= "e"',
    "counts": 'root ::= "ab"{2} "c" {1 , 2} ("d" | "e")+ {2} [f]{0} "g"{,3}'.replace("{,3}", "{0,3}"),
    "the last one counts": 'a ::= "x"\nroot ::= a\na ::= "y"',
    "nothing": 'root ::= "" | "a" ()',
    "never ends": 'root ::= "a" x | "b"\nx ::= "c" x',
    "tail recursion": 'root ::= "[" ws (item ("," ws item)*)? "]"\n'
                      'ws ::= ([ \\n] ws)?\nitem ::= "1" ws | root ws',
    "any character": 'root ::= . .? "日" .*',
    "ranges of all lengths": "root ::= [a-é] [é-日] [日-🙂] [^a-日]",
    "quotes": r'root ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\bn/] | "u" [0-9a-f]{4}))* "\""',
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_easily_misread(both: Both, name: str) -> None:
    draws = random.Random(name)
    assert sum(both.walk(GRAMMARS[name], draws, 12) for _ in range(12)) >= 12


@pytest.mark.parametrize("name", [
    "arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list",
])  # fmt: skip
def test_upstreams_grammars(both: Both, upstream: Path, name: str) -> None:
    grammar = (upstream / "grammars" / f"{name}.gbnf").read_text(encoding="utf-8")
    draws = random.Random(name)
    assert sum(both.walk(grammar, draws, 20) for _ in range(4)) >= 4


@pytest.mark.parametrize("vocab", ["llama-spm", "gpt-2", "deepseek-coder"])
def test_in_other_vocabularies(upstream: Path, patched_library: Path, vocab: str) -> None:
    path = upstream / "models" / f"ggml-vocab-{vocab}.gguf"
    made = Both(patched_library, path)
    try:
        for name in ("longest is not right", "ranges of all lengths", "quotes"):
            assert made.walk(GRAMMARS[name], random.Random(name), 3) >= 1
    finally:
        made.close()


REFUSED = [
    'root = "a"', "root ::= (", 'root ::= "a', "root ::= [a", "root ::= x", 'a ::= "b"', "root ::= *",
    'root ::= "a"{', r'root ::= "\q"', r'root ::= "\x0"', 'root ::= "a" )', 'root ::= "a"\n | "b"',
    'root ::= "a"{2001}', 'root ::= "a"{1,b}', 'root ::= root "x"', 'root ::= a\na ::= root | a "b"',
    "root ::= <[1>", "root ::= <no such token>", "root ::= !", r'root ::= "\u00"', 'root ::= "a"{x}',
]  # fmt: skip


@pytest.mark.parametrize("grammar", REFUSED)
def test_what_upstream_refuses_is_refused(both: Both, grammar: str) -> None:
    assert both.theirs(grammar, []) is None
    with pytest.raises(RequestError, match=r"^grammar: "):
        both.compiler.compile(SamplingParams(grammar=grammar))


# ---- tokens ----


def test_tokens_by_name_and_by_number(both: Both) -> None:
    model = both.model
    word = model.tokenize(" garden", add_special=False)[-1]
    other = model.tokenize(" river", add_special=False)[-1]
    bos = model.vocab.bos
    assert bos is not None
    name = model.token_bytes(bos, special=True).decode()
    for grammar, tokens in {
        f'root ::= <[{word}]> "a"': [word],
        f'root ::= "(" <[{word}]> root? ")"': [*model.tokenize("(", add_special=False)[-1:], word],
        f'root ::= (!<[{word}]>)* <[{word}]> "!"': [other, other, word],
        f'root ::= "(" {name} ")"': [model.tokenize("(", add_special=False)[-1], bos],
    }.items():
        matcher: Any = both.compiler.compile(SamplingParams(grammar=grammar))
        matcher = matcher.copy()
        for n in range(len(tokens) + 1):
            theirs = both.theirs(grammar, tokens[:n])
            assert theirs is not None
            assert both.differences(matcher, theirs) == [], (grammar, n)
            if n < len(tokens):
                assert theirs[tokens[n]]
                assert bits(matcher.mask(), len(theirs))[tokens[n]]
                matcher.accept(tokens[n])


def test_a_token_that_ends_the_answer_is_not_part_of_it(both: Both) -> None:
    eos = both.model.vocab.eos
    with pytest.raises(RequestError, match=r"line 1, column 14: the vocabulary has no token <\[\d+\]>"):
        both.compiler.compile(SamplingParams(grammar=f'root ::= "a" <[{eos}]>'))
    matcher: Any = both.compiler.compile(SamplingParams(grammar="root ::= !<[300]>"))
    assert not bits(matcher.copy().mask(), len(both.text))[eos]
