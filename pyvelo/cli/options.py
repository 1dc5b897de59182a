"""Options of the commands: flags and help texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from pyvelo.cli.completion import block_sizes, chats, kv_types, model_names, one_of, poolings, precisions
from pyvelo.cli.values import (
    parse_gpu_layers,
    parse_kv_type_option,
    parse_lora,
    parse_names,
    parse_numbers,
    parse_size,
    parse_some_size,
)
from pyvelo.kv_store import KVStore

HubModel = Annotated[
    str,
    Argument(
        metavar="ORG/REPO[:QUANT]", help="A model on the hub, and which file of it.", show_default=False
    ),
]
DemoOrModel = Annotated[
    str,
    Argument(
        metavar="MODEL",
        autocompletion=model_names,
        help="A GGUF file or a name on the hub; default: the demo model in the package.",
        show_default=False,
    ),
]
ModelAndPrompt = Annotated[
    list[str] | None,
    Argument(
        metavar="[MODEL] [PROMPT]",
        autocompletion=model_names,
        help="A GGUF file or a name on the hub, and the prompt; default: the demo model in the package.",
        show_default=False,
    ),
]
System = Annotated[str | None, Option("-s", "--system", help="The system message.", show_default=False)]
ChatTemplate = Annotated[
    str | None,
    Option(
        "--chat-template",
        metavar="FILE",
        help="File of a Jinja template, or the name of a built-in one (chatml), instead of the model's.",
        show_default=False,
    ),
]
TemplateArguments = Annotated[
    list[str] | None,
    Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="A variable of the chat template; VALUE is JSON or text. May be repeated.",
        show_default=False,
    ),
]
Reasoning = Annotated[
    str | None,
    Option(
        autocompletion=one_of(lambda: ("show", "hide", "off")),
        metavar="show|hide|off",
        help="What the model thinks before an answer; off: ask the template for none.",
        show_default="show, or hide in a pipe",
    ),
]
NoThink = Annotated[bool, Option("--no-think", help="The same as --reasoning off.")]
NoStatus = Annotated[bool, Option("--no-status", help="Show no line with figures of the last answer.")]
SessionName = Annotated[
    str | None,
    Option(
        "--session", metavar="NAME", autocompletion=chats, help="Go on with this chat, saved after each turn."
    ),
]
KvStore = Annotated[
    str | None,
    Option(
        "--kv-store",
        metavar="PLACE",
        help="Folder, or valkey://HOST:PORT, in which the blocks of prompts outlive the process.",
    ),
]
KvStoreBytes = Annotated[
    Any,
    Option(
        "--kv-store-bytes",
        parser=parse_some_size,
        metavar="SIZE",
        help="Most bytes of the folder of --kv-store.",
    ),
]
NoHistory = Annotated[bool, Option("--no-history", help="Keep the lines that you type in no file.")]
AsChat = Annotated[bool, Option("--chat", help="The prompt is a message: ask with the chat template.")]
Prompt = Annotated[
    str | None, Option("-p", "--prompt", help="The prompt; - is standard input.", show_default=False)
]
PromptFile = Annotated[
    Path | None, Option("-f", "--file", help="Read the prompt, or its rest, from a file.", show_default=False)
]

Texts = Annotated[
    list[str] | None,
    Option(
        "-p", "--text", help="A text; may be repeated. - reads lines of standard input.", show_default=False
    ),
]
TextFile = Annotated[
    Path | None, Option("-f", "--file", help="Read the lines of a file.", show_default=False)
]
Pooling = Annotated[
    str | None,
    Option(
        autocompletion=one_of(poolings),
        help="Pooling of the tokens' vectors: mean, cls or last.",
        show_default="the model's own",
    ),
]
Raw = Annotated[bool, Option("--raw", help="Do not scale the vectors to length 1.")]

# ---- sampling ----

MaxTokens = Annotated[
    int, Option("-n", "--max-tokens", help="Tokens to generate; -1: until the context is full.")
]
Temperature = Annotated[
    float, Option(help="0 takes the likeliest token, so equal commands give equal answers.")
]
TopK = Annotated[int, Option(help="Sample from the K likeliest tokens; 0: from all.")]
TopP = Annotated[
    float, Option(help="Sample from the likeliest tokens of this total probability; 1: from all.")
]
MinP = Annotated[float, Option(help="Leave out tokens below this share of the likeliest; 0: none.")]
RepetitionPenalty = Annotated[float, Option(help="Divide the logits of tokens seen before; 1: off.")]
OF_MODEL = "what the model's file says, else "
ChatTemperature = Annotated[
    float | None,
    Option("--temperature", help="0 takes the likeliest token.", show_default=f"{OF_MODEL}0.7"),
]
ChatTopK = Annotated[
    int | None,
    Option("--top-k", help="Sample from the K likeliest tokens; 0: from all.", show_default=f"{OF_MODEL}0"),
]
ChatTopP = Annotated[
    float | None,
    Option(
        "--top-p",
        help="Sample from the likeliest of this total probability; 1: from all.",
        show_default=f"{OF_MODEL}0.95",
    ),
]
ChatMinP = Annotated[
    float | None,
    Option(
        "--min-p",
        help="Leave out tokens below this share of the likeliest; 0: none.",
        show_default=f"{OF_MODEL}0",
    ),
]
ChatRepetitionPenalty = Annotated[
    float | None,
    Option(
        "--repetition-penalty",
        help="Divide the logits of tokens seen before; 1: off.",
        show_default=f"{OF_MODEL}1",
    ),
]
Seed = Annotated[int | None, Option(help="Seed of the sampling.", show_default=False)]
Stop = Annotated[list[str] | None, Option(help="End before this text; may be repeated.", show_default=False)]
Echo = Annotated[bool, Option("--echo", help="Print the prompt before the answer.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Continue after the model's end token.")]

# ---- engine ----

KVTypeOption = Annotated[
    Any,
    Option(
        "--kv-type",
        parser=parse_kv_type_option,
        autocompletion=kv_types,
        metavar="TYPE|K,V",
        help="Types of K and V: f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl, or two of them.",
    ),
]
Context = Annotated[int | None, Option("--ctx", help="Longest sequence in tokens.", show_default="what fits")]
BlockSize = Annotated[
    int,
    Option(
        "--block-size",
        autocompletion=one_of(block_sizes),
        help="Tokens in a block: 32, 64, 128 or 256.",
    ),
]
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
Threads = Annotated[int | None, Option(help="CPU threads.", show_default="performance cores")]
GpuLayers = Annotated[
    Any,
    Option(
        "--n-gpu-layers",
        parser=parse_gpu_layers,
        metavar="N|auto",
        help="Layers on the GPU; -1: all; auto: as many as fit.",
    ),
]
Lora = Annotated[
    Any,
    Option(
        "--lora",
        parser=parse_lora,
        metavar="FILE[:SCALE]",
        help="Apply a LoRA adapter (GGUF); SCALE is the factor of its product.",
        show_default=False,
    ),
]
Deterministic = Annotated[bool, Option("--deterministic", help="Bit-identical logits in any batch.")]
Precision = Annotated[
    str,
    Option(
        "--attention-precision",
        autocompletion=one_of(precisions),
        help="exact; or fast: a prompt's attention in bfloat16.",
    ),
]

# ---- measurements ----

Depths = Annotated[
    Any, Option("--depth", parser=parse_numbers, metavar="N,...", help="Tokens in the context before.")
]
SequenceCounts = Annotated[
    Any, Option("--sequences", parser=parse_numbers, metavar="N,...", help="Concurrent answers.")
]
KVTypes = Annotated[
    Any,
    Option(
        "--kv-type",
        parser=parse_names,
        autocompletion=kv_types,
        metavar="TYPE,...",
        help="A run for each KV type.",
    ),
]
PromptLength = Annotated[int, Option("--prompt-tokens", help="Tokens of the timed prompt.")]
AnswerLength = Annotated[int, Option("--answer-tokens", help="Tokens of the timed answers.")]
Repeats = Annotated[int, Option("-r", "--repeats", help="Samples of each figure.")]
Plot = Annotated[Path | None, Option(help="Draw the answers over depth to this file.", show_default=False)]

# ---- simulation ----

Model = Annotated[
    Path | None,
    Option("--model", help="Compute the bytes of a token from this GGUF file.", show_default=False),
]
TokenBytes = Annotated[
    int | None,
    Option("--kv-bytes-per-token", help="Bytes of K and V of a token.", show_default="Qwen3-0.6B in f16"),
]
Workload = Annotated[
    Path | None, Option("--workload", help="Read the requests from a JSON file.", show_default=False)
]
TraceInput = Annotated[
    Path | None, Option("--trace", help="Read requests and pool from a recorded run.", show_default=False)
]
Requests = Annotated[int, Option("--requests", help="Requests to draw.")]
Rate = Annotated[float, Option("--rate", help="Requests per second (Poisson); inf: all at once.")]
LENGTHS = "tokens, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SD."
PromptLengths = Annotated[str, Option("--prompt", metavar="DIST", help=f"Length of prompts: {LENGTHS}")]
AnswerLengths = Annotated[str, Option("--answer", metavar="DIST", help="Length of answers, likewise.")]
MostTokens = Annotated[
    int, Option("--max-tokens", help="max_tokens of the requests; longer answers are cut.")
]
SharedPrefixes = Annotated[
    list[str] | None,
    Option(
        "--shared-prefix",
        metavar="N:SHARE",
        help="This share of the requests begins with the same N tokens; may be repeated.",
        show_default=False,
    ),
]
Samples = Annotated[int, Option("--samples", help="Answers to each prompt.")]
BlockSizes = Annotated[
    list[int] | None,
    Option(
        "--block-size",
        autocompletion=one_of(block_sizes),
        metavar="TOKENS",
        help="Tokens in a block; may be repeated. The engine has 32, 64, 128 and 256.",
        show_default="32",
    ),
]
PoolBytes = Annotated[
    Any,
    Option(
        "--kv-cache-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Memory of the KV cache, such as 512M or 2G.",
        show_default="2G, or as in the trace",
    ),
]
LongestSequence = Annotated[
    int | None,
    Option("--ctx", help="Longest sequence in tokens.", show_default="2048, or as in the trace"),
]
SwapBytes = Annotated[
    Any,
    Option(
        "--swap-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for preempted sequences, and for blocks of --kv-store.",
    ),
]
Policies = Annotated[
    list[str] | None,
    Option(
        "--policy",
        metavar="NAME",
        help="Policy for preempted sequences: auto, swap, recompute, or all; may be repeated.",
        show_default="auto",
    ),
]
MaxSeqs = Annotated[int, Option("--max-num-seqs", help="Sequences that run at once.")]
MaxBatch = Annotated[int, Option("--max-batch-tokens", help="Tokens of a step.")]
NoPrefixCache = Annotated[bool, Option("--no-prefix-cache", help="Share no prefixes.")]
Parallel = Annotated[
    int | None,
    Option("--parallel", help="Sequences of llama.cpp's layouts.", show_default="what fits"),
]
StepCost = Annotated[
    list[str] | None,
    Option(
        "--cost",
        metavar="NAME=SECONDS",
        help="step, prompt, decode, prompt_read, decode_read, masked or move; may be repeated.",
        show_default=False,
    ),
]
DrawSeed = Annotated[int, Option("--seed", help="Another number draws another workload.")]
RecordTo = Annotated[
    Path | None,
    Option("--record", help="Write a trace of the first run with pages, for report.", show_default=False),
]

# ---- report ----

TracePath = Annotated[Path, Argument(metavar="TRACE", help="A recorded run.", show_default=False)]
Picture = Annotated[
    Path | None,
    Option("-o", "--output", metavar="FILE", help="Draw it there: .svg, .png or .pdf.", show_default=False),
]

BySteps = Annotated[bool, Option("--steps", help="Draw over steps instead of seconds.")]

# ---- output ----

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Verbose = Annotated[bool, Option("-v", "--verbose", help="Show speed and memory on standard error.")]


_ENGINE = (
    *("kv_type", "block_size", "kv_cache_bytes", "swap_bytes", "max_num_seqs", "max_batch_tokens"),
    *("n_gpu_layers", "lora", "deterministic", "attention_precision"),
)
"""Options with the names of arguments of LLM."""


def engine_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of LLM that a command has options for."""
    named = {name: options[name] for name in _ENGINE if name in options}
    if options.get("kv_store") is not None:
        least = 1 if options.get("session") else 4
        named["kv_store"] = KVStore(options["kv_store"], options["kv_store_bytes"], min_blocks=least)
    return {**named, "n_ctx": options["ctx"], "n_threads": options["threads"]}
