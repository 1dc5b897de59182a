"""Tokens from and to text, and invalid input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvelo.errors import ConfigError, RequestError
from pyvelo.native import Model
from pyvelo.native._ffi import ffi, lib

TEXTS = ["", "Hello, world!", "  two spaces", "tab\tand\nnewline", "héllo wörld", "日本語", "🙂👩‍👩‍👧", "a\0"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_the_same_after_detokenize(model: Model, text: str) -> None:
    tokens = model.tokenize(text)
    assert model.detokenize(tokens) == text.encode()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_is_the_same_after_detokenize(model: Model, text: str) -> None:
    assert model.detokenize(model.tokenize(text)) == text.encode()


def test_pieces_make_up_the_text(model: Model) -> None:
    tokens = model.tokenize("Hello, wörld 🙂", add_special=False)
    assert b"".join(map(model.token_bytes, tokens)).lstrip() == "Hello, wörld 🙂".encode()


def test_special_tokens_are_added_as_the_model_expects(model: Model) -> None:
    plain = model.tokenize("Hello", add_special=False)
    special = model.tokenize("Hello")
    front = [model.vocab.bos] if model.vocab.add_bos else []
    back = [model.vocab.eos] if model.vocab.add_eos else []
    assert special == [*front, *plain, *back]


def test_control_tokens_are_shown_on_demand(model: Model) -> None:
    eos = model.vocab.eos
    assert eos is not None
    name = model.token_bytes(eos, special=True)
    assert name
    assert model.token_bytes(eos) == b""
    assert model.detokenize([eos], special=True).strip() == name
    assert model.tokenize(name.decode(), add_special=False, parse_special=True) == [eos]
    assert model.tokenize(name.decode(), add_special=False) != [eos]


def test_the_end_is_known(model: Model) -> None:
    assert model.vocab.eos is not None
    assert model.is_end(model.vocab.eos)
    tokens = range(model.vocab.n_tokens)
    assert model.end_tokens == tuple(filter(model.is_end, tokens))
    assert model.all_token_bytes() == [*map(model.token_bytes, tokens)]
    assert not model.is_end(model.tokenize("Hello", add_special=False)[0])


def test_long_text(model: Model) -> None:
    text = "The quick brown fox. " * 5000
    assert model.detokenize(model.tokenize(text)) == text.encode()


def test_a_run_of_one_letter(model: Model) -> None:
    text = "a" * 200_000
    assert model.detokenize(model.tokenize(text)) == text.encode()


@pytest.fixture
def regex_model(tmp_path: Path) -> Iterator[Model]:
    """Return a vocabulary of single bytes that splits texts by a regex of the standard library."""
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    letters += [256 + i for i in range(256 - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-llm")
    writer.add_token_list([chr(letter) for letter in letters])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256)
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Model(tmp_path / "vocab.gguf", vocab_only=True) as model:
        yield model


@pytest.mark.parametrize("letter", ["a", "1", "日"])
def test_a_run_of_one_letter_under_a_regular_expression(regex_model: Model, letter: str) -> None:
    """Such expressions recurse for every character, which crashes on a stack of usual size."""
    text = letter * 50_000
    assert regex_model.detokenize(regex_model.tokenize(text)) == text.encode()


@pytest.mark.parametrize("token", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_tokens_beyond_the_vocabulary(model: Model, token: int) -> None:
    for use in (model.token_bytes, model.is_end):
        with pytest.raises(ConfigError, match=f"token {token} is not in the vocabulary"):
            use(token)
    with pytest.raises(RequestError, match=f"token {token} is not in the vocabulary"):
        model.detokenize([1, token])


def test_invalid_tokens_raise(model: Model) -> None:
    for tokens in ([2**31], [2**70], [1.5], ["a"], [[1]], np.zeros((2, 2), np.int32)):
        with pytest.raises(RequestError, match="tokens must be"):
            model.detokenize(tokens)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="32 bits"):
        model.token_bytes(2**31)
    with pytest.raises(TypeError):
        model.is_end("1")  # type: ignore[arg-type]


def test_arrays_of_any_integer_type(model: Model) -> None:
    tokens = model.tokenize("Hello, world!")
    for dtype in (np.int32, np.int64, np.uint16):
        assert model.detokenize(np.array(tokens, dtype)) == b"Hello, world!"
    assert model.detokenize(np.array([tokens, tokens], np.int32).T[:, 0]) == b"Hello, world!"
    assert model.detokenize([]) == b""


def test_text_that_is_not_unicode(model: Model) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        model.tokenize("\ud800")


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["text"]])
def test_input_that_is_not_text_raises(model: Model, text: Any) -> None:
    with pytest.raises(RequestError, match="give a string"):
        model.tokenize(text)


def test_the_c_interface_accepts_bytes_that_are_not_unicode(model: Model) -> None:
    out, count = ffi.new("int32_t[64]"), ffi.new("int32_t *")
    assert lib.velo_tokenize(model.handle, b"\xff\xfe\x80", 3, 0, 0, out, 64, count) == lib.VELO_OK
    assert count[0] > 0


def test_the_c_interface_reports_the_required_size(model: Model) -> None:
    count, length = ffi.new("int32_t *"), ffi.new("size_t *")
    tokens = model.tokenize("Hello, world!")
    null = ffi.NULL
    assert (
        lib.velo_tokenize(model.handle, b"Hello, world!", 13, 1, 0, null, 0, count)
        == lib.VELO_BUFFER_TOO_SMALL
    )
    assert count[0] == len(tokens)
    array = ffi.new("int32_t[]", tokens)
    status = lib.velo_detokenize(model.handle, array, len(tokens), 0, null, 0, length)
    assert (status, length[0]) == (lib.VELO_BUFFER_TOO_SMALL, 13)
    status = lib.velo_token_to_bytes(model.handle, tokens[-1], 0, null, 0, length)
    assert (status, length[0]) == (lib.VELO_BUFFER_TOO_SMALL, len(model.token_bytes(tokens[-1])))
