"""Errors that a client gets: status, message, and the field at fault."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyvelo.errors import (
    ArgumentError,
    ClosedError,
    EngineError,
    OutOfBlocks,
    OutOfMemory,
    PromptTooLong,
    RequestError,
    StoreError,
    UnsupportedError,
    VeloError,
)

__all__ = ["HttpError", "not_found", "of_exception", "openai_error", "refused"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_NAME = re.compile(r"[A-Za-z_]\w*(?=[=:[]|, line )")  # of an argument, at the beginning of a message
_PROMPT = re.compile(r"the prompt\b|prompts\b|the session with this text\b")

_GIVEN_AS = {
    "prompt": ("messages", "input", "prompt", "content", "text", "token_ids"),
    "json_schema": ("response_format", "guided_json", "structured_outputs", "text", "format"),
    "regex": ("guided_regex", "structured_outputs"),
    "grammar": ("guided_grammar", "guided_choice", "structured_outputs"),
}
"""Fields of bodies that become an argument of the engine."""


@dataclass
class HttpError(Exception):
    """Answer with an error status.

    param: field of the body at fault.
    code: short name for programs.
    headers: of the answer, such as Retry-After.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Type of the error, by OpenAI's names."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return _KINDS.get(self.status, default)

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        found = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": found}


def openai_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an error as OpenAI's clients read it."""
    return error.body


def refused(param: str, message: str) -> HttpError:
    """Return the answer to a field that cannot be served."""
    return HttpError(400, message, param)


def _field_of(message: str, given: Collection[str]) -> str | None:
    """Return the field at fault: the argument at the beginning of a message, as the body names it."""
    found = _NAME.match(message)
    name = "prompt" if _PROMPT.match(message) else found and found[0]
    if name is None or name in given:
        return name
    return next((field for field in _GIVEN_AS.get(name, ()) if field in given), name)


def not_found(message: str) -> HttpError:
    """Return the answer to an unknown path, model or session."""
    return HttpError(404, message, code="not_found")


def of_exception(error: Exception, given: Collection[str] = ()) -> HttpError:
    """Return the answer to an exception: 400 for wrong input, 5xx for the rest.

    given: names of the body's fields.
    """
    if isinstance(error, HttpError):
        return error
    message = str(error).replace("; None: ", "; null: ").replace(", or None ", ", or null ")
    if isinstance(error, OutOfBlocks):
        return HttpError(400, message, code="context_length_exceeded")
    if isinstance(error, (RequestError, ArgumentError, UnsupportedError)):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return HttpError(400, message, _field_of(message, given), code)
    if isinstance(error, (OutOfMemory, StoreError)):
        return HttpError(503, message, headers={"Retry-After": "5"})
    if isinstance(error, (ClosedError, EngineError)):
        return HttpError(503, message)
    return HttpError(
        500, message if isinstance(error, VeloError) else "an internal error; see the server's log"
    )
