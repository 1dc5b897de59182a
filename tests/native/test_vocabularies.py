"""Text from tokens, with each vocabulary of upstream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvelo.native import Model
from tests.upstream_models import models_folder

TEXTS = [
    "Hello , world ! It 's fine ? No . I 'm ' quoted ' they 're we 've don 't he 'd we 'll",
    " a ?b  x  . ,\n ! \t ?",
    "for (int i = 0 ; i < n ; ++ i) { a [ i ] = ' ' ; }",
    "日本語 。 テキスト ! 中文 ， 。 한국어 ?",  # noqa: RUF001
    "Привет , мир ! Ελληνικά . 'ς",
    "مرحبا ! שלום , עולם",
    "हिन्दी । ไทย . 🙂👩‍👩‍👧 !",
    " ",
    "",
]
PIECES = st.sampled_from([" ", ".", ",", "!", "?", "'", "s", "m", "re", "ve", "word", "é", "語", "🙂", "\n"])
NORMALIZED = ("bert-bge", "nomic-bert-moe")
"""Vocabularies whose tokenizer changes a text first, such as to lower case."""


NAMES = [
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4"),
    *("gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35"),
    *("refact", "starcoder"),
]
LARGE = {"aquila", "command-r", "deepseek-llm", "gemma-4", "llama-bpe", "nomic-bert-moe", "qwen2", "qwen35"}
"""Vocabularies of 100,000 tokens and more, which take up to 1.5 seconds to load."""


def test_every_vocabulary_of_upstream_is_named() -> None:
    found = models_folder().glob("ggml-vocab-*.gguf")
    assert sorted(path.stem.removeprefix("ggml-vocab-") for path in found) == NAMES


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in NAMES],
)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Model]]:
    path = models_folder() / f"ggml-vocab-{request.param}.gguf"
    with Model(path, vocab_only=True) as model:
        yield request.param, model


def adds_space(model: Model) -> bool:
    """Return whether the tokenizer adds a space before a text, by the file's metadata."""
    said = model.meta.get("tokenizer.ggml.add_space_prefix")
    return said == "true" if said is not None else model.meta["tokenizer.ggml.model"] in ("llama", "t5")


def check(model: Model, text: str, *, spaced: bool, same: bool) -> None:
    """Compare with the bytes of the tokens one by one, as in a stream."""
    tokens = model.tokenize(text, add_special=False)
    pieces = b"".join(map(model.token_bytes, tokens))
    if spaced:
        pieces = pieces.removeprefix(b" ")
    assert model.detokenize(tokens) == pieces
    assert model.detokenize(model.tokenize(text)) == pieces
    assert pieces == text.encode() or not same


def test_a_text_that_follows_another_gets_no_space(named: tuple[str, Model]) -> None:
    name, model = named
    for text in TEXTS:
        more = b"".join(map(model.token_bytes, model.tokenize_more(text)))
        if name in NORMALIZED:
            assert model.tokenize_more(text) == model.tokenize(text, add_special=False)
        else:
            assert more == text.encode()


def test_detokenize_gives_the_bytes_of_the_tokens(named: tuple[str, Model]) -> None:
    name, model = named
    spaced = adds_space(model)
    for text in TEXTS:
        check(model, text, spaced=spaced, same=name not in NORMALIZED)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(PIECES, max_size=20).map("".join))
    def compare(text: str) -> None:
        check(model, text, spaced=spaced, same=name not in NORMALIZED)

    compare()


def test_control_tokens_are_shown_between_other_tokens(named: tuple[str, Model]) -> None:
    _, model = named
    text = model.tokenize("a . b", add_special=False)
    for token in (model.vocab.eos, model.vocab.bos):
        if token is not None:
            tokens = [*text, token, *text]
            pieces = b"".join(model.token_bytes(one, special=True) for one in tokens)
            shown = pieces.removeprefix(b" ") if adds_space(model) else pieces
            assert model.detokenize(tokens, special=True) == shown
