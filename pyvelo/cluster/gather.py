"""Answers of all replicas as one: metrics, each with its replica as a label, and lists of sessions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from pyvelo.cluster.forwarded import Application, Forwarded, answer_of

__all__ = ["GATHERED", "Whole", "merged", "whole_answer"]

GATHERED = {"/metrics", "/v1/sessions", "/sessions"}
"""Paths that all replicas answer together, if they are read."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( [^{}]*)")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True)
class Whole:
    """Whole answer of a replica."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


async def whole_answer(app: Application, request: Forwarded, replica: str) -> Whole:
    """Return the answer of an application."""
    messages: list[Any] = []
    async with aclosing(answer_of(app, request)) as batches:
        async for batch in batches:
            messages += batch
    start, *bodies = messages
    body = b"".join(message.get("body", b"") for message in bodies)
    return Whole(replica, start["status"], tuple(start["headers"]), body)


def merged(path: str, answers: Sequence[Whole]) -> Whole:
    """Return one answer of at least one replica; a refusal, if one of them refused."""
    answers = sorted(answers, key=lambda answer: answer.replica)
    refused = next((answer for answer in answers if answer.status != 200), None)
    if refused is not None:
        return refused
    body = _metrics(answers) if path == "/metrics" else _lists(answers)
    first = answers[0]
    headers = tuple(pair for pair in first.headers if pair[0] != b"content-length")
    return Whole("", 200, (*headers, (b"content-length", str(len(body)).encode())), body)


def _lists(answers: Sequence[Whole]) -> bytes:
    data = [each for answer in answers for each in _decode(answer.body)["data"]]
    return _encode({"object": "list", "data": data})


def _metrics(answers: Sequence[Whole]) -> bytes:
    """Return metrics whose samples have a label more; Prometheus wants the samples of a metric together."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # comments and samples, by the name in the comments
    for answer in answers:
        name = ""
        for line in answer.body.decode().splitlines():
            if line.startswith("# HELP ") or line.startswith("# TYPE "):
                name = line.split(" ", 3)[2]
                comments, _ = families.setdefault(name, ([], []))
                if line not in comments:
                    comments.append(line)
            elif match := _SAMPLE.fullmatch(line):
                label = f'replica="{answer.replica}"'
                labels = f"{match[2]},{label}" if match[2] else label
                families.setdefault(name, ([], []))[1].append(f"{match[1]}{{{labels}}}{match[3]}")
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "\n".join([*lines, ""]).encode()
