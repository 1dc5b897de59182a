"""Words of refusals of fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from pyvelo.server.schemas import CompletionRequest, StreamOptions, convert
from pyvelo.server.wording import in_words


class Inner(Struct):
    size: int


class Fields(Struct, kw_only=True):
    name: str
    count: Annotated[int, Meta(ge=1, le=5)] | None = None
    text: Annotated[str, Meta(min_length=1, max_length=3)] | list[str] | None = None
    rate: float = 0.0
    flag: bool = False
    kind: Literal["x", "y"] = "x"
    weights: dict[str, float] = {}
    ids: list[Annotated[int, Meta(ge=0)]] = []
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("fields", "message", "path"),
    [
        ({"count": "x"}, "count must be an integer or null, got a string", "count"),
        ({"count": 0}, "count must be an integer of at least 1", "count"),
        ({"count": 1 << 70}, "count must be an integer of at most 5", "count"),
        ({"text": ""}, "text must be a string of at least 1 character", "text"),
        ({"text": "long"}, "text must be a string of at most 3 characters", "text"),
        ({"text": [1]}, "text[0] must be a string, got an integer", "text[0]"),
        ({"text": 1.5}, "text must be a string or a list or null, got a number", "text"),
        ({"rate": {}}, "rate must be a number, got an object", "rate"),
        ({"flag": 1}, "flag must be true or false, got an integer", "flag"),
        ({"kind": "z"}, "kind must not be 'z'", "kind"),
        ({"weights": {"a": []}}, "weights[...] must be a number, got a list", "weights[...]"),
        ({"ids": [3, -1]}, "ids[1] must be an integer of at least 0", "ids[1]"),
        ({"inner": {}}, "inner.size is missing", "inner.size"),
        ({"name": None}, "name must be a string, got null", "name"),
    ],
)
def test_a_refusal_says_what_a_field_must_be(fields: dict[str, Any], message: str, path: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"name": "a", **fields}, Fields)
    assert in_words(raised.value) == (message, path)


def test_a_missing_field_and_a_whole_body_have_words() -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({}, Fields)
    assert in_words(raised.value) == ("name is missing", "name")
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert([], Fields)
    assert in_words(raised.value) == ("it must be an object, got a list", None)
    assert in_words(ValueError("JSON is malformed: `x`")) == ("JSON is malformed: `x`", None)


def test_null_stands_for_the_default_of_a_field() -> None:
    plain = convert({"prompt": "a"}, CompletionRequest)
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__)
    assert convert({**nulls, "prompt": "a", "max_tokens": 16}, CompletionRequest) == plain
    assert convert({"prompt": "a", "max_tokens": None}, CompletionRequest).max_tokens is None  # no limit
    usage = {"stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert convert({"prompt": "a", **usage}, CompletionRequest).stream_options == StreamOptions()


@pytest.mark.parametrize("body", [{"n_predict": 3, "max_tokens": None}, {"max_tokens": None, "n_predict": 3}])
def test_null_under_one_name_hides_no_value_under_another(body: dict[str, int | None]) -> None:
    assert convert({"prompt": "a", **body}, CompletionRequest).max_tokens == 3
