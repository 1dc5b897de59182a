"""AsyncLLM has everything that LLM has, by the same names and with the same types; so have sessions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pyvelo
import pyvelo.errors
from pyvelo import LLM, AsyncLLM, AsyncSession, Session
from pyvelo.config import EngineConfig
from pyvelo.engine_view import ELSEWHERE
from pyvelo.errors import EngineError, VeloError
from pyvelo.kv.types import KV_TYPES
from pyvelo.native import POOLINGS

PAIRS = [(LLM, AsyncLLM), (Session, AsyncSession)]
RETURNS = {
    "Generator[StreamPiece, None, None]": "AsyncGenerator[StreamPiece, None]",
    "AbstractContextManager[None]": "AsyncGenerator[None, None]",  # what asynccontextmanager decorates
    "Session": "AsyncSession",
}


def public(face: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(face, name) for name in dir(face) if not name.startswith("_")}


def parameters(call: Any) -> list[tuple[str, Any, Any, Any]]:
    found = inspect.signature(call).parameters.values()
    return [(each.name, each.kind, each.default, each.annotation) for each in found]


@pytest.mark.parametrize(("blocking", "waiting"), PAIRS)
def test_both_faces_have_the_same_names(blocking: type, waiting: type) -> None:
    assert public(blocking).keys() == public(waiting).keys()
    assert parameters(blocking.__init__) == parameters(waiting.__init__) or blocking is Session  # type: ignore[misc]
    for name, mine in public(blocking).items():
        assert isinstance(mine, property) == isinstance(public(waiting)[name], property), name
        assert inspect.getdoc(mine), name
        assert inspect.getdoc(public(waiting)[name]), name


@pytest.mark.parametrize(("blocking", "waiting"), PAIRS)
def test_both_faces_have_the_same_types(blocking: type, waiting: type) -> None:
    for name, mine in public(blocking).items():
        theirs = public(waiting)[name]
        if isinstance(mine, property):
            mine, theirs = mine.fget, theirs.fget
        assert parameters(mine) == parameters(theirs), name
        annotations = [inspect.signature(each).return_annotation for each in (mine, theirs)]
        assert RETURNS.get(annotations[0], annotations[0]) == annotations[1], name
        assert "Any" not in str(inspect.signature(theirs)), name


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 does not keep overloads")
def test_chat_says_when_it_gives_a_list() -> None:
    both = [typing.get_overloads(inspect.unwrap(face.chat)) for face in (LLM, AsyncLLM)]  # type: ignore[attr-defined]
    assert [len(found) for found in both] == [2, 2]
    for mine, theirs in zip(*both, strict=True):
        assert inspect.signature(mine) == inspect.signature(theirs)
        several = "Sequence[Sequence[Message]]" in str(inspect.signature(mine))
        assert inspect.signature(mine).return_annotation == (
            "list[RequestOutput]" if several else "RequestOutput"
        )


def test_asyncio_says_of_a_model_what_the_other_says(tiny_model_f32: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with LLM(tiny_model_f32, n_ctx=256, n_threads=1) as llm:
        tokens = llm.tokenize("<s>Hello", parse_special=True, add_special=False)
        wanted = [llm.info, llm.vocab, llm.geometry, llm.n_ctx, llm.chat_template.name]
        said = [llm.chat_prompt(messages), llm.detokenize(tokens, special=True)]
        params = llm.get_default_sampling_params()

    async def body() -> None:
        engine = AsyncLLM(tiny_model_f32, n_ctx=256, n_threads=1)
        for name in ("info", "vocab", "geometry", "n_ctx", "chat_template"):
            with pytest.raises(EngineError, match="not loaded yet: use `async with`"):
                getattr(engine, name)
        async with engine:
            found = [engine.info, engine.vocab, engine.geometry, engine.n_ctx, engine.chat_template.name]
            assert found == wanted
            assert await engine.tokenize("<s>Hello", parse_special=True, add_special=False) == tokens
            assert [await engine.chat_prompt(messages), await engine.detokenize(tokens, special=True)] == said
            assert await engine.get_default_sampling_params() == params

    asyncio.run(asyncio.wait_for(body(), 60))


def test_errors_are_at_the_top_level() -> None:
    kinds = {name: kind for name, kind in vars(pyvelo.errors).items() if isinstance(kind, type)}
    for name, kind in kinds.items():
        assert issubclass(kind, VeloError)
        assert getattr(pyvelo, name) is kind
        assert name in pyvelo.__all__


def test_what_the_library_says_goes_to_its_logger() -> None:
    """Nothing is printed in another way, and nothing is loaded to say it."""
    source = Path(pyvelo.__file__).parent
    files = [path for path in source.rglob("*.py") if "cli" not in path.parts]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert "warnings.warn(" not in text, path
        assert "\n    print(" not in text, path
        names = set(re.findall(r"getLogger\((.*?)\)", text))
        assert names <= {'"pyvelo"', '"pyvelo.llama"', '"pyvelo.server"'}, path


def test_the_user_decides_about_the_log(tiny_model_f32: Path) -> None:
    """Without a word a warning is one line on standard error; a handler of the user's gets it instead."""
    code = (
        "import io, logging, sys; from pyvelo import LLM; seen = io.StringIO()\n"
        "if sys.argv[2] == 'own': logging.getLogger('pyvelo').addHandler(logging.StreamHandler(seen))\n"
        "LLM(sys.argv[1], n_ctx=8192, n_threads=1).close()\n"
        "print(seen.getvalue(), end='')"
    )
    line = "n_ctx=8192 is longer than the 4096 tokens the model was trained on\n"
    for kind, out, err in (("plain", "", line), ("own", line, "")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tiny_model_f32), kind],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == (out, err)
    assert logging.getLogger("pyvelo").level == logging.NOTSET


def test_the_repr_of_an_llm(tiny_model: Path) -> None:
    llm = LLM(tiny_model, n_ctx=512, kv_type=("q8_0", "f16"), kv_cache_bytes=1 << 20)
    blocks = f"{llm.stats().blocks_total:,} blocks of 32 tokens in q8_0 and f16"
    description = llm.info.description
    assert description == "llama Q8_0"
    assert repr(llm) == f"<LLM: {description}, 512 tokens, {blocks}>"
    html = llm._repr_html_()
    assert html.count("<tr>") == html.count("</tr>") == 3
    assert blocks in html
    llm.close()
    assert repr(llm) == f"<LLM: {description}, 512 tokens, {blocks}, closed>"
    assert "in f16>" in repr(LLM(tiny_model, n_ctx=512))
    assert repr(LLM.__new__(LLM)) == "<LLM: not loaded>"  # as in a traceback of its constructor


def test_the_repr_of_a_session(tiny_model: Path) -> None:
    with LLM(tiny_model, n_ctx=512) as llm:
        session = llm.session([1, 2, 3])
        assert repr(session) == "<Session: 3 tokens>"
        session.close()
        assert repr(session) == "<Session: 3 tokens, closed>"


def test_the_repr_of_an_async_llm(tiny_model: Path) -> None:
    async def run() -> tuple[str, str]:
        llm = AsyncLLM(tiny_model, n_ctx=512)
        before = repr(llm)
        async with llm:
            return before, repr(llm)

    before, there = asyncio.run(run())
    assert before == "<AsyncLLM: not loaded>"
    assert "512 tokens" in there


def test_a_name_in_a_file_is_text_in_html(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_model, n_ctx=512) as llm:
        monkeypatch.setattr(llm._engine.model, "info", replace(llm.info, description="<script>&"))
        assert "&lt;script&gt;&amp;" in llm._repr_html_()
        assert "<script" not in llm._repr_html_()


def test_names_of_others_say_what_is_meant(tiny_model: Path) -> None:
    with LLM(tiny_model, n_ctx=512) as llm:
        for name, meant in ELSEWHERE.items():
            assert not hasattr(llm, name)
            assert hasattr(LLM, meant)
            with pytest.raises(AttributeError, match=f"'LLM' object has no attribute '{name}': use {meant}$"):
                getattr(llm, name)
        with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'nonsense'$"):
            _ = llm.nonsense  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"'LLM' object is not callable: use generate\(prompt\)"):
            llm("Hi", max_tokens=8)  # type: ignore[operator]
        (output,) = llm.generate(["Hi"], pyvelo.SamplingParams(max_tokens=1))
        with pytest.raises(
            TypeError, match="a RequestOutput has no 'choices': use its attributes, such as text"
        ):
            output["choices"]  # type: ignore[index]


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_settings_of_few_values_name_them(face: type) -> None:
    """What the types name is what the settings accept, no more and no less."""
    kinds = {name: each.annotation for name, each in inspect.signature(face).parameters.items()}
    assert (kinds["kv_type"], kinds["n_gpu_layers"]) == ("KVTypes", "GpuLayers")
    assert kinds["attention_precision"] == "Precision"
    assert inspect.signature(face.embed).parameters["pooling"].annotation == "Pooling | None"  # type: ignore[attr-defined]
    assert typing.get_args(pyvelo.KVType) == tuple(KV_TYPES)
    assert typing.get_args(pyvelo.Pooling) == tuple(POOLINGS)
    for precision in typing.get_args(pyvelo.Precision):
        EngineConfig(model="m.gguf", attention_precision=precision)


def test_every_public_name_exists() -> None:
    for name in pyvelo.__all__:
        assert getattr(pyvelo, name) is not None
    code = "import sys, pyvelo; sys.exit(any(m.startswith(('pyvelo.native', 'numpy')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
