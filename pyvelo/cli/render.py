"""Reports for a terminal and for a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from pyvelo.cli.tables import facts_grid, numbers_table, print_table
from pyvelo.cli.terminal import make_console, print_out
from pyvelo.cli.values import count, show_bytes

__all__ = [
    "WIDTH_WITHOUT_TERMINAL",
    "cores_text",
    "print_models",
    "print_report",
    "system_text",
]

WIDTH_WITHOUT_TERMINAL = 120


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report of `info.describe` as text."""
    console = make_console(width_without_terminal=WIDTH_WITHOUT_TERMINAL)
    sections: list[tuple[str, Table | str]] = [
        ("", _facts(report)),
        ("weights", _quantization(report["quantization"])),
        _cache(report["paged"]["refusal"], report["kv_types"]),
        ("", _machine(report["machine"], report["placement"])),
    ]
    for number, (title, content) in enumerate(sections):
        console.print("\n" * bool(number), f"[bold]{title}[/bold]\n" * bool(title), sep="", end="")
        if isinstance(content, str):
            console.print(content)
        else:
            print_table(console, content)


def print_models(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print name, size and path of each model in full, so that they can be copied."""
    lines = [("name", "size", "path"), *rows]
    name, size = (max(len(line[column]) for line in lines) for column in (0, 1))
    for line in lines:
        print_out(f"{line[0]:{name}}  {line[1]:>{size}}  {line[2]}")


def _facts(report: Mapping[str, Any]) -> Table:
    model = report["model"]
    grid = facts_grid()
    grid.add_row("model", escape(model["path"]))
    grid.add_row("description", escape(f"{model['description']} ({model['architecture']})"))
    grid.add_row("parameters", f"{model['parameters']:,}")
    grid.add_row(
        "weights", f"{show_bytes(model['weight_bytes'])} of a file of {show_bytes(model['file_bytes'])}"
    )
    grid.add_row("shape", _shape(model, report["layers"]))
    costs = [cost for cost in report["kv_types"].values() if "refusal" not in cost]
    if costs and len(costs[0]["groups"]) > 1:
        grid.add_row("groups", _groups(costs[0]["groups"]))
    grid.add_row("vocabulary", escape(f"{model['vocabulary']:,} tokens ({model['tokenizer']})"))
    grid.add_row("context", f"{model['context']:,} tokens as trained")
    if model["recurrent_layers"]:
        each = "some layers keep" if report["layers"] else "all layers keep"
        size = show_bytes(model["state_bytes"])
        grid.add_row(
            "recurrent", f"{each} a state in place of a cache: {size} for each sequence and snapshot"
        )
    return grid


def _shape(model: Mapping[str, Any], layers: list[Mapping[str, Any]]) -> str:
    heads = sorted({(layer["head_dim_k"], layer["head_dim_v"] or layer["head_dim_k"]) for layer in layers})
    sizes = " or ".join(str(k) if k == v else f"{k}/{v}" for k, v in heads)
    windows = sorted({layer["window"] for layer in layers if layer["window"]})
    text = f"{count(model['layers'], 'layer')} of {model['embedding']}"
    text += f", {count(model['heads'], 'head')}, {count(model['kv_heads'], 'KV head')}"
    text += f", head size {sizes}" if sizes else ""
    if windows:
        n_windowed = sum(1 for layer in layers if layer["window"])
        sizes = " or ".join(f"{window:,}" for window in windows)
        text += f", {count(n_windowed, 'layer')} with a window of {sizes} tokens"
    return text


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return how many groups of layers remember what, in words."""
    kinds: dict[tuple[int | None, bool], list[int]] = {}
    for group in groups:
        kinds.setdefault((group["window"], group["chunked"]), []).append(len(group["layers"]))
    texts = []
    for (window, chunked), sizes in kinds.items():
        name = "chunks" if chunked else "a window"
        kind = f"with {name} of {window:,} tokens" if window else "without a window"
        each = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
        texts.append(f"{len(sizes)} of {each} layer{'s' * (max(sizes) != 1)} {kind}")
    return f"{', '.join(texts)}; they share one pool of blocks"


def _quantization(shares: Mapping[str, Mapping[str, int]]) -> Table:
    total = sum(share["n_bytes"] for share in shares.values()) or 1
    table = numbers_table("type", "tensors", "parameters", "bytes", "share")
    for name, share in shares.items():
        table.add_row(
            name,
            str(share["tensors"]),
            f"{share['elements']:,}",
            show_bytes(share["n_bytes"]),
            f"{100 * share['n_bytes'] / total:.1f} %",
        )
    return table


def _cache(refusal: str | None, costs: Mapping[str, Mapping[str, Any]]) -> tuple[str, Table | str]:
    """Return a title and a table of the bytes of a token and of conversations, and the tokens that fit."""
    if refusal is not None:
        return "KV cache", escape(f"none: {refusal}")
    if not costs:
        return "KV cache", "none: no layer has one"
    possible = [cost for cost in costs.values() if "refusal" not in cost]
    sizes = " or ".join(map(str, sorted({cost["block_size"] for cost in possible})))
    title = f"KV cache in blocks of {sizes} tokens: what a conversation takes, and how many tokens fit"
    lengths = [told["tokens"] for told in possible[0]["conversations"]]
    windows = any(group["window"] for group in possible[0]["groups"])
    there = [f"{lengths[-1]:,} in llama.cpp"] if windows and lengths else []
    table = numbers_table(
        "type",
        *("a token", *(f"{n:,} tokens" for n in lengths), *there),
        *("tokens in 1 GiB", "tokens here", "sequences here"),
    )
    for name, cost in costs.items():
        if "refusal" in cost:
            dashes = "-" * (len(lengths) + len(there) + 4)
            table.add_row(name, *dashes, "cannot be cut into this model's heads")
            continue
        fitting = cost["tokens_that_fit"], cost["sequences_that_fit"]
        table.add_row(
            name,
            show_bytes(cost["token_bytes"]),
            *(show_bytes(told["bytes"]) for told in cost["conversations"]),
            *(show_bytes(cost["conversations"][-1]["llama_cpp_bytes"]) for _ in there),
            f"{cost['tokens_in_a_gib']:,}",
            *("unknown" if fit is None else f"{fit:,}" for fit in fitting),
        )
    return title, table


def _placement(placement: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each device: its layers and memory."""
    if "refusal" in placement:
        yield f"nothing: {placement['refusal']}"
        return
    for part in placement["devices"]:
        tokens = placement["tokens"]
        cache = "for snapshots" if tokens is None else f"of the cache of {tokens:,} tokens"
        yield (
            f"{part['name']}: {count(part['layers'], 'layer')}, {show_bytes(part['weight_bytes'])} of "
            f"weights, {show_bytes(part['pool_bytes'])} {cache}"
        )


def cores_text(machine: Mapping[str, Any]) -> str:
    """Return the cores of `info.machine_facts` in words."""
    return ", ".join(_cores(machine))


def system_text(machine: Mapping[str, Any]) -> str:
    """Return what the library is built for, in words."""
    abilities: str = machine["system"]
    return abilities.replace(" = 1", "").replace(" |", ",").strip(" ,")


def _cores(machine: Mapping[str, Any]) -> Iterator[str]:
    cores, fast = machine["cores"], machine["performance_cores"]
    if cores is not None:
        yield count(cores, "core") + ("" if fast == cores else f" ({fast} of them performance cores)")
    if machine["cpus"] != cores:
        yield count(machine["cpus"], "CPU")
    if machine["cpu_quota"] is not None:
        yield f"a quota of {machine['cpu_quota']:g} CPUs"


def _machine(machine: Mapping[str, Any], placement: Mapping[str, Any] | None) -> Table:
    grid = facts_grid()
    free = machine["free_memory"]
    memory = "unknown" if free is None else show_bytes(free)
    grid.add_row("machine", f"{cores_text(machine)}, {memory} of memory free")
    grid.add_row("threads", f"{machine['threads']} by default")
    grid.add_row("here", "weights and cache take at most 90 % of the free memory")
    for device in machine["devices"]:
        memory = f"{show_bytes(device['memory_free'])} of {show_bytes(device['memory_total'])} free"
        grid.add_row("device", escape(f"{device['name']}: {device['description']}, {memory}"))
    for line in _placement(placement) if placement else ():
        grid.add_row("runs on", escape(line))
    grid.add_row("built for", escape(system_text(machine)))
    return grid
