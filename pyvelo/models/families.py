"""Published shapes of well-known model families, and the memory and speed that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyvelo.kv.geometry import Geometry, make_geometry

__all__ = ["FAMILIES", "OWN_QUANTIZATION", "QUANTIZATIONS", "Family", "Weights"]

SLIDING = 1  # `LayerShape.window_type`


@dataclass(frozen=True)
class Weights:
    """Bits of a parameter in a quantization: of the layers, of the output matrix and of the embeddings.

    Embeddings that are the output matrix, too, have its bits.

    kind: ggml's type of most of the layers' weights.
    """

    kind: str
    layers: float
    output: float
    embeddings: float


QUANTIZATIONS = {
    # q4_K, and q6_K for half of two matrices of each layer: 4.8 bits in the files that llama.cpp writes
    "Q4_K_M": Weights("q4_K", 4.81, 6.5625, 4.5),
    "Q6_K": Weights("q6_K", 6.5625, 6.5625, 6.5625),
    "Q8_0": Weights("q8_0", 8.5, 8.5, 8.5),
}
"""Quantizations of files on the hub, the smallest first."""

OWN_QUANTIZATION = "MXFP4"
"""Name of the quantization of the families with `bits`."""

_NARROW = {"Q4_K_M": Weights("q5_0", 5.5, 8.5, 5.5), "Q6_K": Weights("q8_0", 8.5, 8.5, 8.5)}
"""The same if rows are no whole number of 256 values: llama.cpp takes q5_0 for q4_K, and q8_0 for q6_K."""


class CacheLayer(NamedTuple):
    """Layer's rows of K and V, as `make_geometry` takes it."""

    layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int
    window_type: int = SLIDING
    device: int = 0


@dataclass(frozen=True)
class Family:
    """Shape of a model as its authors published it.

    parameters, active: billions, with embeddings; active: the ones of a token's experts.
    tied: the embeddings are the output matrix, too.
    window: tokens, 0 without one; every `full_each`-th layer has none.
    bits: of a parameter, of models that come in a quantization of their own; 0: any quantization.
    """

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    context: int
    tied: bool = False
    window: int = 0
    full_each: int = 1
    active: float | None = None
    bits: float = 0.0

    @property
    def repo(self) -> str:
        """Repository of its files on the hub, tuned for chat, with all of `QUANTIZATIONS`."""
        return _REPOSITORIES[self.name]

    def weights(self, quantization: str) -> Weights:
        """Return the types of the weights."""
        if self.bits:
            return Weights("mxfp4", self.bits, self.bits, self.bits)
        weights = QUANTIZATIONS[quantization]
        return _NARROW.get(quantization, weights) if self.width % 256 else weights

    def weight_bytes(self, quantization: str) -> int:
        """Return the bytes of the weights."""
        return self._bytes(self.parameters, quantization, embeddings=True)

    def read_bytes(self, quantization: str) -> int:
        """Return the bytes of the weights that a token reads: of its experts, and no table of embeddings."""
        return self._bytes(self.active or self.parameters, quantization, embeddings=self.tied)

    @property
    def prompt_products(self) -> float:
        """Products of a weight and an activation for each token of a prompt: no table of the vocabulary."""
        tables = self._n_tables * self.vocabulary * self.width
        return (self.active or self.parameters) * 1e9 - tables

    def cache(self, kv_type: str | Sequence[str], block_size: int = 32) -> Geometry:
        """Return the geometry of its KV cache; raise as `make_geometry` does."""
        return make_geometry(self.name, self._cache_layers(), kv_type, block_size)

    @property
    def _n_tables(self) -> int:
        return 1 if self.tied else 2

    def _bytes(self, billions: float, quantization: str, *, embeddings: bool) -> int:
        table = self.vocabulary * self.width
        kind = self.weights(quantization)
        bits = kind.layers * (billions * 1e9 - self._n_tables * table) + kind.output * table
        bits += kind.embeddings * table * (embeddings and not self.tied)
        return int(bits / 8)

    def _cache_layers(self) -> Iterator[CacheLayer]:
        for layer in range(self.layers):
            windowed = self.window and layer % self.full_each != self.full_each - 1
            window = self.window if windowed else 0
            yield CacheLayer(layer, self.kv_heads, self.head_dim, self.head_dim, window)


FAMILIES = (
    Family("SmolLM2 135M", 0.135, 30, 3, 64, 576, 49152, 8192, tied=True),
    Family("LFM2 350M", 0.354, 6, 8, 64, 1024, 65536, 128000, tied=True),  # 10 more layers have no cache
    Family("SmolLM2 360M", 0.362, 32, 5, 64, 960, 49152, 8192, tied=True),
    Family("Qwen2.5 0.5B", 0.494, 24, 2, 64, 896, 151936, 32768, tied=True),
    Family("Qwen3 0.6B", 0.596, 28, 8, 128, 1024, 151936, 40960, tied=True),
    Family("Gemma 3 1B", 1.0, 26, 1, 256, 1152, 262144, 32768, tied=True, window=512, full_each=6),
    Family("TinyLlama 1.1B", 1.1, 22, 4, 64, 2048, 32000, 2048),
    Family("LFM2 1.2B", 1.17, 6, 8, 64, 2048, 65536, 128000, tied=True),
    Family("Llama 3.2 1B", 1.236, 16, 8, 64, 2048, 128256, 131072, tied=True),
    Family("Qwen2.5 1.5B", 1.544, 28, 2, 128, 1536, 151936, 32768, tied=True),
    Family("SmolLM2 1.7B", 1.711, 24, 32, 64, 2048, 49152, 8192, tied=True),
    Family("Qwen3 1.7B", 1.721, 28, 8, 128, 2048, 151936, 40960, tied=True),
    Family("Granite 3.3 2B", 2.534, 40, 8, 64, 2048, 49159, 131072, tied=True),
    Family("Gemma 2 2B", 2.614, 26, 4, 256, 2304, 256000, 8192, tied=True, window=4096, full_each=2),
    Family("SmolLM3 3B", 3.075, 36, 4, 128, 2048, 128256, 65536, tied=True),
    Family("Llama 3.2 3B", 3.213, 28, 8, 128, 3072, 128256, 131072, tied=True),
    Family("Phi-4 mini", 3.836, 32, 8, 128, 3072, 200064, 131072, tied=True),
    Family("Gemma 3 4B", 3.88, 34, 4, 256, 2560, 262208, 131072, tied=True, window=1024, full_each=6),
    Family("Qwen3 4B", 4.022, 36, 8, 128, 2560, 151936, 40960, tied=True),
    Family("Mistral 7B v0.3", 7.248, 32, 8, 128, 4096, 32768, 32768),
    Family("Qwen2.5 7B", 7.616, 28, 4, 128, 3584, 152064, 32768),
    Family("Llama 3.1 8B", 8.03, 32, 8, 128, 4096, 128256, 131072),
    Family("Qwen3 8B", 8.191, 36, 8, 128, 4096, 151936, 40960),
    Family("Gemma 2 9B", 9.242, 42, 8, 256, 3584, 256000, 8192, tied=True, window=4096, full_each=2),
    Family("Gemma 3 12B", 11.77, 48, 8, 256, 3840, 262208, 131072, tied=True, window=1024, full_each=6),
    Family("Mistral Nemo 12B", 12.248, 40, 8, 128, 5120, 131072, 131072),
    Family("Phi-4 14B", 14.66, 40, 10, 128, 5120, 100352, 16384),
    Family("Qwen3 14B", 14.768, 40, 8, 128, 5120, 151936, 40960),
    Family(
        "gpt-oss 20B", 20.91, 24, 8, 64, 2880, 201088, 131072, window=128, full_each=2, active=4.19, bits=4.63
    ),
    Family("Mistral Small 3 24B", 23.57, 40, 8, 128, 5120, 131072, 32768),
    Family("Gemma 3 27B", 27.0, 62, 16, 128, 5376, 262208, 131072, tied=True, window=1024, full_each=6),
    Family("Qwen3 30B-A3B", 30.53, 48, 4, 128, 2048, 151936, 40960, active=3.35),
    Family("Qwen3 32B", 32.76, 64, 8, 128, 5120, 151936, 40960),
    Family("Llama 3.3 70B", 70.55, 80, 8, 128, 8192, 128256, 131072),
    Family(
        "gpt-oss 120B", 116.8, 36, 8, 64, 2880, 201088, 131072, window=128, full_each=2, active=5.7, bits=4.34
    ),
)

_REPOSITORIES = {
    "SmolLM2 135M": "bartowski/SmolLM2-135M-Instruct-GGUF",
    "LFM2 350M": "LiquidAI/LFM2-350M-GGUF",
    "SmolLM2 360M": "bartowski/SmolLM2-360M-Instruct-GGUF",
    "Qwen2.5 0.5B": "bartowski/Qwen2.5-0.5B-Instruct-GGUF",
    "Qwen3 0.6B": "bartowski/Qwen_Qwen3-0.6B-GGUF",
    "Gemma 3 1B": "bartowski/google_gemma-3-1b-it-GGUF",
    "TinyLlama 1.1B": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF",
    "LFM2 1.2B": "LiquidAI/LFM2-1.2B-GGUF",
    "Llama 3.2 1B": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "Qwen2.5 1.5B": "bartowski/Qwen2.5-1.5B-Instruct-GGUF",
    "SmolLM2 1.7B": "bartowski/SmolLM2-1.7B-Instruct-GGUF",
    "Qwen3 1.7B": "bartowski/Qwen_Qwen3-1.7B-GGUF",
    "Granite 3.3 2B": "bartowski/ibm-granite_granite-3.3-2b-instruct-GGUF",
    "Gemma 2 2B": "bartowski/gemma-2-2b-it-GGUF",
    "SmolLM3 3B": "bartowski/HuggingFaceTB_SmolLM3-3B-GGUF",
    "Llama 3.2 3B": "bartowski/Llama-3.2-3B-Instruct-GGUF",
    "Phi-4 mini": "bartowski/microsoft_Phi-4-mini-instruct-GGUF",
    "Gemma 3 4B": "bartowski/google_gemma-3-4b-it-GGUF",
    "Qwen3 4B": "bartowski/Qwen_Qwen3-4B-GGUF",
    "Mistral 7B v0.3": "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    "Qwen2.5 7B": "bartowski/Qwen2.5-7B-Instruct-GGUF",
    "Llama 3.1 8B": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "Qwen3 8B": "bartowski/Qwen_Qwen3-8B-GGUF",
    "Gemma 2 9B": "bartowski/gemma-2-9b-it-GGUF",
    "Gemma 3 12B": "bartowski/google_gemma-3-12b-it-GGUF",
    "Mistral Nemo 12B": "bartowski/Mistral-Nemo-Instruct-2407-GGUF",
    "Phi-4 14B": "bartowski/phi-4-GGUF",
    "Qwen3 14B": "bartowski/Qwen_Qwen3-14B-GGUF",
    "gpt-oss 20B": "ggml-org/gpt-oss-20b-GGUF",
    "Mistral Small 3 24B": "bartowski/Mistral-Small-24B-Instruct-2501-GGUF",
    "Gemma 3 27B": "bartowski/google_gemma-3-27b-it-GGUF",
    "Qwen3 30B-A3B": "bartowski/Qwen_Qwen3-30B-A3B-GGUF",
    "Qwen3 32B": "bartowski/Qwen_Qwen3-32B-GGUF",
    "Llama 3.3 70B": "bartowski/Llama-3.3-70B-Instruct-GGUF",
    "gpt-oss 120B": "ggml-org/gpt-oss-120b-GGUF",
}
