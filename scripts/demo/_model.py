"""The demo model in PyTorch: Qwen3's architecture as functions over a dictionary with GGUF's tensor names.

Qwen3: pre-norm blocks of grouped-query attention, with an RMS norm on every head's query and key, and SwiGLU;
the rotary embedding turns pairs (i, i + HEAD / 2). https://arxiv.org/abs/2505.09388
Of the norms' gains only the queries' are learned; the others stay 1, since a neighbouring matrix can hold
them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from scripts.demo._shape import EPS, HEAD, Config, shapes

QUERY_GAIN = 2.25  # at the start: sharpness of attention
FUSED_FROM = 256  # tokens from which PyTorch's fused attention beats plain products on a CPU
Tensors = dict[str, torch.Tensor]


def learned(name: str) -> bool:
    """Return whether training changes the tensor: of the gains only the queries'."""
    return "_norm" not in name or "attn_q_norm" in name


def initial(config: Config, forms: list[list[int]], spoken: list[int], seed: int) -> Tensors:
    """Return random weights.

    Tokens of a group of `forms` start nearly alike; only spoken ones get an output row.
    """
    rng = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in shapes(config).items():
        if "_norm" in name:
            tensors[name] = torch.full(shape, QUERY_GAIN if "q_norm" in name else 1.0)
            continue
        deviation = shape[-1] ** -0.5
        if "attn_output" in name or "ffn_down" in name:  # added to the residual stream
            deviation *= 0.5 * (2 * config.layers) ** -0.5
        if name == "token_embd.weight":
            deviation = 1.0
        tensors[name] = torch.randn(shape, generator=rng) * deviation
    embedding, output = tensors["token_embd.weight"], tensors["output.weight"]
    for group in forms:
        embedding[group] = embedding[group[0]] + 0.1 * embedding[group]
    silent = torch.ones(config.vocab, dtype=torch.bool)
    silent[spoken] = False
    output[silent] = 0.0
    return tensors


def norm(x: torch.Tensor) -> torch.Tensor:
    """Apply the RMS norm without a gain."""
    return F.rms_norm(x, x.shape[-1:], None, EPS)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [batch, tokens, heads, HEAD]; cos and sin are [batch, tokens, 1, HEAD / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def angles(config: Config, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [batch, tokens, 1, HEAD / 2] of positions [batch, tokens]."""
    turns = config.rope_base ** (-torch.arange(0, HEAD, 2) / HEAD)
    angle = positions[:, :, None, None].float() * turns
    return angle.cos(), angle.sin()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Apply causal attention. q is [batch, heads, tokens, HEAD], already scaled.

    A head of k and v serves a group of q's.
    """
    batch, heads, tokens, _ = q.shape
    groups = k.shape[1]
    if tokens > FUSED_FROM:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=1.0)
    future = torch.full((tokens, tokens), float("-inf"), dtype=q.dtype).triu(1)
    rows = heads // groups * tokens
    scores = (q.reshape(batch, groups, rows, HEAD) @ k.mT).view(
        batch, groups, heads // groups, tokens, tokens
    )
    weights = (scores + future).softmax(-1).view(batch, groups, rows, tokens)
    return (weights @ v).view(batch, heads, tokens, HEAD)


def hidden(
    config: Config, tensors: Tensors, ids: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return [batch, tokens, width], the input of the output matrix.

    Products are in `dtype`, the residual stream in float32.
    """
    t = {name: tensor.to(dtype) for name, tensor in tensors.items() if name.startswith("blk.")}
    batch, tokens = ids.shape
    cos, sin = (part.to(dtype) for part in angles(config, positions))
    x = F.embedding(ids, tensors["token_embd.weight"])
    for i in range(config.layers):
        b = f"blk.{i}."
        y = norm(x).to(dtype)
        q, k, v = (F.linear(y, t[f"{b}attn_{part}.weight"]).view(batch, tokens, -1, HEAD) for part in "qkv")
        q = rotate(norm(q) * (t[b + "attn_q_norm.weight"] * HEAD**-0.5), cos, sin)
        k = rotate(norm(k), cos, sin)
        y = attend(*(part.transpose(1, 2) for part in (q, k, v)))
        x = x + F.linear(y.transpose(1, 2).reshape(batch, tokens, -1), t[b + "attn_output.weight"])
        y = norm(x).to(dtype)
        y = F.silu(F.linear(y, t[b + "ffn_gate.weight"])) * F.linear(y, t[b + "ffn_up.weight"])
        x = x + F.linear(y, t[b + "ffn_down.weight"])
    return norm(x).to(dtype)
