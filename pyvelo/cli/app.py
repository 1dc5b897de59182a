"""Commands, and the conversion of errors to a line and an exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from pyvelo import __version__
from pyvelo.cli import options as opt
from pyvelo.cli.about import doctor, info, list_models, models, pull, rm
from pyvelo.cli.batch import batch
from pyvelo.cli.completion import whole_words
from pyvelo.cli.exits import (
    BROKEN_PIPE,
    ERROR,
    INTERRUPTED,
    USAGE,
    UsageError,
    as_options,
    code_of,
    drop_unwritten,
    exits_for_signals,
    explain,
    hint_of,
    interrupted,
    parse_option,
    silence_stdout,
    without_prefix,
)
from pyvelo.cli.serve import serve
from pyvelo.cli.terminal import library_log, prepare_streams, print_error, print_json, print_out
from pyvelo.cli.values import chat_options, parse_reasoning, parse_system
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError, VeloError

__all__ = ["app", "execute"]

app = typer.Typer(
    name="pyvelo",
    help="Runs quantized GGUF models over a paged KV cache.",
    add_completion=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def execute(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: 0, 1 for an error, 2 for wrong usage, 130 for Ctrl-C, 141 if the reader of a pipe has gone,
        129 and 143 for SIGHUP and SIGTERM.
    """
    warnings.showwarning = _show_warning
    prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with exits_for_signals(), library_log(), whole_words():
            code = app(args=arguments or ["--help"], prog_name="pyvelo", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # typer exits when the reader of a pipe has gone, and after a shell's request for completions
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            return error.code if isinstance(error.code, int) else ERROR
        silence_stdout()
        return BROKEN_PIPE
    except VeloError as error:
        message = as_options(str(error))
        return _fail(message, code_of(error, message))
    except OSError as error:
        drop_unwritten()
        return _fail(explain(error), ERROR)
    except Exception as error:
        if (code := interrupted(error)) is not None:
            return code
        # typer's own complaints; which class they have depends on its version
        describe = getattr(error, "format_message", None)
        if describe is None and sys.stderr.isatty():
            print_error(traceback.format_exc().rstrip())
            return ERROR
        if describe is None:
            raise
        return _fail(hint_of(error, without_prefix(describe()), arguments), USAGE)


def _fail(message: str, code: int) -> int:
    """Print an error as a line, or nothing if help was shown instead; return the exit code."""
    line = " ".join(message.split())
    if line:
        print_error(f"pyvelo: {line}")
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning of the engine in one line, without its place in the source."""
    print_error(f"pyvelo: {as_options(str(message))}")


def _show_version(wanted: bool) -> None:
    if wanted:
        print_out(f"pyvelo {__version__}")
        raise typer.Exit


SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "seed", "stop", "ignore_eos", "echo"),
)


def _settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of SamplingParams and of LLM that a command has options for."""
    given = {
        **options,
        "max_tokens": None if options["max_tokens"] == -1 else options["max_tokens"],
        "stop": tuple(options.get("stop") or ()),
    }
    if "" in given["stop"]:
        raise UsageError("--stop '': give a text that is not empty")
    return {name: given[name] for name in SAMPLING if name in given}, opt.engine_settings(options)


@app.callback(invoke_without_command=True)
def _global_options(
    context: typer.Context,
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print_out(context.get_help().rstrip())
        raise typer.Exit(USAGE)


@app.command()
def run(
    words: opt.ModelAndPrompt = None,
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    as_chat: opt.AsChat = False,
    system: opt.System = None,
    chat_template: opt.ChatTemplate = None,
    template_arg: opt.TemplateArguments = None,
    reasoning: opt.Reasoning = None,
    no_think: opt.NoThink = False,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    echo: opt.Echo = False,
    kv_type: opt.KVTypeOption = "f16",
    ctx: opt.Context = None,
    block_size: opt.BlockSize = 32,
    kv_cache_bytes: opt.CacheBytes = None,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: opt.Lora = None,
    deterministic: opt.Deterministic = False,
    attention_precision: opt.Precision = "exact",
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> int:
    """Generate text, and print it as it comes."""
    from pyvelo.cli.run import Request, generate, read_message, split_words

    model, prompt = split_words(words or (), prompt, file)
    sampling, engine = _settings(locals())
    chat = chat_options(chat_template, template_arg, parse_reasoning(reasoning, no_think))
    told = parse_system(system)
    as_chat = as_chat or model == str(DEMO_MODEL) or told is not None or any(chat.values())
    request = Request(
        model,
        read_message(prompt, file),
        chat=chat if as_chat else None,
        system=told,
        reasoning=reasoning == "show",
        sampling=sampling,
        engine=engine,
    )
    return generate(request, as_json=as_json, verbose=verbose)


@app.command()
def chat(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    system: opt.System = None,
    chat_template: opt.ChatTemplate = None,
    template_arg: opt.TemplateArguments = None,
    reasoning: opt.Reasoning = None,
    no_think: opt.NoThink = False,
    no_status: opt.NoStatus = False,
    no_history: opt.NoHistory = False,
    session: opt.SessionName = None,
    kv_store: opt.KvStore = None,
    kv_store_bytes: opt.KvStoreBytes = "10G",
    max_tokens: opt.MaxTokens = -1,
    temperature: opt.ChatTemperature = None,
    top_k: opt.ChatTopK = None,
    top_p: opt.ChatTopP = None,
    min_p: opt.ChatMinP = None,
    repetition_penalty: opt.ChatRepetitionPenalty = None,
    seed: opt.Seed = None,
    kv_type: opt.KVTypeOption = "f16",
    ctx: opt.Context = None,
    kv_cache_bytes: opt.CacheBytes = None,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: opt.Lora = None,
) -> int:
    """Talk with a model; /help lists the commands."""
    from pyvelo.cli.chat_loop import ChatSettings, open_chat
    from pyvelo.cli.chat_session import default_store

    reasoning = parse_reasoning(reasoning, no_think)
    options = chat_options(chat_template, template_arg, reasoning)
    if session is not None:
        kv_store = kv_store or default_store()
        if kv_store is None:
            print_error(
                'pyvelo: without the extra store the KV of this chat is not kept: pip install "pyvelo[store]"'
            )
    settings = ChatSettings(parse_system(system), options, reasoning, not no_status, not no_history, session)
    sampling, engine = _settings(locals())
    sampling = {name: value for name, value in sampling.items() if value is not None or name == "max_tokens"}
    return open_chat(model, settings, sampling, engine)


app.command()(serve)
app.command()(batch)


@app.command()
def embed(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    text: opt.Texts = None,
    file: opt.TextFile = None,
    pooling: opt.Pooling = None,
    raw: opt.Raw = False,
    ctx: opt.Context = None,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: opt.Lora = None,
    as_json: opt.Json = False,
) -> int:
    """Print a vector for each text."""
    engine = opt.engine_settings(locals())
    from pyvelo.cli.embed import check_model, print_vectors, read_texts

    check_model(model, text, file)
    texts = read_texts(text, file)
    where = f"{file}, line" if file is not None else "text" if text and text != ["-"] else "line"
    output = {"normalize": not raw, "as_json": as_json}
    return print_vectors(model, texts, where=where, pooling=pooling, engine=engine, **output)


@app.command()
def bench(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    depth: opt.Depths = "0",
    sequences: opt.SequenceCounts = "1",
    kv_type: opt.KVTypes = "f16",
    prompt: opt.PromptLength = 512,
    answer: opt.AnswerLength = 64,
    repeats: opt.Repeats = 3,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: opt.Lora = None,
    plot: opt.Plot = None,
    as_json: opt.Json = False,
) -> int:
    """Measure how fast a model runs here."""
    from pyvelo.cli.bench import run_bench
    from pyvelo.cli.measure import BenchPlan
    from pyvelo.models.hub import locate

    plan = BenchPlan(
        model=locate(model),
        kv_types=kv_type,
        depths=depth,
        sequences=sequences,
        prompt=prompt,
        answer=answer,
        repeats=repeats,
        n_threads=threads,
        n_gpu_layers=n_gpu_layers,
        lora=lora,
    )
    return run_bench(plan, as_json=as_json, plot=plot)


for command in (info, pull, rm, models, doctor):
    app.command()(command)
app.command("list")(list_models)


@app.command()
def simulate(
    context: typer.Context,
    model: opt.Model = None,
    kv_type: opt.KVTypeOption = "f16",
    token_bytes: opt.TokenBytes = None,
    requests: opt.Requests = 200,
    rate: opt.Rate = 1.0,
    prompt: opt.PromptLengths = "exponential:161",
    answer: opt.AnswerLengths = "exponential:338",
    max_tokens: opt.MostTokens = 1024,
    shared_prefix: opt.SharedPrefixes = None,
    samples: opt.Samples = 1,
    workload: opt.Workload = None,
    trace: opt.TraceInput = None,
    block_size: opt.BlockSizes = None,
    kv_cache_bytes: opt.PoolBytes = None,
    swap_bytes: opt.SwapBytes = "0",
    ctx: opt.LongestSequence = None,
    max_num_seqs: opt.MaxSeqs = 256,
    max_batch_tokens: opt.MaxBatch = 512,
    no_prefix_cache: opt.NoPrefixCache = False,
    policy: opt.Policies = None,
    parallel: opt.Parallel = None,
    cost: opt.StepCost = None,
    seed: opt.DrawSeed = 0,
    record: opt.RecordTo = None,
    as_json: opt.Json = False,
) -> int:
    """Run the engine without a model, on a described workload, beside contiguous caches of the same size."""
    from pyvelo.cli.simulate import Plan, check_drawn, print_outcomes, run_plan
    from pyvelo.simulate.workload import WorkloadSpec, parse_lengths, parse_prefix

    check_drawn(context, workload, trace)
    try:
        prompts = parse_option("--prompt", parse_lengths, prompt)
        answers = parse_option("--answer", parse_lengths, answer)
        prefixes = [parse_option("--shared-prefix", parse_prefix, text) for text in shared_prefix or ()]
        spec = WorkloadSpec(requests, rate, prompts, answers, max_tokens, samples, prefixes, seed)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    plan = Plan(
        model=model,
        kv_type=kv_type,
        token_bytes=token_bytes,
        spec=spec,
        workload=workload,
        trace=trace,
        block_sizes=tuple(block_size or ()),
        kv_cache_bytes=kv_cache_bytes,
        swap_bytes=swap_bytes,
        n_ctx=ctx,
        max_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=not no_prefix_cache,
        policies=tuple(policy or ("auto",)),
        n_parallel=parallel,
        costs=tuple(cost or ()),
        record=record,
    )
    (print_json if as_json else print_outcomes)(run_plan(plan))
    return 0


@app.command()
def report(
    trace: opt.TracePath,
    picture: opt.Picture = None,
    by_steps: opt.BySteps = False,
    as_json: opt.Json = False,
) -> int:
    """Show what a recorded run (LLM.trace, simulate --record) did to memory; -o draws it."""
    from pyvelo.cli.report import print_summary
    from pyvelo.cli.report import report as read

    content = read(trace, picture, by_steps)
    if as_json:
        print_json(content)
    else:
        print_summary(content)
    return 0
