"""Layers with a recurrent state: short convolutions, Mamba 2, and gated delta nets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.models._tensors import Shape, Tensor, ffn, qk_norms, qkvo

# tokens that a convolution reads, including the current one
SHORT_CONV = 3
CONV = 4
# groups of heads with keys of their own
GROUPS = 2
# how fast a state forgets: a share of each step
DECAY = -0.1


def is_recurrent(s: Shape, number: int) -> bool:
    """Return whether a layer has a state in place of attention."""
    return (number + 1) % s.period != 0


def _kv_heads(s: Shape) -> list[int]:
    return [0 if is_recurrent(s, number) else s.kv_heads for number in range(s.layers)]


def lfm2_keys(s: Shape) -> dict[str, Any]:
    """Return the keys of LFM2."""
    return {"attention.head_count_kv": _kv_heads(s), "shortconv.l_cache": SHORT_CONV}


def lfm2_layer(s: Shape, number: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer of LFM2: a short convolution or attention."""
    if is_recurrent(s, number):
        yield Tensor("attn_norm.weight", (s.embd,), "norm")
        yield Tensor("shortconv.conv.weight", (s.embd, SHORT_CONV), "router")
        yield Tensor("shortconv.in_proj.weight", (3 * s.embd, s.embd), "matrix")
        yield Tensor("shortconv.out_proj.weight", (s.embd, s.embd), "matrix")
    else:
        yield from qkvo(s)
        yield from qk_norms(s)
    yield from ffn(s)


def _mamba_keys(s: Shape, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": 2 * s.embd,
        "ssm.state_size": s.state_dim,
        "ssm.time_step_rank": s.state_heads,
        "ssm.group_count": groups,
    }


def _mamba2(s: Shape, groups: int) -> Iterator[Tensor]:
    inner, width = 2 * s.embd, 2 * groups * s.state_dim
    yield Tensor("attn_norm.weight", (s.embd,), "norm")
    yield Tensor("ssm_in.weight", (2 * inner + width + s.state_heads, s.embd), "matrix")
    yield Tensor("ssm_conv1d.weight", (inner + width, CONV), "router", CONV**0.5)
    yield Tensor("ssm_conv1d.bias", (inner + width,), "bias")
    yield Tensor("ssm_dt.bias", (s.state_heads,), "bias")
    yield Tensor("ssm_a", (s.state_heads, 1), "norm", DECAY)
    yield Tensor("ssm_d", (s.state_heads, 1), "norm")
    yield Tensor("ssm_norm.weight", (groups, inner // groups), "norm")
    yield Tensor("ssm_out.weight", (s.embd, inner), "matrix")


def mamba2_keys(s: Shape) -> dict[str, Any]:
    """Return the keys of Mamba 2, which has no attention."""
    return _mamba_keys(s, GROUPS)


def mamba2_layer(s: Shape, number: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer of Mamba 2."""
    yield from _mamba2(s, GROUPS)


def granite_keys(s: Shape) -> dict[str, Any]:
    """Return the keys of a Granite 4 hybrid."""
    return _mamba_keys(s, 1) | {"attention.head_count_kv": _kv_heads(s)}


def granite_layer(s: Shape, number: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer of a Granite 4 hybrid: Mamba 2 or attention."""
    yield from _mamba2(s, 1) if is_recurrent(s, number) else qkvo(s)
    yield from ffn(s)


def qwen35_keys(s: Shape) -> dict[str, Any]:
    """Return the keys of Qwen3.5, whose keys and values of a state have one width."""
    third = s.head_dim // 6
    return {
        "rope.dimension_sections": [s.head_dim // 2 - 2 * third, third, third, 0],
        "full_attention_interval": s.period,
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": s.state_heads * s.state_dim,
        "ssm.state_size": s.state_dim,
        "ssm.time_step_rank": s.state_heads,
        "ssm.group_count": s.state_heads,
    }


def qwen35_layer(s: Shape, number: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer of Qwen3.5: a gated delta net, or attention with a gate."""
    if is_recurrent(s, number):
        width = s.state_heads * s.state_dim
        yield Tensor("attn_norm.weight", (s.embd,), "norm")
        yield Tensor("attn_qkv.weight", (3 * width, s.embd), "matrix")
        yield Tensor("attn_gate.weight", (width, s.embd), "matrix")
        yield Tensor("ssm_conv1d.weight", (3 * width, CONV), "router", CONV**0.5)
        yield Tensor("ssm_dt.bias", (s.state_heads,), "bias")
        yield Tensor("ssm_a", (s.state_heads,), "norm", DECAY)
        yield Tensor("ssm_beta.weight", (s.state_heads, s.embd), "matrix")
        yield Tensor("ssm_alpha.weight", (s.state_heads, s.embd), "matrix")
        yield Tensor("ssm_norm.weight", (s.state_dim,), "norm")
        yield Tensor("ssm_out.weight", (s.embd, width), "matrix")
    else:
        for tensor in qkvo(s):
            is_q = tensor.name == "attn_q.weight"
            yield tensor._replace(shape=(2 * tensor.shape[0], s.embd)) if is_q else tensor
        yield from qk_norms(s)
    yield Tensor("post_attention_norm.weight", (s.embd,), "norm")
    yield from (tensor for tensor in ffn(s) if tensor.kind == "matrix")
