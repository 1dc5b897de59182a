"""Vocabularies for the models of models/make.py: a small one of our own, or one of upstream's."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts._common import ROOT

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE = "\u2581"
MUTED = 0.2

# Words of the small model; everything else falls back to letters and bytes.
_WORDS = """
the of and to a in is it you that he was for on are with as his they at be this have from or one had by
but not what all were we when your can said there use an each which she do how their if will up other
about out many then them these so some her would make like him into time has look two more write go see
no way could people my than first water been call who now find long down day did get come made may part
once upon little old king queen forest river house door night moon star sun sea ship wind rain snow fire
stone tree bird fox wolf bear cat dog horse fish child girl boy mother father friend garden road hill
mountain village city bridge tower castle light dark red blue green white black gold silver small great
young good bad cold warm quiet loud soft hard new far near high low slow fast walked ran saw heard found
lost gave took told asked answered sang slept woke opened closed carried followed crossed began ended
laughed cried waited thought knew wished never always again away home under over through between after
before until because while where why here very only just still even soon later today tomorrow every
nothing something someone word story song book letter map key lamp bread apple honey salt iron glass
paper clock wheel boat wing voice dream hand eye heart face head hair foot morning evening summer winter
spring autumn hour year Once The A And But In It He She They There When One Then We You What My Hello
world name am model memory block page cache token table
"""
WORDS = _WORDS.split()

PIECES = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_/+*=", "\n", SPACE]
MARKS = [".", ",", "!", "?"]


CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
"""Types of values in a GGUF: by number, what `struct` calls it."""


@dataclass(frozen=True)
class Vocab:
    """Tokenizer: `fields` are its GGUF keys; `loudness[i]` scales the embedding of token i."""

    size: int
    fields: dict[str, Any]
    loudness: npt.NDArray[np.float32] = field(repr=False)


class VocabError(ValueError):
    """Error of a vocabulary that cannot be had; the message says what would do."""


def own_vocab() -> Vocab:
    """Return a SentencePiece vocabulary of some 1000 tokens: special ones, bytes, characters and words.

    SentencePiece joins pieces two by two, so a word needs all of its prefixes as tokens. The prefixes, the
    bytes and the special tokens are muted: a model with random weights then writes whole words and does not
    end early.
    """
    words = [SPACE + word for word in WORDS]
    beginnings = dict.fromkeys(word[:end] for word in words for end in range(2, len(word)))
    plain = list(dict.fromkeys([*PIECES, *beginnings, *words]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(plain)
    # shorter prefixes are joined first: rank by length, then by place
    scores = [0.0] * 259 + [-float(len(piece)) for piece in plain]
    spoken = {*words, *MARKS}
    loudness = np.array([1.0 if token in spoken else MUTED for token in tokens], np.float32)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    return Vocab(len(tokens), fields, loudness)


def upstream_tree() -> Path:
    """Return the folder of upstream's sources; run upstream/fetch.py if it is not there yet.

    Raises VocabError with that script's message if it fails.
    """
    script = ROOT / "scripts/upstream/fetch.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"{script.name} failed").splitlines()[-1]
        raise VocabError(f"the vocabulary comes from llama.cpp's sources, but {reason}")
    return Path(done.stdout.strip().splitlines()[-1])


def upstream_vocab(name: str, tree: Path) -> Vocab:
    """Return the tokenizer of `models/ggml-vocab-NAME.gguf` in upstream's tree."""
    path = tree / "models" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        known = sorted(p.stem.removeprefix("ggml-vocab-") for p in path.parent.glob("ggml-vocab-*.gguf"))
        raise VocabError(
            f"no vocabulary {name!r} in {path.parent}; there are: none (our own), {', '.join(known)}"
        )
    fields = {key: value for key, value in _metadata(path) if key.startswith("tokenizer.")}
    size = len(fields["tokenizer.ggml.tokens"])
    loudness = np.ones(size, np.float32)
    types = np.array(fields.get("tokenizer.ggml.token_type", [NORMAL] * size))
    loudness[types != NORMAL] = MUTED
    return Vocab(size, fields, loudness)


def _metadata(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a GGUF. gguf-py takes a second for 50,000 tokens."""
    data = path.read_bytes()
    at = 24  # after magic, version, number of tensors, number of values

    def numbers(code: str, count: int = 1) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{count}{code}", data, at)
        at += count * struct.calcsize(code)
        return found

    def text() -> str:
        nonlocal at
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        found, at = data[at + 8 : end].decode(), end
        return found

    for _ in range(*struct.unpack_from("<Q", data, 16)):
        key, (kind,) = text(), numbers("I")
        if kind != ARRAY:
            yield key, text() if kind == STRING else numbers(CODES[kind])[0]
            continue
        (kind,), (count,) = numbers("I"), numbers("Q")
        yield key, [text() for _ in range(count)] if kind == STRING else [*numbers(CODES[kind], count)]
