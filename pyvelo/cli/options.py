"""The options of the commands, each with its flag and its line of help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from pyvelo.cli.values import parse_kv_type_option, parse_size

ModelName = Annotated[
    str,
    Argument(
        metavar="MODEL", help="A GGUF file, or a name on the hub such as org/repo:Q4_K_M.", show_default=False
    ),
]
HubModel = Annotated[
    str,
    Argument(
        metavar="ORG/REPO[:QUANT]", help="A model on the hub, and which file of it.", show_default=False
    ),
]
Prompt = Annotated[
    str | None, Option("-p", "--prompt", help="The prompt; - reads standard input.", show_default=False)
]
PromptFile = Annotated[
    Path | None, Option("-f", "--file", help="Read the prompt from a file.", show_default=False)
]

# ---- sampling ----

MaxTokens = Annotated[
    int, Option("-n", "--max-tokens", help="Tokens to generate; -1: until the context is full.")
]
Temperature = Annotated[float, Option(help="0 takes the likeliest token: the same command says the same.")]
TopK = Annotated[int, Option(help="Draw among the K likeliest tokens; 0: among all.")]
TopP = Annotated[float, Option(help="Draw among tokens of this total probability; 1: among all.")]
MinP = Annotated[float, Option(help="Leave out tokens below this share of the likeliest; 0: none.")]
RepetitionPenalty = Annotated[float, Option(help="Divide the logits of tokens seen before; 1: off.")]
Seed = Annotated[int | None, Option(help="Make the draws reproducible.", show_default=False)]
Stop = Annotated[
    list[str] | None, Option(help="End where this text appears; may be repeated.", show_default=False)
]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Go on where the model would end.")]

# ---- engine ----

KVTypeOption = Annotated[
    Any,
    Option(
        "--kv-type",
        parser=parse_kv_type_option,
        metavar="TYPE|K,V",
        help="How K and V are stored: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl, or two of them.",
    ),
]
Context = Annotated[int | None, Option("--ctx", help="Longest sequence in tokens.", show_default="what fits")]
BlockSize = Annotated[int, Option("--block-size", help="Tokens in a block: 32, 64, 128 or 256.")]
CacheBytes = Annotated[
    Any,
    Option(
        "--kv-cache-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Memory of the KV cache, such as 512M or 2G.",
        show_default="what fits",
    ),
]
Threads = Annotated[int | None, Option(help="CPU threads.", show_default="all cores")]
GpuLayers = Annotated[int, Option("--n-gpu-layers", help="Layers on the GPU; -1: all.")]
Deterministic = Annotated[bool, Option("--deterministic", help="Bit-identical however the work is cut.")]
Precision = Annotated[
    str, Option("--attention-precision", help="exact; or fast: a prompt's attention in bfloat16.")
]

# ---- output ----

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Verbose = Annotated[bool, Option("-v", "--verbose", help="Show speed and memory on standard error.")]
