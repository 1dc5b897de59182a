"""Vocabulary of the demo model: byte-level BPE for llama.cpp, in which the words of _texts.py are whole.

A word is built letter by letter from its left end, with the space before it (a user's message begins with
one). So words are found everywhere, and an unknown word falls into its longest known prefix and single bytes:
no text is refused. At the start of an answer words have no space; only capitalised ones may start there, so
that no merge starts inside another word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any

from scripts.demo import _about as about
from scripts.demo import _texts as texts

PAD, END, USER, BOT, BOS = "<|pad|>", "<|end|>", "<|user|>", "<|bot|>", "<|bos|>"
SPECIALS = [PAD, END, USER, BOT, BOS]
NORMAL, CONTROL = 1, 3

# GPT-2's way of cutting text, for the alphabets that Python's \w knows
_CUT = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_SHORT = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"]
SPACE = "\u0120"

# Parts of a chat. A user's message begins with a space, an answer does not.
TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|> ' + message['content'] | trim + '<|end|>' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|bot|>' + message['content'] | trim + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """Return the letter for each byte, as in GPT-2: itself if it is visible, else from U+0100 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


_LETTERS = byte_letters()


def cut(text: str) -> list[str]:
    """Cut the text into pieces that no token crosses, each in byte letters."""
    return ["".join(_LETTERS[byte] for byte in piece.encode()) for piece in _CUT.findall(text)]


class Vocab:
    """Tokens, merges and their encoding."""

    def __init__(self, inside: Iterable[str], first: Iterable[str]) -> None:
        """Build the merges.

        `inside`: pieces that begin with a space or an apostrophe; `first`: capitalised ones without.
        """
        self.words = [*dict.fromkeys(inside), *dict.fromkeys(first)]
        merges: dict[tuple[str, str], None] = {}
        beginnings: dict[str, None] = {}
        for word in self.words:
            for end in range(1, len(word)):
                merges[word[:end], word[end]] = None
                beginnings[word[: end + 1]] = None
        # words with a space first; the longest prefix goes on growing
        self.merges = sorted(merges, key=lambda m: (m[0][0] != SPACE, -len(m[0])))
        self.ranks = {merge: rank for rank, merge in enumerate(self.merges)}
        self.tokens = [*SPECIALS, *dict.fromkeys([*_LETTERS, *self.words, *beginnings])]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self._cache: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text without special tokens."""
        ids: list[int] = []
        for piece in cut(text):
            known = self._cache.get(piece)
            if known is None:
                known = self._piece(piece)
                if len(self._cache) < 100_000:
                    self._cache[piece] = known
            ids += known
        return ids

    def _piece(self, piece: str) -> list[int]:
        """Encode a piece as BPE defines it: the merge of lowest rank, leftmost first, until none is left."""
        parts = list(piece)
        while True:
            found = [(self.ranks.get(pair, -1), at) for at, pair in enumerate(pairwise(parts))]
            found = [f for f in found if f[0] >= 0]
            if not found:
                return [self.ids[part] for part in parts]
            at = min(found)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; special ones by their names."""
        text = "".join(self.tokens[i] for i in ids)
        back = {letter: byte for byte, letter in enumerate(_LETTERS)}
        return bytes(back[letter] for letter in text).decode(errors="replace")

    @cached_property
    def forms(self) -> list[list[int]]:
        """Return groups of tokens that are one word in other cases, with and without a space."""
        groups: dict[str, list[int]] = {}
        for token in [*self.words, *"0123456789"]:
            groups.setdefault(token.lstrip(SPACE).lower(), []).append(self.ids[token])
        return [group for group in groups.values() if len(group) > 1]

    def fields(self) -> dict[str, Any]:
        """Return the GGUF keys of the tokenizer and the chat template."""
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": [CONTROL] * len(SPECIALS) + [NORMAL] * (len(self) - len(SPECIALS)),
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in self.merges],
            "tokenizer.ggml.bos_token_id": self.ids[BOS],
            "tokenizer.ggml.eos_token_id": self.ids[END],
            "tokenizer.ggml.padding_token_id": self.ids[PAD],
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }


PEOPLE = [*texts.NAMES, *texts.SURNAMES, *texts.EXAMPLE[:2]]


def _asked() -> list[str]:
    plain = [
        t.format(n="", s="", d="") for t in [*texts.TELL, *texts.ASK, *texts.MY_NAME, *texts.ASK_MY_NAME]
    ]
    sums = [t.format(x="", y="") for t in [*texts.SUM, *texts.BIG_ASK, *texts.OTHER_OPERATION]]
    itself = [question for questions, _ in about.ABOUT for question in questions]
    strange = [t.format(w="") for t in texts.STRANGE]
    talk = [*texts.TALK_SUBJECTS, *texts.TALK_VERBS, *texts.TALK_TIMES]
    around = [*texts.BEFORE, *texts.BEHIND]
    return [*plain, *around, *sums, *itself, *strange, *talk, *texts.NOUNS]


def _answered() -> list[str]:
    people = [t.format(n="", s="", d="") for t in (texts.NOT_TOLD, texts.YOUR_NAME, texts.GREETED)]
    fixed = [texts.TOLD, texts.TALKED, about.UNKNOWN, texts.BIG, texts.STRANGER]
    return [*people, *fixed, *(answer for _, answer in about.ABOUT), "so", *PEOPLE]


def _words(text: str) -> list[str]:
    """Return the text's words, each with a space before it."""
    return [piece for piece in cut(" " + text) if piece[0] == SPACE and piece[1:].isalpha()]


_DIGITS = "0123456789"
_SIGNS = [SPACE + sign for sign in "+-=*/"]


def _first(text: str) -> list[str]:
    word = cut(text)[:1]
    return word if word and word[0][0].isupper() and word[0].isalpha() and len(word[0]) > 1 else []


def demo_vocab() -> Vocab:
    """Return the vocabulary: words of _texts.py, also in lower case; users' questions also in capitals."""
    inside = [SPACE + digit for digit in _DIGITS] + _SIGNS + _SHORT
    for text in _asked():
        for form in (text, text.lower(), text[:1].upper() + text[1:], text.upper()):
            inside += _words(form)
    for text in _answered():
        inside += _words(text)
    for name in PEOPLE:
        inside += _words(name.lower())
    first = [word for text in _answered() for word in _first(text)]
    # several capitals first: no other word may then begin inside
    return Vocab(inside, sorted(first, key=lambda word: -sum(letter.isupper() for letter in word)))


def spoken(vocab: Vocab) -> list[int]:
    """Return the ids of the tokens that answers use; no other may be sampled."""
    pieces = {END, *_DIGITS, *(SPACE + digit for digit in _DIGITS), *_SIGNS}
    ids = {vocab.ids[piece] for piece in pieces}
    for text in _answered():
        ids.update(vocab.encode(text), vocab.encode(" " + text))
    return sorted(ids)
