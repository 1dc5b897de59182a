"""Shape of the demo model, with GGUF's names: Qwen3's architecture."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = 64
EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Every head has 64 values; `context` is the one that the file declares."""

    vocab: int
    width: int = 128
    layers: int = 3
    ffn: int = 384
    heads: int = 4
    kv_heads: int = 2
    rope_base: float = 1e6
    context: int = 4096


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return rows and columns of every tensor: [out, in] for a matrix."""
    c = config
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.vocab, c.width),
        "output_norm.weight": (c.width,),
        "output.weight": (c.vocab, c.width),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.width,),
        "attn_q": (c.heads * HEAD, c.width),
        "attn_k": (c.kv_heads * HEAD, c.width),
        "attn_v": (c.kv_heads * HEAD, c.width),
        "attn_q_norm": (HEAD,),
        "attn_k_norm": (HEAD,),
        "attn_output": (c.width, c.heads * HEAD),
        "ffn_norm": (c.width,),
        "ffn_gate": (c.ffn, c.width),
        "ffn_up": (c.ffn, c.width),
        "ffn_down": (c.width, c.ffn),
    }
    for i in range(c.layers):
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def metadata(config: Config) -> dict[str, int | float]:
    """Return the GGUF keys of the architecture, without its prefix."""
    return {
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": config.rope_base,
    }
