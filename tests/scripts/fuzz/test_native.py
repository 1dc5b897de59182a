"""Input of libFuzzer: small models that run, and damage that a seed decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from scripts.fuzz._document import parse_document
from scripts.fuzz._velo_fuzz import TOKENS, mutate, passes, small_vocabulary, without_weights
from scripts.fuzz.native import main, make_seeds

ENCODERS = ("bert", "nomic-bert", "t5encoder")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("seeds")
    make_seeds(folder)
    return sorted(folder.iterdir())


def test_every_seed_is_small_and_runs(seeds: list[Path]) -> None:
    assert {path.name.partition("-")[0] for path in seeds} >= {"llama", "gemma3", "lfm2", "deepseek2"}
    for path in seeds:
        assert path.stat().st_size < 150_000
        with LLM(path, n_ctx=64, kv_cache_bytes=4 << 20, max_num_seqs=1, n_threads=1) as llm:
            assert llm.vocab.n_tokens == len(TOKENS)
            if llm.info.arch in ENCODERS:
                assert llm.embed([[1, 5]], pooling="mean").any()
                continue
            answer = llm.generate([1, 5], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))[0]
            assert answer.usage.completion_tokens == 2


def test_weights_can_go(seeds: list[Path], tmp_path: Path) -> None:
    data = seeds[0].read_bytes()
    empty = without_weights(data)
    assert len(empty) == len(data)
    assert not any(any(entry.data) for entry in parse_document(empty).tensors)
    assert without_weights(b"no document") == b"no document"


def test_damage_is_decided_by_its_seed(seeds: list[Path], tmp_path: Path) -> None:
    data = seeds[0].read_bytes()
    made = [mutate(data, seed, 1 << 20) for seed in range(60)]
    assert made == [mutate(data, seed, 1 << 20) for seed in range(60)]
    assert len(set(made)) > 40
    assert mutate(data, 0, 100) == b""
    assert mutate(data[:50], 0, 1 << 20) == b""
    path = tmp_path / "mutant"
    passed = 0
    for mutant in made:
        path.write_bytes(mutant)
        passed += passes(str(path))
    assert 5 < passed < 60


def test_a_vocabulary_that_is_cut(tiny_model: Path) -> None:
    document = parse_document(small_vocabulary(tiny_model))
    shapes = {entry.name: entry.shape for entry in document.tensors}
    assert shapes[b"token_embd.weight"] == [256, len(TOKENS)]


def test_it_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--minutes" in capsys.readouterr().out
