"""The demo model: its dialogues, its vocabulary against llama.cpp's reading of it, its file."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from pyvelo import LLM
from pyvelo.models.gguf_scan import scan
from pyvelo.native import Model
from scripts.demo import _about as about
from scripts.demo import _dialogues as dialogues
from scripts.demo import _texts as texts
from scripts.demo import quality
from scripts.demo._dialogues import FIRST, HEARD, Dialogue
from scripts.demo._export import write_gguf
from scripts.demo._shape import Config, shapes
from scripts.demo._vocab import END, Vocab, cut, demo_vocab, spoken


@pytest.fixture(scope="module")
def vocab() -> Vocab:
    return demo_vocab()


@pytest.fixture(scope="module")
def random_model(vocab: Vocab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(len(vocab), width=64, layers=1, ffn=64)
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes(config).items()}
    path = tmp_path_factory.mktemp("demo") / "random.gguf"
    write_gguf(path, vocab, config, tensors)
    return path


# ---- vocabulary ----


def test_every_word_is_one_token(vocab: Vocab) -> None:
    for word in vocab.words:
        assert vocab._piece(word) == [vocab.ids[word]], word


def test_a_person_is_a_name_a_surname_and_digits(vocab: Vocab) -> None:
    said = [vocab.tokens[i] for i in vocab.encode("Anna Berger 4821.")]
    assert said == ["Anna", "\u0120Berger", "\u01204", "8", "2", "1", "."]


def test_any_text_survives_encoding(vocab: Vocab) -> None:
    for text in (
        " Who is Anna?",
        " Zx\u00fcglein \u65e5\u672c \U0001f600",
        " a  b\n\tc",
        "caf\u00e9's 12+30 = ?",
        "",
    ):
        assert vocab.decode(vocab.encode(text)) == text


def test_llama_cpp_reads_as_the_training_did(vocab: Vocab, random_model: Path) -> None:
    rng = Random(3)
    said = [
        text
        for i in range(30)
        for turn in dialogues.training(vocab, Random(i), 300).messages
        for text in turn
    ]
    odd = [
        "na\u00efve \u65e5\u672c \U0001f600",
        "don't",
        "what's up?!",
        "PyVelo",
        "Annabel",
        "x" * 50,
        "a\nb",
        "3.14",
        "McDonald",
    ]
    letters = "abAB 12.?'\n\u00e9"
    odd += ["".join(rng.choices(letters, k=20)) for _ in range(200)]
    with Model(random_model) as model:
        for text in said + odd:
            for spaced in (text, " " + text):
                read = list(model.tokenize(spaced, add_special=False))
                assert read == vocab.encode(spaced), spaced


def test_the_template_makes_what_was_trained(vocab: Vocab, random_model: Path) -> None:
    dialogue = dialogues.training(vocab, Random(5), 200)
    *before, (question, answer) = dialogue.messages
    template = quality.template_of(random_model)
    with LLM(random_model) as llm:
        prompt = quality.ids_of(llm, template, before, question)
    assert prompt + vocab.encode(answer) + [vocab.ids[END]] == dialogue.ids


# ---- dialogues ----


def test_the_same_numbers_make_the_same_dialogue(vocab: Vocab) -> None:
    one, same, other = (dialogues.training(vocab, Random(seed), 400) for seed in (1, 1, 2))
    assert one.ids == same.ids
    assert one.ids != other.ids
    assert len(one.ids) == len(one.kinds) > 400


def test_only_answers_are_learned_and_of_spoken_tokens(vocab: Vocab) -> None:
    said = set(spoken(vocab))
    for make in (dialogues.training, dialogues.drill):
        for seed in range(20):
            dialogue = make(vocab, Random(seed), 300)
            learned = {i for i, kind in zip(dialogue.ids, dialogue.kinds, strict=True) if kind != HEARD}
            assert learned <= said


def test_the_answer_is_the_named_person(vocab: Vocab) -> None:
    for seed in range(20):
        dialogue = dialogues.training(vocab, Random(seed), 500)
        assert len({p.name for p in dialogue.people}) == len(dialogue.people)
        assert len({p.surname for p in dialogue.people}) == len(dialogue.people)
        told = {p.put(texts.PERSON) for p in dialogue.people}
        asked = [
            answer for _, answer in dialogue.messages if answer[-5:-1].isdigit() and ", so" not in answer
        ]
        assert set(asked) <= told
        firsts = [
            vocab.tokens[i] for i, kind in zip(dialogue.ids, dialogue.kinds, strict=True) if kind == FIRST
        ]
        assert {first[1:] for first in firsts} <= {p.surname for p in dialogue.people}


def test_a_probe_keeps_its_distance(vocab: Vocab) -> None:
    dialogue, people = dialogues.probe(vocab, Random(1), 1500)
    assert len(people) == 5
    talk = Dialogue(vocab, Random(1))
    for _ in people:
        talk.tell()
    assert len(dialogue.ids) - len(talk.ids) >= 1500
    assert not any(
        question == p.put(ask) for question, _ in dialogue.messages for p in people for ask in texts.ASK
    )


@pytest.mark.parametrize(
    ("x", "y", "answer"),
    [
        (12, 30, "2 + 0 = 2, 1 + 3 = 4, so 42."),
        (17, 38, "7 + 8 = 15, 1 + 3 + 1 = 5, so 55."),
        (7, 8, "7 + 8 = 15, 0 + 0 + 1 = 1, so 15."),
        (99, 99, "9 + 9 = 18, 9 + 9 + 1 = 19, so 198."),
    ],
)
def test_a_sum_is_worked_out(x: int, y: int, answer: str) -> None:
    assert dialogues.sum_answer(x, y) == answer


def test_a_tenth_of_all_sums_is_held_out(vocab: Vocab) -> None:
    pairs = [(x, y) for x in range(100) for y in range(100)]
    assert sum(dialogues.held_out(x, y) for x, y in pairs) == 1000
    assert not dialogues.held_out(12, 30)
    dialogue = Dialogue(vocab, Random(0))
    for _ in range(300):
        dialogue.add_up()
    questions = {question for question, _ in dialogue.messages}
    kept = {t.format(x=x, y=y) for t in texts.SUM for x, y in pairs if dialogues.held_out(x, y)}
    assert not questions & kept


def test_no_question_has_two_answers() -> None:
    asked: dict[str, str] = {}
    for questions, answer in about.ABOUT:
        for question in questions:
            assert asked.setdefault(question.lower().rstrip("?.!"), answer) == answer, question


# ---- the file ----


def test_the_file_is_grouped_query_attention_with_heads_of_64(random_model: Path) -> None:
    summary = scan(random_model)
    assert summary.architecture == "qwen3"
    assert summary.of_architecture("attention.key_length") == 64
    assert summary.of_architecture("attention.head_count") == 2 * summary.of_architecture(
        "attention.head_count_kv"
    )
    assert summary.of_architecture("context_length") >= 2048
    assert next(iter(summary.quantization)) == "q8_0"


def test_a_tensor_of_another_shape_is_refused(vocab: Vocab, tmp_path: Path) -> None:
    config = Config(len(vocab), layers=0)
    tensors = {n: np.zeros(shape, np.float32) for n, shape in shapes(config).items()}
    tensors["output_norm.weight"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="output_norm"):
        write_gguf(tmp_path / "x.gguf", vocab, config, tensors)
    assert not (tmp_path / "x.gguf").exists()


def test_pieces_are_byte_letters() -> None:
    assert cut("Hi you's 12") == ["Hi", "\u0120you", "'s", "\u012012"]
