"""Conversations that a session keeps: the tokens that new messages add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyvelo.chat.conversation import Chats, encode
from pyvelo.engine.engine import Engine
from pyvelo.server.errors import refused

__all__ = ["Dialogue", "begin", "extend"]

MAX_CHARACTERS = 2 << 20
"""Longest messages that a session keeps, with the fields that the template does not show."""


@dataclass(frozen=True)
class Dialogue:
    """Messages of a session.

    text: of the messages, by the template, with the beginning of the answer.
    n_tokens: of the session with that text; the tokens after them are the assistant's.
    arguments: variables of the template.
    """

    messages: tuple[Mapping[str, Any], ...]
    text: str
    n_tokens: int
    arguments: Mapping[str, Any]


def begin(
    chats: Chats, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> tuple[Sequence[int], Dialogue]:
    """Return the tokens of a conversation, and what is needed to continue it.

    Raises: HttpError if the messages are too long to keep.
    """
    _check_size(messages, arguments)
    prompt = chats.one(list(messages), template_arguments=arguments)
    return prompt, Dialogue(tuple(messages), prompt.text, len(prompt), arguments)


def extend(
    engine: Engine, chats: Chats, dialogue: Dialogue, tokens: Sequence[int], new: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[int], bool, Dialogue]:
    """Return the tokens that messages add to a session, or all if the template changes the text before.

    Args:
        tokens: of the session.

    Returns:
        tokens, whether they follow the tokens of the session, and the conversation with the messages.

    Raises: HttpError if the messages are too long to keep.
    """
    answered = tokens[dialogue.n_tokens :]
    answer = engine.processor.text_of(answered)
    assistant = [{"role": "assistant", "content": answer}] if answered else []
    messages = (*dialogue.messages, *assistant, *new)
    _check_size(messages, dialogue.arguments)
    text = chats.template.render_marked(
        list(messages), add_generation_prompt=True, arguments=dialogue.arguments
    )
    shown, before = str.__str__(text), dialogue.text + answer
    if answered and answered[-1] in engine.model.end_tokens:  # the template ends the answer, too
        before += engine.model.token_bytes(answered[-1], special=True).decode("utf-8", "replace")
    if shown.startswith(before):
        added = _without_bos(engine, encode(engine.model, text[len(before) :]))
        if added and _begins(engine, added, shown[len(before) :]):
            return added, True, Dialogue(messages, shown, len(tokens) + len(added), dialogue.arguments)
    whole, begun = begin(chats, messages, dialogue.arguments)
    return whole, False, begun


def _begins(engine: Engine, tokens: Sequence[int], text: str) -> bool:
    """Return whether tokens are a text up to its first control token.

    Some tokenizers put a space before any text, which is wrong in the middle of a conversation.
    """
    found, bytes_of = b"", engine.model.token_bytes
    for token in tokens:
        found += bytes_of(token, special=True)
        if not bytes_of(token):
            break
    return text.encode("utf-8", "surrogatepass").startswith(found)


def _check_size(messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
    size = len(str(arguments)) + sum(len(str(message)) for message in messages)
    if size > MAX_CHARACTERS:
        raise refused("messages", f"messages: a session keeps {MAX_CHARACTERS} characters, got {size}")


def _without_bos(engine: Engine, tokens: list[int]) -> list[int]:
    """Return the tokens of a later part of a text, which has no BOS token."""
    vocab = engine.model.vocab
    return tokens[1:] if vocab.add_bos and tokens[:1] == [vocab.bos] else tokens
