"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyvelo import LLM
from pyvelo.server.http import AT_ONCE, encoded, encoded_list

from .servers import Server

MESSAGES: list[Any] = [{"role": "user", "content": "What is 12 + 13?"}]


@pytest.mark.parametrize("text", ["", "What is 12 + 13?", "é😀 日本", "a<|end|>b", "\n\n"])
def test_a_text_and_its_tokens(server: Server, oracle: LLM, text: str) -> None:
    answer = server.ask("/tokenize", {"prompt": text, "return_token_strs": True})
    tokens = oracle.tokenize(text, parse_special=True)
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), 512)
    assert answer["token_strs"] == [oracle.detokenize([token], special=True) for token in tokens]
    back = server.ask("/detokenize", {"tokens": tokens})
    assert back == {"prompt": text, "content": text}


def test_a_conversation_and_its_tokens(server: Server, oracle: LLM) -> None:
    answer = server.ask("/tokenize", {"messages": MESSAGES})
    assert answer["tokens"] == list(oracle.chat_prompt(MESSAGES))
    assert answer["token_strs"] is None
    alone = server.ask("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert alone["tokens"] == list(oracle.chat_prompt(MESSAGES, add_generation_prompt=False))
    chat = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    assert server.ask("/v1/chat/completions", chat)["prompt_token_ids"] == answer["tokens"]


def test_special_tokens_can_be_left_out(server: Server, oracle: LLM) -> None:
    answer = server.ask("/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert answer["tokens"] == oracle.tokenize("a", add_special=False)


def test_a_client_can_write_prompts_of_its_own(server: Server, oracle: LLM) -> None:
    info = server.get("/tokenizer_info").json
    assert info["vocab_size"] == oracle.vocab.n_tokens
    assert info["model_max_length"] == 512
    assert info["eos_token"] == oracle.detokenize([oracle.vocab.eos or 0], special=True)
    assert info["chat_template"].startswith(oracle.chat_template.source[:20])


def test_null_is_the_default_of_the_dialect(server: Server, oracle: LLM) -> None:
    plain = server.ask("/tokenize", {"content": "a", "add_special": None})["tokens"]
    assert plain == oracle.tokenize("a", add_special=False)
    named = server.ask("/tokenize", {"prompt": "a", "add_special_tokens": None})["tokens"]
    assert named == oracle.tokenize("a", add_special=True)


@pytest.mark.parametrize("n", [0, 1, 5, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_a_long_list_is_encoded_piece_by_piece(n: int) -> None:
    values = [{"id": number, "piece": "a,]["} for number in range(n)]
    assert json.loads(encoded(encoded_list(iter(values)))) == values
    assert json.loads(encoded({"x": encoded_list(values[:7], at_once=1)})) == {"x": values[:7]}
