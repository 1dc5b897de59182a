"""Seeded damage to a GGUF: to its bytes, metadata, vocabulary, tensor table and weights."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from pathlib import Path

from scripts.fuzz._damage_tensors import (
    NUMBERS,
    add_tensor,
    drop_tensor,
    misplace,
    other_kind,
    rename,
    reshape,
    resize_all,
    weights,
)
from scripts.fuzz._document import ARRAY, CODES, STRING, Document, Value, read_document, write_document

REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3.4e38, float("inf"), -float("inf"), float("nan"))
TEXTS = (
    b"", b" ", b"a", b"\x00", b"a\x00b", b"\xff", b"\xf0\x9f", b"%s%n%s", b"{{", b"llama", b"gpt2",
    b"bert", b"t5", b"rwkv", b"plamo2", b"gemma4", b"hybriddna", b"none", b"no_vocab", b"default",
    b"qwen2", b"llama-bpe", b"yarn", b"linear", b"longrope", b"<0x0", b"<0xZZ>", b"'", b"'\\", b"\\x",
    b"'\\x4", b"b'\\xff'", b"x" * 300, b"\n" * 9, b"[" * 500, b"<s>", b"</s>", b"\xe2\x96\x81",
)  # fmt: skip
_ARCHITECTURES = """
llama llama4 deci falcon grok gpt2 gptneox mpt baichuan starcoder refact bert bloom stablelm qwen qwen2
qwen2moe qwen2vl qwen3 qwen3moe qwen3next phi2 phi3 phimoe plamo plamo2 orion internlm2 minicpm minicpm3
gemma gemma2 gemma3 gemma3n gemma4 gemma-embedding starcoder2 mamba mamba2 jamba falcon-h1 xverse command-r
cohere2 dbrx olmo olmo2 olmoe openelm arctic deepseek deepseek2 chatglm glm4 glm4moe bitnet t5 t5encoder
jais nemotron nemotron_h exaone exaone4 rwkv6 rwkv7 granite granitemoe granitehybrid chameleon
wavtokenizer-dec plm bailingmoe dots1 arcee ernie4_5 hunyuan-moe hunyuan-dense smollm3 gpt-oss lfm2 lfm2moe
dream smallthinker llada seed_oss grovemoe apertus minimax-01 cogvlm clip eagle3 kimi-linear step35 mistral3
mistral4 nonesuch
"""
_KEYS = """
vocab_size context_length embedding_length embedding_length_out block_count leading_dense_block_count
feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length use_parallel_residual
expert_count expert_used_count expert_shared_count expert_group_count expert_group_used_count
expert_weights_scale expert_weights_norm expert_gating_func moe_every_n_layers nextn_predict_layers
n_deepstack_layers pooling_type logit_scale attn_logit_softcapping router_logit_softcapping
final_logit_softcapping residual_scale embedding_scale token_shift_count interleave_moe_layer_step
full_attention_interval num_loops attention.head_count attention.head_count_kv attention.max_alibi_bias
attention.clamp_kqv attention.key_length attention.value_length attention.layer_norm_epsilon
attention.layer_norm_rms_epsilon attention.group_norm_epsilon attention.group_norm_groups attention.causal
attention.q_lora_rank attention.kv_lora_rank attention.relative_buckets_count attention.sliding_window
attention.sliding_window_pattern attention.scale attention.output_scale attention.temperature_length
attention.temperature_scale attention.key_length_mla attention.value_length_mla attention.key_length_swa
attention.value_length_swa attention.shared_kv_layers attention.recurrent_layers rope.dimension_count
rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear
rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length
rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor rope.scaling.yarn_beta_fast ssm.conv_kernel
ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms wkv.head_size
shortconv.l_cache classifier.output_labels hidden_activation swin_norm
"""
_GLOBAL_KEYS = """
general.alignment general.file_type general.quantization_version general.type general.sampling.temp split.no
split.count split.tensors.count tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens
tokenizer.ggml.token_type tokenizer.ggml.token_type_count tokenizer.ggml.scores tokenizer.ggml.merges
tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id
tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id tokenizer.ggml.seperator_token_id
tokenizer.ggml.padding_token_id tokenizer.ggml.mask_token_id tokenizer.ggml.add_bos_token
tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token tokenizer.ggml.add_space_prefix
tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.precompiled_charsmap tokenizer.rwkv.world
tokenizer.chat_template tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_pad_token_id
tokenizer.ggml.suppress_tokens tokenizer.ggml.normalizer.lowercase
"""
ARCHITECTURES, KEYS, GLOBAL_KEYS = _ARCHITECTURES.split(), _KEYS.split(), _GLOBAL_KEYS.split()

Damage = Callable[[random.Random, Document], None]


def mutant(bases: list[Path], seed: int, index: int) -> tuple[str, bytes]:
    """Return the `index`-th mutant of `seed`: a description and the bytes.

    The arguments alone decide them.
    """
    draw = random.Random(f"{seed}/{index}")
    base = draw.choice(bases)
    document = copy.deepcopy(_cached(base))
    done = [base.stem]
    done += [damage(draw, document) for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5)))]
    data = bytearray(write_document(document))
    if draw.random() < 0.2:
        done.append(_bytes(draw, data))
    return " ".join(done), bytes(data)


def damage(draw: random.Random, document: Document) -> str:
    """Damage the document in one way; return the name of the damage."""
    way = draw.choice(DAMAGES)
    way(draw, document)
    return way.__name__.strip("_")


_documents: dict[Path, Document] = {}


def _cached(path: Path) -> Document:
    if path not in _documents:
        _documents[path] = read_document(path)
    return _documents[path]


def _bytes(draw: random.Random, data: bytearray) -> str:
    """Change bytes in place, most in the head, or cut or lengthen the file."""
    if draw.random() < 0.3:
        del data[draw.randrange(len(data)) :]
        return "cut"
    if draw.random() < 0.1:
        data += bytes(draw.randrange(1, 4096))
        return "lengthened"
    limit = draw.choice((64, 4096, len(data), len(data)))
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(min(limit, len(data)))
        if draw.random() < 0.5:
            data[at] ^= 1 << draw.randrange(8)
        else:
            word = struct.pack("<Q", draw.choice(NUMBERS) & ((1 << 64) - 1))[: draw.choice((1, 4, 8))]
            data[at : at + len(word)] = word[: len(data) - at]
    return "bytes"


# ---- metadata ----


def _some(draw: random.Random, document: Document) -> Value | None:
    return draw.choice(document.values) if document.values else None


def _scalar(draw: random.Random, kind: int) -> int | float | bytes:
    if kind == STRING:
        return draw.choice(TEXTS)
    if kind in (6, 12):
        return draw.choice((*REALS, draw.uniform(-10, 10)))
    return draw.choice(NUMBERS)


def _set_value(draw: random.Random, document: Document) -> None:
    value = _some(draw, document)
    if value is None:
        return
    if value.kind == ARRAY:
        _change_array(draw, value)
    elif isinstance(value.data, int) and draw.random() < 0.4:
        value.data += draw.choice((-1, 1, -2, 2, 32, -32, value.data))
    else:
        value.data = _scalar(draw, value.kind)


def _set_hyperparameter(draw: random.Random, document: Document) -> None:
    prefix = document.architecture.encode() + b"."
    own = [v for v in document.values if v.key.startswith(prefix)]
    if not own:
        return
    value = draw.choice(own)
    if value.kind == ARRAY:
        _change_array(draw, value)
    elif isinstance(value.data, int) and draw.random() < 0.5:
        value.data = max(
            0, value.data + draw.choice((-1, 1, -2, 2, 16, -16, 32, -32, value.data, -value.data // 2))
        )
    else:
        value.data = _scalar(draw, value.kind)


def _change_array(draw: random.Random, value: Value) -> None:
    items = value.data
    if not isinstance(items, list):
        return
    match draw.randrange(5):
        case 0:
            del items[draw.randrange(len(items) + 1) :]
        case 1:
            items += [_scalar(draw, value.item_kind)] * draw.choice((1, 3, 1000))
        case 2:
            value.count = draw.choice(NUMBERS)
        case 3 if items:
            for _ in range(draw.choice((1, 3, 50))):
                items[draw.randrange(len(items))] = _scalar(draw, value.item_kind)
        case _ if items:
            items[:] = draw.choices(items, k=len(items))


def _retype(draw: random.Random, document: Document) -> None:
    value = _some(draw, document)
    if value is None:
        return
    if value.kind == ARRAY:
        value.item_kind = draw.choice((*CODES, STRING, ARRAY, 13, 99))
    elif draw.random() < 0.3:
        value.item_kind, value.kind = value.kind, ARRAY
        value.data = [value.data] * draw.choice((0, 1, 2, 4, 512, 513))
    else:
        value.kind = draw.choice((*CODES, STRING, 13, 1 << 31))
        if value.kind == STRING:
            value.data = draw.choice(TEXTS)
        elif isinstance(value.data, bytes):
            value.data = _scalar(draw, value.kind)


def _drop_value(draw: random.Random, document: Document) -> None:
    if document.values:
        document.values.pop(draw.randrange(len(document.values)))


def _double_value(draw: random.Random, document: Document) -> None:
    value = _some(draw, document)
    if value is not None:
        document.values.append(copy.deepcopy(value))


def _add_value(draw: random.Random, document: Document) -> None:
    """Add a key that llama.cpp knows, of any type, in place of one of the same name."""
    own = draw.random() < 0.7
    key = f"{document.architecture}.{draw.choice(KEYS)}" if own else draw.choice(GLOBAL_KEYS)
    kind = draw.choice((4, 4, 4, 5, 6, 6, 7, 8, 10))
    document.values = [v for v in document.values if v.key != key.encode()]
    if draw.random() < 0.25:
        count = draw.choice((0, 1, 2, 3, 4, 5, 64, 513))
        document.values.append(Value(key.encode(), ARRAY, [_scalar(draw, kind) for _ in range(count)], kind))
    else:
        small = kind in (4, 5, 10) and draw.random() < 0.6
        data = draw.randrange(9) if small else _scalar(draw, kind)
        document.values.append(Value(key.encode(), kind, data))


def _other_architecture(draw: random.Random, document: Document) -> None:
    """Rename the architecture; keep the numbers."""
    old = document.architecture
    new = draw.choice(ARCHITECTURES)
    for value in document.values:
        if value.key == b"general.architecture":
            value.data = new.encode()
        elif value.key.startswith(old.encode() + b"."):
            value.key = new.encode() + value.key[len(old) :]


# ---- vocabulary ----


def _vocabulary(draw: random.Random, document: Document) -> None:
    own = [v for v in document.values if v.key.startswith(b"tokenizer.")]
    if not own:
        return
    value = draw.choice(own)
    if value.kind == ARRAY:
        _change_array(draw, value)
    else:
        value.data = _scalar(draw, value.kind)


def _other_tokenizer(draw: random.Random, document: Document) -> None:
    value = document.find("tokenizer.ggml.model")
    if value is not None and value.kind == STRING:
        value.data = draw.choice(
            (b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"gemma4", b"hybriddna", b"none", b"")
        )
    if draw.random() < 0.5:
        merges = [draw.choice((b"a b", b"th e", b"ab", b"", b" ", b"a  b", b"\xff \xfe")) for _ in range(9)]
        document.values.append(Value(b"tokenizer.ggml.merges", ARRAY, merges, STRING))
    if draw.random() < 0.3:
        noise = [draw.randrange(256) for _ in range(draw.choice((0, 3, 4, 8, 64, 4096)))]
        document.values.append(
            Value(b"tokenizer.ggml.precompiled_charsmap", ARRAY, noise, draw.choice((0, 1)))
        )


# ---- counts ----


def _counts(draw: random.Random, document: Document) -> None:
    match draw.randrange(4):
        case 0:
            document.n_values = draw.choice(NUMBERS) & ((1 << 64) - 1)
        case 1:
            document.n_tensors = draw.choice(NUMBERS) & ((1 << 64) - 1)
        case 2:
            document.version = draw.choice((0, 1, 2, 4, 1 << 24))
        case _:
            alignment = draw.choice((1, 8, 64, 256, 1 << 15))
            document.alignment = alignment
            document.values.append(
                Value(b"general.alignment", 4, draw.choice((alignment, alignment, *NUMBERS)))
            )


DAMAGES: tuple[Damage, ...] = (
    _set_value, _set_hyperparameter, _set_hyperparameter, _set_hyperparameter, _retype, _drop_value,
    _double_value, _add_value, _add_value, _add_value, _other_architecture, _other_architecture,
    _vocabulary, _vocabulary, _vocabulary, _other_tokenizer, _other_tokenizer, reshape, resize_all,
    other_kind, rename, add_tensor, drop_tensor, misplace, weights, weights, _counts,
)  # fmt: skip
