"""Metadata and tensors of a model of each architecture, from a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from scripts.models import _recurrent
from scripts.models._tensors import (
    LOUD,
    SHARP,
    Shape,
    ShapeError,
    Tensor,
    experts,
    ffn,
    plain,
    post_norms,
    qk_norms,
    qkv_biases,
    qkvo,
)

__all__ = ["ARCHS", "PRESETS", "Shape", "ShapeError", "Tensor", "check", "metadata", "tensors"]

PRESETS: dict[str, tuple[Shape, str]] = {
    "tiny": (Shape(), "q8_0"),
    "qwen3-0.6b": (
        Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 40960, "qwen2", 1e6),
        "Q4_K_M",
    ),
    "llama-3.2-1b": (
        Shape("llama", 16, 2048, 8192, 32, 8, 64, 131072, "llama-bpe", 500000.0),
        "Q4_K_M",
    ),
    "qwen3.5-0.8b": (
        Shape(
            "qwen35", 24, 1024, 3584, 8, 2, 256, 262144, "qwen2", 1e7, period=4, state_dim=128, state_heads=16
        ),
        "Q4_K_M",
    ),
    "lfm2-350m": (
        Shape("lfm2", 16, 1024, 4608, 16, 8, 64, 128000, "qwen2", 1e6, period=3),
        "Q4_K_M",
    ),
    "granite-4-h-350m": (
        Shape(
            "granitehybrid",
            32,
            768,
            2048,
            12,
            4,
            64,
            32768,
            "qwen2",
            1e4,
            period=8,
            state_dim=128,
            state_heads=48,
        ),
        "Q4_K_M",
    ),
}


EXPERTS_USED = {"llama": 2, "gpt-oss": 4, "qwen3moe": 8}
"""Experts of a token, if there are at least twice as many."""
NEED_EXPERTS = ("gpt-oss", "qwen3moe")


def check(shape: Shape) -> None:
    """Raise ShapeError if no model of this shape can exist."""
    for name in ("layers", "embd", "ffn", "heads", "kv_heads", "head_dim", "ctx"):
        if getattr(shape, name) < 1:
            raise ShapeError(f"{name} must be at least 1, not {getattr(shape, name)}")
    if shape.arch not in ARCHS:
        raise ShapeError(f"architecture {shape.arch!r} is not among {', '.join(ARCHS)}")
    if shape.heads % shape.kv_heads:
        raise ShapeError(f"{shape.heads} heads do not divide among {shape.kv_heads} KV heads")
    if shape.head_dim % 2:
        raise ShapeError(f"head_dim must be even for the rotary embedding, not {shape.head_dim}")
    width = shape.heads * shape.head_dim
    if shape.arch in ("qwen2", "lfm2", "bert", "nomic-bert") and width != shape.embd:
        raise ShapeError(f"{shape.arch} needs heads * head_dim = embd, but {width} is not {shape.embd}")
    if shape.pooling and shape.pooling not in POOLINGS:
        raise ShapeError(f"pooling {shape.pooling!r} is not among {', '.join(POOLINGS)}")
    if shape.arch == "t5encoder" and shape.kv_heads != shape.heads:
        raise ShapeError(f"t5encoder has as many KV heads as heads, {shape.heads}, not {shape.kv_heads}")
    if shape.window and shape.arch not in WINDOWED:
        raise ShapeError(f"{shape.arch} has no sliding window; {', '.join(WINDOWED)} have")
    if shape.experts and shape.arch not in EXPERTS_USED:
        raise ShapeError(f"experts are written for {', '.join(EXPERTS_USED)}, not for {shape.arch}")
    if shape.arch in NEED_EXPERTS and not shape.experts:
        raise ShapeError(f"{shape.arch} needs experts: add --experts 4")
    if shape.arch in ("lfm2", "granitehybrid", "qwen35", "gemma4") and shape.layers < shape.period:
        raise ShapeError(
            f"{shape.arch} needs {shape.period} layers or more: every {shape.period}th is another one"
        )
    if shape.arch == "deepseek2" and shape.layers in (26, 27, 48):
        raise ShapeError(
            f"deepseek2 with {shape.layers} layers is read as another model; take another number"
        )


def metadata(shape: Shape) -> dict[str, Any]:
    """Return the GGUF keys of the architecture, without the tokenizer's."""
    keys: dict[str, Any] = {
        "context_length": shape.ctx,
        "embedding_length": shape.embd,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_base,
    }
    if shape.arch in WINDOWED:
        keys["attention.sliding_window"] = shape.window or WINDOWED[shape.arch]
    if shape.experts:
        used = min(EXPERTS_USED[shape.arch], -(-shape.experts // 2))
        keys |= {"expert_count": shape.experts, "expert_used_count": used}
        keys["expert_feed_forward_length"] = shape.ffn
    if shape.pooling:
        keys["pooling_type"] = POOLINGS[shape.pooling]
    keys |= ARCHS[shape.arch].keys(shape)
    named = {f"{shape.arch}.{key}": value for key, value in keys.items()}
    return named | ({"tokenizer.ggml.token_type_count": TOKEN_TYPES} if shape.arch in ENCODERS else {})


def tensors(shape: Shape, n_vocab: int) -> Iterator[Tensor]:
    """Yield every tensor of the model, in the order of the file.

    The embedding has small values and the last norm large ones: otherwise a model whose output shares the
    embedding would repeat one token.
    """
    # gemma multiplies the embedding by the root of its width
    quiet = shape.embd**-0.5 if shape.arch.startswith("gemma") else 1.0
    yield Tensor("token_embd.weight", (n_vocab, shape.embd), "embedding", quiet)
    prefix = "enc.blk" if shape.arch == "t5encoder" else "blk"
    for layer in range(shape.layers):
        for tensor in ARCHS[shape.arch].layer(shape, layer):
            yield tensor._replace(name=f"{prefix}.{layer}.{tensor.name}")
    if shape.arch in ENCODERS:
        yield from ENCODERS[shape.arch](shape)
        return
    if shape.arch == "gemma4":
        yield Tensor("rope_freqs.weight", (shape.head_dim,), "norm")
    separate = not shape.tied or shape.arch == "gpt-oss"
    last_norm = "token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight"
    yield Tensor(last_norm, (shape.embd,), "norm", LOUD / (1.0 if separate else quiet))
    if separate:
        yield Tensor("output.weight", (n_vocab, shape.embd), "embedding")


class Arch(NamedTuple):
    keys: Callable[[Shape], dict[str, Any]]
    layer: Callable[[Shape, int], Iterator[Tensor]]


def _gpt_oss_layer(s: Shape) -> Iterator[Tensor]:
    yield from qkvo(s)
    yield from qkv_biases(s)
    yield Tensor("attn_output.bias", (s.embd,), "bias")
    yield Tensor("attn_sinks.weight", (s.heads,), "norm")
    yield Tensor("post_attention_norm.weight", (s.embd,), "norm")
    yield from experts(s)
    yield Tensor("ffn_gate_inp.bias", (s.experts,), "bias")
    yield Tensor("ffn_gate_exps.bias", (s.experts, s.ffn), "bias")
    yield Tensor("ffn_up_exps.bias", (s.experts, s.ffn), "bias")
    yield Tensor("ffn_down_exps.bias", (s.experts, s.embd), "bias")


class Mla(NamedTuple):
    """Widths of multi-head latent attention, which follow from head_dim, the width of a head's values."""

    rank_q: int
    rank_kv: int
    rope: int
    key: int


def _mla(s: Shape) -> Mla:
    rope = s.head_dim // 2
    return Mla(rank_q=s.embd // 2, rank_kv=4 * s.head_dim, rope=rope, key=s.head_dim + rope)


def _deepseek2_keys(s: Shape) -> dict[str, Any]:
    mla = _mla(s)
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": mla.rank_kv + mla.rope,
        "attention.value_length": mla.rank_kv,
        "attention.key_length_mla": mla.key,
        "attention.value_length_mla": s.head_dim,
        "attention.q_lora_rank": mla.rank_q,
        "attention.kv_lora_rank": mla.rank_kv,
        "rope.dimension_count": mla.rope,
        "leading_dense_block_count": s.layers,
        "expert_count": 0,
        "expert_shared_count": 0,
        "expert_feed_forward_length": s.ffn,
    }


def _deepseek2_layer(s: Shape) -> Iterator[Tensor]:
    mla = _mla(s)
    yield Tensor("attn_norm.weight", (s.embd,), "norm")
    yield Tensor("attn_q_a.weight", (mla.rank_q, s.embd), "matrix")
    yield Tensor("attn_q_a_norm.weight", (mla.rank_q,), "norm")
    yield Tensor("attn_q_b.weight", (s.heads * mla.key, mla.rank_q), "matrix", SHARP)
    yield Tensor("attn_kv_a_mqa.weight", (mla.rank_kv + mla.rope, s.embd), "matrix", SHARP)
    yield Tensor("attn_kv_a_norm.weight", (mla.rank_kv,), "norm")
    yield Tensor("attn_k_b.weight", (s.heads, mla.rank_kv, s.head_dim), "matrix")
    yield Tensor("attn_v_b.weight", (s.heads, s.head_dim, mla.rank_kv), "matrix")
    yield Tensor("attn_output.weight", (s.embd, s.heads * s.head_dim), "matrix")
    yield from ffn(s)


# of BERT's sentences A and B
TOKEN_TYPES = 2


def _bert_keys(s: Shape) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": 1e-6, "attention.causal": False}


def _norm_and_bias(s: Shape, name: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (s.embd,), "norm")
    yield Tensor(f"{name}.bias", (s.embd,), "bias")


def _bert_outside(s: Shape) -> Iterator[Tensor]:
    if s.arch == "bert":
        yield Tensor("position_embd.weight", (s.ctx, s.embd), "router", s.embd**0.5)
    yield Tensor("token_types.weight", (TOKEN_TYPES, s.embd), "router", s.embd**0.5)
    yield from _norm_and_bias(s, "token_embd_norm")


def _bert_layer(s: Shape) -> Iterator[Tensor]:
    biases = s.arch == "bert"
    for tensor in qkvo(s):
        if tensor.name != "attn_norm.weight":
            yield tensor
    if biases:
        yield from qkv_biases(s)
        yield Tensor("attn_output.bias", (s.embd,), "bias")
    yield from _norm_and_bias(s, "attn_output_norm")
    for tensor in ffn(s):
        gated = tensor.name == "ffn_gate.weight"
        if tensor.kind == "matrix" and not (biases and gated):
            yield tensor
    if biases:
        yield Tensor("ffn_up.bias", (s.ffn,), "bias")
        yield Tensor("ffn_down.bias", (s.embd,), "bias")
    yield from _norm_and_bias(s, "layer_output_norm")


def _t5_keys(s: Shape) -> dict[str, Any]:
    return {"attention.relative_buckets_count": 32}


def _t5_layer(s: Shape, number: int) -> Iterator[Tensor]:
    for tensor in qkvo(s):
        yield tensor._replace(name=tensor.name.replace("attn_output", "attn_o"))
    if number == 0:
        yield Tensor("attn_rel_b.weight", (32, s.heads), "router", s.heads**0.5)
    yield from ffn(s)


def _t5_outside(s: Shape) -> Iterator[Tensor]:
    yield Tensor("enc.output_norm.weight", (s.embd,), "norm")


def _no_keys(s: Shape) -> dict[str, Any]:
    return {}


def _gemma2_keys(s: Shape) -> dict[str, Any]:
    return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _is_full(s: Shape, number: int) -> bool:
    """Return whether a layer of Gemma 4 attends all tokens; the others have a window."""
    return (number + 1) % s.period == 0


def _full_heads(s: Shape) -> int:
    """Return the KV heads of a layer of Gemma 4 without a window. They are twice as wide, and fewer."""
    return max(1, s.kv_heads // 4)


def _gemma4_keys(s: Shape) -> dict[str, Any]:
    full = [_is_full(s, number) for number in range(s.layers)]
    return {
        "attention.head_count_kv": [_full_heads(s) if each else s.kv_heads for each in full],
        "attention.key_length": 2 * s.head_dim,
        "attention.value_length": 2 * s.head_dim,
        "attention.key_length_swa": s.head_dim,
        "attention.value_length_swa": s.head_dim,
        "attention.sliding_window_pattern": [not each for each in full],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 2 * s.head_dim,
        "rope.dimension_count_swa": s.head_dim,
        "rope.freq_base_swa": s.rope_base,
    }


def _gemma4_layer(s: Shape, number: int) -> Iterator[Tensor]:
    full = _is_full(s, number)
    here = replace(s, head_dim=2 * s.head_dim, kv_heads=_full_heads(s)) if full else s
    yield from qkvo(here)
    yield from qk_norms(here)
    yield from ffn(s)
    yield from post_norms(s)


def _deci_heads(s: Shape, number: int) -> tuple[int, int]:
    """Return heads and KV heads of a layer of DeciLM: attention, none, linear attention, or one KV head."""
    return ((s.heads, s.kv_heads), (0, 0), (s.heads, 0), (s.heads, 1))[number % 4]


def _deci_keys(s: Shape) -> dict[str, Any]:
    heads = [_deci_heads(s, number) for number in range(s.layers)]
    return {
        "attention.head_count": [each for each, _ in heads],
        "attention.head_count_kv": [each for _, each in heads],
        "feed_forward_length": [s.ffn] * s.layers,
    }


def _deci_layer(s: Shape, number: int) -> Iterator[Tensor]:
    heads, kv_heads = _deci_heads(s, number)
    if kv_heads:
        yield from qkvo(replace(s, kv_heads=kv_heads))
    elif heads:
        yield Tensor("attn_norm.weight", (s.embd,), "norm")
        yield Tensor("attn_output.weight", (s.embd, s.embd), "matrix")
    yield from ffn(s)


POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}

WINDOWED = {"gemma2": 128, "gemma3": 128, "gemma4": 128, "gpt-oss": 128}

ARCHS: dict[str, Arch] = {
    "llama": Arch(_no_keys, plain(qkvo, ffn)),
    "qwen2": Arch(_no_keys, plain(qkvo, qkv_biases, ffn)),
    "qwen3": Arch(_no_keys, plain(qkvo, qk_norms, ffn)),
    "qwen3moe": Arch(_no_keys, plain(qkvo, qk_norms, ffn)),
    "gemma2": Arch(_gemma2_keys, plain(qkvo, ffn, post_norms)),
    "gemma3": Arch(_no_keys, plain(qkvo, qk_norms, ffn, post_norms)),
    "gemma4": Arch(_gemma4_keys, _gemma4_layer),
    "gpt-oss": Arch(_no_keys, plain(_gpt_oss_layer)),
    "deci": Arch(_deci_keys, _deci_layer),
    "deepseek2": Arch(_deepseek2_keys, plain(_deepseek2_layer)),
    "lfm2": Arch(_recurrent.lfm2_keys, _recurrent.lfm2_layer),
    "granitehybrid": Arch(_recurrent.granite_keys, _recurrent.granite_layer),
    "qwen35": Arch(_recurrent.qwen35_keys, _recurrent.qwen35_layer),
    "mamba2": Arch(_recurrent.mamba2_keys, _recurrent.mamba2_layer),
    "bert": Arch(_bert_keys, plain(_bert_layer)),
    "nomic-bert": Arch(_bert_keys, plain(_bert_layer)),
    "t5encoder": Arch(_t5_keys, _t5_layer),
}

# their tensors outside the layers, without the embedding
ENCODERS: dict[str, Callable[[Shape], Iterator[Tensor]]] = {
    "bert": _bert_outside,
    "nomic-bert": _bert_outside,
    "t5encoder": _t5_outside,
}
