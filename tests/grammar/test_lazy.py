"""A lazy grammar lets any text come, until one of its words has come."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.grammar.lark import to_lark
from pyvelo.grammar.matcher import LazyMatcher, Marks

llguidance = pytest.importorskip("llguidance")

MARKS = Marks((b"<call>\n", b"<go"), b"<t>", (b"</t>", b"<go"))
GRAMMAR = 'root ::= "<call>\\n{" [0-9]+ "}" | "<go>" [a-z]* "!"'
CHUNKS = [
    *(b"<c", b"<ca", b"all", b"call>", b">\n", b">\n{", b"<g", b"o>", b"x<go>"),
    *(b"<<", b"<call>\n{1", b"1}", b"y<"),
]
TOKENS = [*(bytes((byte,)) for byte in range(256)), *CHUNKS]
END = len(TOKENS)


class Chunks:
    """Vocabulary of single bytes and a few longer tokens."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*TOKENS, b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Chunks()), n_vocab=END + 1, eos_token=[END])


def strict() -> Any:
    lark = llguidance.LLMatcher.grammar_from_lark(to_lark(GRAMMAR, lambda _: None, [END]))
    return llguidance.LLMatcher(tokenizer(), lark, log_level=0)


def lazy(matcher: Any, thinks: bool = False) -> LazyMatcher:
    return LazyMatcher(matcher, MARKS, thinks, TOKENS.__getitem__, list)


def begin_of(text: bytes, thinks: bool) -> int | None:
    """Return the place of the first word outside of reasoning, by a look at each place."""
    at = 0
    while at < len(text):
        here = text[at:]
        if thinks:
            if here.startswith(b"</t>"):
                thinks = False
            elif here.startswith(b"<go"):
                return at
        elif here.startswith(MARKS.words):
            return at
        elif here.startswith(b"<t>"):
            thinks = True
            at += 2
        at += 1
    return None


OTHERS = (b"<t", b"<t>", b"/t>", b"</t>", b"<", b"call>\n", b"{", b"12", b"}", b"go", b">", b"!", b"a", b"\n")
PIECES = st.lists(st.sampled_from([*CHUNKS, *OTHERS]), max_size=12)


def tokens_of(piece: bytes) -> list[int]:
    return [TOKENS.index(piece)] if piece in TOKENS else list(piece)


@given(pieces=PIECES, forks=st.sets(st.integers(0, 12)), thinks=st.booleans())
def test_against_the_whole_text(pieces: list[bytes], forks: set[int], thinks: bool) -> None:
    found, text = lazy(strict(), thinks), b""
    for number, token in enumerate(token for piece in pieces for token in tokens_of(piece)):
        mask = found.mask()
        if mask is not None and not mask[token // 8] >> token % 8 & 1:
            return  # no sampler would draw it
        if number in forks:
            copied, found = found, found.copy()
            if copied.mask() is None:
                copied.accept(ord("<"))  # the copy does not see it
        complete = found.accept(token)
        text += TOKENS[token]
        place = begin_of(text, thinks)
        right = strict()
        followed = place is not None and right.try_consume_tokens(list(text[place:])) == len(text) - place
        assert (found.mask() is not None) == followed
        assert complete == (followed and right.is_stopped())
        if complete:
            return
        if followed:
            assert found.mask() == right.compute_bitmask()
        elif place is not None:  # what came cannot begin the grammar: free to the end
            assert found.accept(ord("x")) is False
            assert found.mask() is None
            return


def test_without_a_grammar_all_is_free() -> None:
    found = lazy(None)
    for token in b"<call>\n<go>":
        assert found.accept(token) is False
        assert found.copy().mask() is None
