"""Answers follow a grammar, a schema or an expression with any model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.errors import ComputeError, RequestError
from pyvelo.grammar.compiler import MAX_FORCED
from pyvelo.native import Model
from pyvelo.sampling import LazyGrammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time"
FREE = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_f32: Path) -> Iterator[LLM]:
    with LLM(tiny_model_f32, deterministic=True, n_threads=1) as llm:
        yield llm


def answers(llm: LLM, n: int = 8, **grammar: Any) -> list[str]:
    """Draws at full temperature."""
    params = SamplingParams(n=n, max_tokens=200, seed=7, **grammar)
    output = llm.generate(PROMPT, params)[0]
    assert [answer.finish_reason for answer in output.outputs] == ["stop"] * n
    return [answer.text for answer in output.outputs]


def test_a_regular_expression(llm: LLM) -> None:
    texts = answers(llm, regex=r"[0-9]{3}-[a-z]{2,9}(\.|!)")
    assert all(re.fullmatch(r"[0-9]{3}-[a-z]{2,9}(\.|!)", text) for text in texts)
    assert len(set(texts)) > 1, "they are drawn"


@pytest.mark.parametrize("text", ["ab" * 150, "\u4f60\u597d" * 60, "a\U0001f98a" * 60])
def test_what_is_forced_is_read_a_piece_at_a_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tokenize, lengths = Model.tokenize, []

    def watched(model: Model, piece: str, **options: Any) -> list[int]:
        lengths.append(len(piece.encode()))
        return tokenize(model, piece, **options)

    monkeypatch.setattr(Model, "tokenize", watched)
    params = SamplingParams(regex=text, max_tokens=1500)
    output = llm.generate([1], params)[0]
    assert (output.text, output.finish_reason) == (text, "stop")
    assert 200 < max(lengths) <= MAX_FORCED


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_json_schema(llm: LLM, schema: Any) -> None:
    for text in answers(llm, json_schema=schema):
        value = json.loads(text)
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"red", "green"}


@pytest.mark.parametrize("schema", [SCHEMA, {"type": "array", "items": {"const": 1}, "maxItems": 3}])
def test_blanks_between_the_parts_of_json_end(llm: LLM, schema: Any) -> None:
    """However much the model would like to write nothing else."""
    blanks = [token for token in range(llm.vocab.n_tokens) if llm.detokenize([token]).isspace()]
    bias = dict.fromkeys(blanks, 100.0)
    output = llm.generate(
        PROMPT, SamplingParams(max_tokens=2000, json_schema=schema, logit_bias=bias, seed=3)
    )[0]
    assert output.finish_reason == "stop"
    assert "\n\t" in output.text
    json.loads(output.text)


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_any_json(llm: LLM, schema: Any) -> None:
    closed = {llm.tokenize(sign, add_special=False)[-1]: -100.0 for sign in '[{"'}
    (text,) = answers(llm, 1, json_schema=schema, logit_bias=closed)
    assert isinstance(json.loads(text), (int, float, bool, type(None)))


def test_the_schema_says_otherwise_about_blanks(llm: LLM) -> None:
    dense = {**SCHEMA, "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": ""}}
    for text in answers(llm, json_schema=dense):
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


def test_a_grammar(llm: LLM) -> None:
    grammar = 'root ::= word (" and " word){0,3}\nword ::= "fox" | "bear" | [0-9]+ "?"'
    for text in answers(llm, grammar=grammar):
        assert re.fullmatch(r"(fox|bear|[0-9]+\?)( and (fox|bear|[0-9]+\?)){0,3}", text)


def test_one_choice_is_no_choice(llm: LLM) -> None:
    assert answers(llm, 2, grammar='root ::= "exactly this"') == ["exactly this"] * 2


def test_beside_others_and_with_a_bias_against_it(llm: LLM) -> None:
    """Requests without a grammar do not change; a bias cannot leave the grammar."""
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    guided = SamplingParams(
        max_tokens=50, temperature=0, regex="[ab]{4}", logit_bias=dict.fromkeys(range(3, 60), 50.0)
    )
    alone = llm.generate("The fox", plain)[0].token_ids
    outputs = llm.generate(["The fox", "The fox", "The fox"], [plain, guided, plain])
    assert outputs[0].token_ids == outputs[2].token_ids == alone
    assert re.fullmatch("[ab]{4}", outputs[1].text)


def test_a_session_follows_a_schema_and_goes_on_freely(llm: LLM) -> None:
    with llm.session(PROMPT) as session:
        value = json.loads(session.generate(SamplingParams(max_tokens=200, json_schema=SCHEMA)).text)
        assert set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
        assert len(session.generate(SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


def test_what_is_cut_short_says_so(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=3, json_schema=SCHEMA))[0]
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ({"grammar": "root ::= nowhere"}, "grammar"),
        ({"grammar": "no rules at all"}, "grammar"),
        ({"grammar": "root ::= (" + "(" * 100_000}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ({"regex": "(unclosed"}, "regex"),
        ({"regex": r"[^\x00-\U0010ffff]"}, "^regex: no output can follow it: no token can come next$"),
        ({"json_schema": {"$ref": "#"}}, "^json_schema: no output can follow it: no token can come next$"),
        ({"json_schema": "null"}, "^json_schema: a schema is an object, true or false, got None$"),
    ],
)
def test_what_is_no_grammar_is_refused(llm: LLM, grammar: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([PROMPT, PROMPT], SamplingParams(**grammar))
    assert llm.stats().blocks_used == 0


def test_one_that_becomes_too_complex_ends_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    hard = SamplingParams(max_tokens=50, grammar='start: "a" start')  # an answer never ends
    outputs = llm.generate(["The fox", "The fox"], [hard, plain], return_errors=True)
    assert isinstance(outputs[0].error, RequestError)
    assert "\n" not in str(outputs[0].error)
    assert len(outputs[1].token_ids) == 8


def test_a_grammar_that_fails_on_its_way_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyvelo.grammar.matcher import GrammarMatcher

    calls = []

    def mask(self: GrammarMatcher) -> bytes:
        calls.append(self)
        if len(calls) == 3:
            raise ComputeError("too complex")
        return original(self)

    original = GrammarMatcher.mask
    monkeypatch.setattr(GrammarMatcher, "mask", mask)
    plain = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    guided = SamplingParams(max_tokens=50, regex="[ab]{40}")
    outputs = llm.generate(["The fox", "The fox"], [guided, plain], return_errors=True)
    assert isinstance(outputs[0].error, ComputeError)
    assert len(outputs[1].token_ids) == 8


def test_from_a_word_on(llm: LLM) -> None:
    free = llm.generate(PROMPT, FREE)[0].text
    word = next(word for word in free.split()[2:] if free.count(word) == 1)
    grammar = LazyGrammar(f'root ::= "{word}" " is" [0-9]{{3}}', [word])
    before = free[: free.index(word)]
    for more in ({}, {"n": 2}, {"min_tokens": 3}, {"min_tokens": 20}):
        output = llm.generate(PROMPT, replace(FREE, grammar=grammar, **more))[0]
        for answer in output.outputs:
            assert re.fullmatch(re.escape(before + word) + " is[0-9]{3}.*", answer.text, re.DOTALL)
    never = ["\x00"], 'root ::= "a"'
    for words, source in (never, ([word], 'root ::= "other"'), ([word], "root ::= (")):
        assert llm.generate(PROMPT, replace(FREE, grammar=LazyGrammar(source, words)))[0].text == free
    late = LazyGrammar(grammar, [word], think=before[:3], ends=[word + " never"])
    assert llm.generate(PROMPT, replace(FREE, grammar=late))[0].text == free


def test_without_the_library_it_says_what_to_install(tiny_model_f32: Path) -> None:
    program = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from pyvelo import LLM, SamplingParams, VeloError\n"
        f"llm = LLM({str(tiny_model_f32)!r})\n"
        "try: llm.generate('a', SamplingParams(regex='a'))\n"
        "except VeloError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'pyvelo[grammar]'" in done.stdout
