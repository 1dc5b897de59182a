"""The templates that ship with upstream, each rendered and compared with what is committed in expected/.

    VELO_UPDATE_EXPECTED=1 python -m pytest tests/chat/test_upstream_templates.py

writes expected/ anew: read the difference before it is committed.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from pyvelo.chat.marked import Marked
from pyvelo.errors import TemplateError

from .conversations import CONVERSATIONS
from .upstream_templates import EXPECTED, NAMES, folder, upstream_template

HEAD = "######## "


def render(name: str, conversation: dict[str, Any]) -> str:
    """Return the text, or the template's error."""
    conversation = dict(conversation)
    try:
        return upstream_template(name).render(conversation.pop("messages"), **conversation)
    except TemplateError as error:
        return f"{HEAD[:-1]} refused: {error}"


def written(name: str) -> str:
    """Return the expected content of the template's file."""
    parts: list[str] = []
    seen: dict[str, str] = {}
    for key, conversation in CONVERSATIONS.items():
        text = render(name, conversation)
        if text in seen:
            parts.append(f"{HEAD}{key} = {seen[text]}\n")
        else:
            seen[text] = key
            parts.append(f"{HEAD}{key}\n{text}\n")
    return "".join(parts)


def test_every_template_has_an_expectation() -> None:
    if os.environ.get("VELO_UPDATE_EXPECTED"):
        EXPECTED.mkdir(exist_ok=True)
        for path in folder().glob("*.jinja"):
            (EXPECTED / f"{path.stem}.txt").write_text(written(path.stem), encoding="utf-8", newline="\n")
    assert {path.stem for path in folder().glob("*.jinja")} == {path.stem for path in EXPECTED.glob("*.txt")}


@pytest.mark.parametrize("name", NAMES)
def test_a_template_renders_as_expected(name: str) -> None:
    with (EXPECTED / f"{name}.txt").open(encoding="utf-8", newline="") as file:
        assert written(name) == file.read()


def snowed(value: Any, flake: str) -> Any:
    """Return the value with `flake` for every letter of the user's strings; roles and types stay."""
    if isinstance(value, str):
        return re.sub(r"\w", flake, value)
    if isinstance(value, list):
        return [snowed(item, flake) for item in value]
    if isinstance(value, dict):
        kept = ("role", "type", "tool_call_id", "id", "enum")
        return {key: item if key in kept else snowed(item, flake) for key, item in value.items()}
    return value


@pytest.mark.parametrize("name", NAMES)
def test_what_users_say_is_marked_and_nothing_else_changes_with_it(name: str) -> None:
    for key in ("turns", "system", "reasoning", "tool_call", "tool_answer"):
        texts: list[Marked] = []
        for flake in "☃❄":
            case = {k: v if k == "tools" else snowed(v, flake) for k, v in CONVERSATIONS[key].items()}
            try:
                texts.append(upstream_template(name).render_marked(case["messages"], tools=case.get("tools")))
            except TemplateError:
                break
            theirs = "".join(char for char, mark in zip(texts[-1], texts[-1].mask, strict=True) if mark)
            assert theirs.count(flake) == texts[-1].count(flake) > 0
        ours = {"".join(c for c, mark in zip(text, text.mask, strict=True) if not mark) for text in texts}
        assert len(ours) <= 1
