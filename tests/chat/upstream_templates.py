"""The templates of upstream, each compiled once in a process."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

from pyvelo.chat.template import ChatTemplate
from tests.upstream_models import models_folder

EXPECTED = Path(__file__).with_name("expected")
NAMES = sorted(path.stem for path in EXPECTED.glob("*.txt"))
NOW = datetime(2026, 3, 4, 5, 6, 7)


def folder() -> Path:
    return models_folder() / "templates"


def source_of(name: str) -> str:
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def upstream_template(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), name=name, bos="<BOS>", eos="<EOS>", now=lambda: NOW)
