"""`pyvelo simulate`: a workload over pages of several sizes and policies, and over contiguous caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from pyvelo.cli.exits import UsageError, as_options
from pyvelo.cli.progress import waiting
from pyvelo.cli.tables import numbers_table, print_table
from pyvelo.cli.terminal import make_console
from pyvelo.cli.values import count, show_bytes
from pyvelo.errors import ConfigError
from pyvelo.kv.geometry import POOL_GRAIN, make_geometry, parse_kv_type
from pyvelo.kv.prefix import FULL, Window
from pyvelo.simulate.contiguous import layouts, simulate_contiguous
from pyvelo.simulate.engine import POLICIES, Setup, StepCosts, simulate
from pyvelo.simulate.workload import Job, WorkloadSpec, draw_jobs, jobs_of_trace, read_jobs
from pyvelo.trace.format import Trace, read_trace

__all__ = ["Plan", "check_drawn", "print_outcomes", "run_plan"]

TOKEN_BYTES = 114_688  # of Qwen3-0.6B: 28 layers, K and V of 8 heads of 128 values in f16
CACHE_BYTES = 2 << 30
DRAWN = ("requests", "rate", "prompt", "answer", "max_tokens", "shared_prefix", "samples")
"""Options that describe requests to draw."""
CONTEXT = 2048
BLOCK_SIZE = 32
LARGEST_BLOCK = 4096
LARGEST = 1 << 62  # bytes


@dataclass(frozen=True)
class Plan:
    """Plan of the options; None: the trace's value, or a default."""

    model: Path | None
    kv_type: str | tuple[str, str]
    token_bytes: int | None
    spec: WorkloadSpec
    workload: Path | None
    trace: Path | None
    block_sizes: tuple[int, ...]
    kv_cache_bytes: int | None
    swap_bytes: int
    n_ctx: int | None
    max_seqs: int
    max_batch_tokens: int
    prefix_cache: bool
    policies: tuple[str, ...]
    n_parallel: int | None
    costs: tuple[str, ...]
    record: Path | None


def run_plan(plan: Plan) -> dict[str, Any]:
    """Run all simulations; return plain data in bytes, tokens and seconds.

    Raises:
        UsageError: an option is not valid.
        ConfigError: the model cannot be paged, or the workload is not valid.
        ModelError: the model cannot be read.
        TraceError: the trace is not valid.
        OSError: a file cannot be read or written.
    """
    if plan.workload is not None and plan.trace is not None:
        raise UsageError("give --workload or --trace, not both")
    parse_kv_type(plan.kv_type)
    trace = read_trace(plan.trace) if plan.trace is not None else None
    n_ctx = _first(plan.n_ctx, trace.header.n_ctx if trace else None, CONTEXT)
    if n_ctx < 2:
        raise UsageError(f"--ctx {n_ctx}: give 2 tokens or more, one for the prompt and one for the answer")
    jobs = _jobs(plan, trace, n_ctx)
    cache = _cache(plan, trace)
    token_bytes = cache.token_bytes
    try:
        setups = _setups(plan, trace, n_ctx, cache)
    except ConfigError as error:
        raise UsageError(as_options(str(error))) from None
    with waiting(f"simulating {len(jobs)} requests"), _naming(plan.record):
        outcomes = [
            simulate(setup, jobs, seed=plan.spec.seed, record=None if number else plan.record)
            for number, setup in enumerate(setups)
        ]
        outcomes += [
            simulate_contiguous(setups[0], jobs, layout)
            for layout in layouts(setups[0], jobs, plan.n_parallel)
        ]
    n_samples = sum(job.samples for job in jobs)
    return {
        "workload": {
            "requests": len(jobs),
            "sequences": n_samples,
            "prompt_tokens": sum(job.n_prompt for job in jobs),
            "answer_tokens": sum(job.n_answer * job.samples for job in jobs),
            "seconds": jobs[-1].time,
        },
        "pool": {
            "token_bytes": token_bytes,
            "pool_bytes": setups[0].n_blocks * setups[0].block_bytes,
            "tokens": setups[0].n_slots,
            "n_ctx": n_ctx,
        },
        "costs": asdict(setups[0].costs),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def check_drawn(context: typer.Context, workload: Path | None, trace: Path | None) -> None:
    """Raise UsageError if options describe requests that a file gives."""
    source = "--trace" if trace is not None else "--workload" if workload is not None else ""
    given = [
        name for name in DRAWN if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if source and given:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"give {source} or {option}, not both: the file says what the requests are")


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Give errors of writing the name of the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def _first(*values: int | None) -> int:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _jobs(plan: Plan, trace: Trace | None, n_ctx: int) -> list[Job]:
    if trace is not None:
        return jobs_of_trace(trace)
    if plan.workload is not None:
        return read_jobs(plan.workload)
    return draw_jobs(plan.spec, n_ctx)


class _Cache(NamedTuple):
    """Bytes of a token over all groups of layers, the windows of the groups, and the bytes of a state."""

    token_bytes: int
    windows: tuple[Window, ...] = (FULL,)
    state_bytes: int = 0


def _cache(plan: Plan, trace: Trace | None) -> _Cache:
    if plan.model is not None and plan.token_bytes is not None:
        raise UsageError("give --model or --kv-bytes-per-token, not both")
    if plan.model is not None:
        return _cache_of_model(plan.model, plan.kv_type)
    recorded = max(1, trace.header.block_bytes // trace.header.block_size) if trace else None
    token_bytes = _first(plan.token_bytes, recorded, TOKEN_BYTES)
    if not 1 <= token_bytes <= LARGEST:
        raise UsageError(f"--kv-bytes-per-token {token_bytes}: give a number of bytes above 0")
    return _Cache(token_bytes)


def _cache_of_model(path: Path, kv_type: str | tuple[str, str]) -> _Cache:
    from pyvelo import native
    from pyvelo.models.gguf_scan import scan
    from pyvelo.models.hub import locate

    path = Path(locate(str(path)))
    scan(path)
    with native.Model(str(path), deterministic=True) as model:  # weights stay mapped, they are not read
        if model.refusal is not None:
            raise ConfigError(f"{path}: {model.refusal}")
        state_bytes = model.info.state_bytes
        geometry = make_geometry(path.name, model.layers, kv_type, state_bytes=state_bytes)
        return _Cache(geometry.token_bytes, geometry.windows, state_bytes)


def _setups(plan: Plan, trace: Trace | None, n_ctx: int, cache: _Cache) -> list[Setup]:
    """Return every block size with every policy, with equal numbers of slots, rounded to whole blocks."""
    token_bytes, n_groups = cache.token_bytes, len(cache.windows)
    recorded = trace.header.n_blocks * trace.header.block_size * token_bytes if trace else None
    n_bytes = _first(plan.kv_cache_bytes, recorded, CACHE_BYTES)
    slot_bytes = token_bytes // n_groups
    n_slots = n_bytes // (POOL_GRAIN * slot_bytes) * POOL_GRAIN  # of one group each
    if n_slots == 0:
        raise UsageError(
            f"--kv-cache-bytes {n_bytes} is too little: the smallest pool, {POOL_GRAIN} tokens of "
            f"{slot_bytes} bytes each, takes {POOL_GRAIN * slot_bytes}"
        )
    sizes = plan.block_sizes or (trace.header.block_size if trace else BLOCK_SIZE,)
    for size in sizes:
        if not 1 <= size <= min(LARGEST_BLOCK, n_slots):
            most = min(LARGEST_BLOCK, n_slots)
            raise UsageError(f"--block-size {size}: give a number of tokens from 1 to {most}")
    policies = [p for given in plan.policies for p in (POLICIES if given == "all" else (given,))]
    if plan.n_parallel is not None and plan.n_parallel < 1:
        raise UsageError(f"--parallel {plan.n_parallel}: give a number of 1 and more")
    costs = _costs(plan.costs)
    return [
        Setup(
            n_blocks=n_slots // size,
            block_size=size,
            block_bytes=size * slot_bytes,
            n_ctx=n_ctx,
            n_swap_blocks=plan.swap_bytes // (size * slot_bytes),
            max_seqs=plan.max_seqs,
            max_batch_tokens=plan.max_batch_tokens,
            prefix_cache=plan.prefix_cache,
            policy=policy,
            costs=costs,
            windows=cache.windows,
            state_blocks=-(-cache.state_bytes // (size * slot_bytes)),
        )
        for size in dict.fromkeys(sizes)
        for policy in dict.fromkeys(policies)
    ]


def _costs(given: Sequence[str]) -> StepCosts:
    names = [field.name for field in fields(StepCosts)]
    values = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            name = ""
        if name not in names:
            raise UsageError(f"--cost {text!r}: give NAME=SECONDS with a NAME of {', '.join(names)}")
    return replace(StepCosts(), **values)


# ---- for people ----

# heading, value of an outcome, and its format; columns at the end are left out if all are 0
COLUMNS = (
    ("at once", "peak_running", 1, "d"),
    ("waste %", "waste", 100, ".1f"),
    ("saved %", "saved", 100, ".1f"),
    ("done s", "seconds", 1, ",.0f"),
    ("TTFT s", "ttft_p50", 1, ".1f"),
    ("p99", "ttft_p99", 1, ".1f"),
    ("TBT ms", "tbt_p50", 1000, ".0f"),
    ("p99", "tbt_p99", 1000, ".0f"),
    ("preempted", "preemptions", 1, "d"),
    ("swapped", "swaps", 1, "d"),
    ("hits %", "hit_rate", 100, ".0f"),
    ("refused", "refused", 1, "d"),
)
OPTIONAL = {"saved", "preemptions", "swaps", "hit_rate", "refused"}
WIDTH = 132  # without a terminal


def print_outcomes(report: Mapping[str, Any]) -> None:
    """Print the report of `run_plan` as a table: time to first token, time between tokens, median, 99 %."""
    console = make_console(width_without_terminal=WIDTH)
    work, pool = report["workload"], report["pool"]
    console.print(
        f"{count(work['requests'], 'request')} in {work['seconds']:.0f} s, "
        f"{work['prompt_tokens']:,} tokens of prompt, {work['answer_tokens']:,} of answer; "
        f"{show_bytes(pool['pool_bytes'])} for {pool['tokens']:,} tokens, {pool['n_ctx']:,} of a sequence\n",
        soft_wrap=True,
    )
    outcomes = report["outcomes"]
    shown = [c for c in COLUMNS if c[1] not in OPTIONAL or any(outcome[c[1]] for outcome in outcomes)]
    table = numbers_table("layout", *(heading for heading, *_ in shown))
    for outcome in outcomes:
        table.add_row(
            outcome["scheme"], *(format(outcome[name] * factor, form) for _, name, factor, form in shown)
        )
    print_table(console, table)
