"""Checks of the relations between a GGUF's numbers, after `gguf_scan` has read each of them.

Upstream computes with every number of a well-formed file: for a type without a product it calls a null
pointer, for a head of 2^30 elements it allocates a cache. The refused files would end the process, or
allocate memory far beyond the file's size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyvelo.errors import ModelError
from pyvelo.models.gguf_scan import MAX_LAYERS

if TYPE_CHECKING:
    from pyvelo.models.gguf_scan import GgufSummary

__all__ = ["check"]

INT32_MAX = (1 << 31) - 1

# intermediate results and plain integers: no product with a matrix is defined for them
NEVER_WEIGHTS = frozenset({"q8_1", "q8_K", "i8", "i16", "i64", "f64"})
# tables of indices
INDEX_TABLES = re.compile(r".*tid2eid.*|d2t(\..*)?|masked_embd_ordering.*")
# tensors that multiply activations element by element, and filters of special operators
ELEMENTWISE = re.compile(
    r".*\.bias|.*norm\d?(_\d|_exps|_key|_query|_conv)?(\.weight)?|.*sinks(\.weight)?|rope_f.*|.*\.rope_f.*"
    r"|.*\.(ssm_conv1d(_[qkv])?|shortconv\.conv|ple_conv1d|ssm_a|ssm_d|time_mix_first)(\.weight)?"
    r"|token_types\.weight"
)
# a router with one output is a vector, but a matrix for its product
ROUTERS = re.compile(r".*(_inp|_inp_shexp|cls.*)\.weight")

# keys below `<architecture>.`: the largest valid number; larger ones overflow somewhere
LARGEST: Mapping[str, int] = {
    "block_count": MAX_LAYERS,
    "context_length": INT32_MAX,
    "attention.sliding_window": 1 << 28,  # embedding reserves a word for each token of a window
    "expert_count": 1 << 16,
    "nextn_predict_layers": MAX_LAYERS,
}
# widths that cannot exceed the widest tensor
WIDTHS = (
    "embedding_length",
    "embedding_length_out",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "rope.dimension_count",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
    "kda.head_dim",
    "wkv.head_size",
    "shortconv.l_cache",
    "vocab_size",
)
# divisors of upstream, checked if a file has them
DIVISORS = ("ssm.time_step_rank", "ssm.group_count", "full_attention_interval")
# The smallest and the largest number of buckets of relative positions. Small distances have q of them, in an
# encoder a quarter of all and in a decoder half; upstream divides by q and by ln(128 / q).
BUCKETS = {"t5encoder": (4, 511), "t5": (4, 255)}
ZERO_GROUPS = "plamo2"  # counts none, and divides by nothing
# architectures that divide by the number of heads without a check
HEAD_DIVIDERS = frozenset({"olmo2", "phimoe", "gemma2", "gemma3"})
# arrays with an item for every token
PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def check(summary: GgufSummary) -> None:
    """Raise ModelError if tensor types, vocabulary or hyperparameters are impossible."""
    for look in (_types, _vocabulary, _limits, _widths, _divisors, _temperature, _buckets):
        problem = look(summary)
        if problem is not None:
            raise ModelError(f"{summary.path} is damaged: {problem}")


def _types(summary: GgufSummary) -> str | None:
    for tensor in summary.tensors:
        kind = tensor.type_name
        if kind in NEVER_WEIGHTS or (kind == "i32" and not INDEX_TABLES.fullmatch(tensor.name)):
            return f"tensor {tensor.name!r} is of type {kind}, which no weight can be"
        is_vector = sum(extent != 1 for extent in tensor.shape) <= 1 and not ROUTERS.fullmatch(tensor.name)
        if kind != "f32" and (is_vector or ELEMENTWISE.fullmatch(tensor.name)) and kind != "i32":
            return f"tensor {tensor.name!r} is of type {kind}, but its operator takes f32"
    return None


def _vocabulary(summary: GgufSummary) -> str | None:
    if summary.metadata.get("tokenizer.ggml.model") == "rwkv" and "rwkv" not in summary.architecture:
        # it loops forever if a word's beginning is no token: only models that cannot be paged may have it
        return f"tokenizer 'rwkv' is not of the architecture {summary.architecture!r}"
    tokens = summary.arrays.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    for key in PER_TOKEN:
        array = summary.arrays.get(key)
        if array is not None and array.count != tokens.count:
            return f"{key} has {array.count} items, but there are {tokens.count} tokens"
    return None


def _limits(summary: GgufSummary) -> str | None:
    for key, largest in LARGEST.items():
        value = _number(summary, key)
        if value is not None and value > largest:
            return f"{summary.architecture}.{key} is {value}, but at most {largest} makes sense"
    return None


def _widths(summary: GgufSummary) -> str | None:
    """Return an error if a width, or the sum of all heads, exceeds the widest tensor."""
    if not summary.tensors:
        return None
    widest = max((extent for tensor in summary.tensors for extent in tensor.shape), default=1)
    for key in WIDTHS:
        value = _number(summary, key)
        if value is not None and value > widest:
            return f"{summary.architecture}.{key} is {value}, but no tensor is wider than {widest}"
    heads = _number(summary, "attention.head_count_kv")
    if heads == 0 and any(".attn_k" in tensor.name for tensor in summary.tensors):
        return f"{summary.architecture}.attention.head_count_kv is 0, but there are tensors for keys"
    heads = _number(summary, "attention.head_count") if heads is None else heads
    for key in ("attention.key_length", "attention.value_length"):
        size = _number(summary, key)
        if heads and size == 0:
            return f"{summary.architecture}.{key} is 0, but there are heads"
        if heads and size and heads * size > widest:
            return (
                f"{heads} heads of {summary.architecture}.{key} {size} are wider than any tensor ({widest})"
            )
    return None


def _divisors(summary: GgufSummary) -> str | None:
    for key in DIVISORS:
        if _smallest(summary, key) == 0 and summary.architecture != ZERO_GROUPS:
            return f"{summary.architecture}.{key} is 0"
    if summary.architecture in HEAD_DIVIDERS and not _smallest(summary, "attention.head_count"):
        return f"{summary.architecture}.attention.head_count is 0 or missing"
    return None


def _temperature(summary: GgufSummary) -> str | None:
    """Return an error if attention is scaled by position without the length that is the divisor."""
    if summary.architecture in ("llama4", "mistral3"):
        return None
    scale = summary.of_architecture("attention.temperature_scale")
    if isinstance(scale, float) and scale != 0 and not _number(summary, "attention.temperature_length"):
        return f"attention.temperature_scale is {scale}, but there is no temperature_length to go with it"
    return None


def _buckets(summary: GgufSummary) -> str | None:
    key, limits = "attention.relative_buckets_count", BUCKETS.get(summary.architecture)
    value = _number(summary, key)
    if limits is None or value is None or limits[0] <= value <= limits[1]:
        return None
    return f"{summary.architecture}.{key} is {value}, but must be from {limits[0]} to {limits[1]}"


def _number(summary: GgufSummary, key: str) -> int | None:
    """Return a whole number of the architecture; the largest if each layer has its own.

    None if it is absent, or of another type, which C refuses.
    """
    array = summary.arrays.get(f"{summary.architecture}.{key}")
    if array is not None:
        return array.largest
    return _whole(summary, key)


def _smallest(summary: GgufSummary, key: str) -> int | None:
    """Return the smallest number instead of `_number`'s largest."""
    array = summary.arrays.get(f"{summary.architecture}.{key}")
    return _whole(summary, key) if array is None else array.smallest


def _whole(summary: GgufSummary, key: str) -> int | None:
    value = summary.of_architecture(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
