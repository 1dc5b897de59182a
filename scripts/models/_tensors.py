"""Numbers of a model, and the tensors that its architectures have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["matrix", "router", "norm", "bias", "embedding"]

# the scores' deviation is its square: a few percent of the tokens get most of the softmax weight
SHARP = 1.5
# deviation of the logits: some twenty tokens share most of the probability
LOUD = 3.0


class Tensor(NamedTuple):
    """Tensor to write: `shape` is in NumPy's order, rows before columns; `gain` scales its values.

    `matrix` and `embedding` take the model's type, an embedding's rows scaled by the vocabulary; the others
    stay f32. With a gain of 1 a matrix keeps the magnitude of its input.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    gain: float = 1.0


class ShapeError(ValueError):
    """Error of numbers that contradict each other or the architecture."""


@dataclass(frozen=True)
class Shape:
    """Numbers of a model.

    Widths are in elements, `window` and `ctx` in tokens (0: no window). `pooling` names how an embedding is
    pooled. Every `period`th layer is another one: with attention among recurrent layers, and without a window
    in Gemma 4. `state_dim` is the width of a state, and `state_heads` the number of its heads.
    """

    arch: str = "llama"
    layers: int = 2
    embd: int = 256
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ctx: int = 4096
    vocab: str = "none"
    rope_base: float = 10000.0
    window: int = 0
    experts: int = 0
    tied: bool = True
    pooling: str = ""
    period: int = 2
    state_dim: int = 16
    state_heads: int = 8


def qkvo(s: Shape) -> Iterator[Tensor]:
    yield Tensor("attn_norm.weight", (s.embd,), "norm")
    yield Tensor("attn_q.weight", (s.heads * s.head_dim, s.embd), "matrix", SHARP)
    yield Tensor("attn_k.weight", (s.kv_heads * s.head_dim, s.embd), "matrix", SHARP)
    yield Tensor("attn_v.weight", (s.kv_heads * s.head_dim, s.embd), "matrix")
    yield Tensor("attn_output.weight", (s.embd, s.heads * s.head_dim), "matrix")


def qk_norms(s: Shape) -> Iterator[Tensor]:
    # these undo the scale of wq and wk, so they set the sharpness; gemma4 does not scale its scores
    sharp = SHARP * (s.head_dim**-0.25 if s.arch == "gemma4" else 1.0)
    yield Tensor("attn_q_norm.weight", (s.head_dim,), "norm", sharp)
    yield Tensor("attn_k_norm.weight", (s.head_dim,), "norm", sharp)


def qkv_biases(s: Shape) -> Iterator[Tensor]:
    yield Tensor("attn_q.bias", (s.heads * s.head_dim,), "bias")
    yield Tensor("attn_k.bias", (s.kv_heads * s.head_dim,), "bias")
    yield Tensor("attn_v.bias", (s.kv_heads * s.head_dim,), "bias")


def post_norms(s: Shape) -> Iterator[Tensor]:
    yield Tensor("post_attention_norm.weight", (s.embd,), "norm")
    yield Tensor("post_ffw_norm.weight", (s.embd,), "norm")


def ffn(s: Shape) -> Iterator[Tensor]:
    yield Tensor("ffn_norm.weight", (s.embd,), "norm")
    if s.experts:
        yield from experts(s)
        return
    yield Tensor("ffn_gate.weight", (s.ffn, s.embd), "matrix")
    yield Tensor("ffn_up.weight", (s.ffn, s.embd), "matrix")
    yield Tensor("ffn_down.weight", (s.embd, s.ffn), "matrix")


def experts(s: Shape) -> Iterator[Tensor]:
    yield Tensor("ffn_gate_inp.weight", (s.experts, s.embd), "router")
    yield Tensor("ffn_gate_exps.weight", (s.experts, s.ffn, s.embd), "matrix")
    yield Tensor("ffn_up_exps.weight", (s.experts, s.ffn, s.embd), "matrix")
    yield Tensor("ffn_down_exps.weight", (s.experts, s.embd, s.ffn), "matrix")


def plain(*parts: Callable[[Shape], Iterator[Tensor]]) -> Callable[[Shape, int], Iterator[Tensor]]:
    def layer(s: Shape, number: int) -> Iterator[Tensor]:
        for part in parts:
            yield from part(s)

    return layer
