"""`pyvelo models`: which well-known models fit this machine, and how fast they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pyvelo.cli.exits import UsageError
from pyvelo.cli.info import MEMORY_SHARE
from pyvelo.cli.tables import fits_on, numbers_table, print_table
from pyvelo.cli.terminal import make_console, print_json, print_out
from pyvelo.cli.values import show_bytes
from pyvelo.errors import ConfigError, shown
from pyvelo.memory.cores import find_cores
from pyvelo.memory.host import free_memory
from pyvelo.memory.rate import read_rate
from pyvelo.models.families import FAMILIES, OWN_QUANTIZATION, QUANTIZATIONS, Family
from pyvelo.native import product_rate

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["fitting", "print_fitting", "show_fitting"]

CONTEXTS = (8192, 32768)  # tokens
NOTE_WIDTH = 79  # columns
WIDTH_OF_PIPES = 1000  # columns, more than a table has


def show_fitting(words: str, quantization: str, kv_type: str | tuple[str, str], *, as_json: bool) -> int:
    """Measure the memory and the arithmetic, and print what fits as a table or JSON; return the exit code.

    words: of which each model has all in its name or its repository.
    """
    families = _named(words)
    quantization = quantization.upper()
    if quantization not in QUANTIZATIONS:
        raise UsageError(f"--quant {shown(quantization)}: choose from {', '.join(QUANTIZATIONS)}")
    free, n_threads = free_memory(), find_cores().threads
    kinds = sorted({family.weights(quantization).kind for family in families})
    products = {kind: product_rate(kind, n_threads) for kind in kinds}
    content = fitting(quantization, kv_type, free, read_rate(n_threads, free), products, families)
    if as_json:
        print_json(content)
    else:
        print_fitting(content, all_repos=bool(words))
    return 0


def _named(words: str) -> Sequence[Family]:
    wanted = words.lower().split()
    found = [
        family
        for family in FAMILIES
        if all(word in f"{family.name} {family.repo}".lower() for word in wanted)
    ]
    if not found:
        raise ConfigError(f"no model is called {shown(words)}: pyvelo models shows all of them")
    return found


def fitting(
    quantization: str,
    kv_type: str | tuple[str, str],
    free: int | None,
    rate: float,
    products: Mapping[str, float],
    families: Sequence[Family] = FAMILIES,
) -> dict[str, Any]:
    """Return the memory and the speed of each family as plain data.

    Args:
        free: bytes of free memory; None: unknown.
        rate: bytes of memory that a step's threads read in a second.
        products: `product_rate` by ggml's type of the weights.
    """
    room = None if free is None else int(free * MEMORY_SHARE)
    models = []
    for family in families:
        model = _memory(family, quantization, kv_type, room)
        prompt = products[family.weights(quantization).kind] / family.prompt_products
        model["most_tokens_per_second"] = round(rate / family.read_bytes(quantization), 1)
        model["most_prompt_tokens_per_second"] = round(prompt, 1)
        models.append(model)
    return {
        "free_memory": free,
        "read_bytes_per_second": int(rate),
        "products_per_second": {kind: int(value) for kind, value in products.items()},
        "models": models,
    }


def _memory(
    family: Family, quantization: str, kv_type: str | tuple[str, str], room: int | None
) -> dict[str, Any]:
    weights = family.weight_bytes(quantization)
    cache = family.cache(kv_type)
    sizes = {n: weights + cache.sequence_bytes(n) for n in CONTEXTS if n <= family.context}
    least = min(sizes.values(), default=weights)
    return {
        "name": family.name,
        "repo": family.repo,
        "quantization": OWN_QUANTIZATION if family.bits else quantization,
        "weight_bytes": weights,
        "context": family.context,
        "memory": [{"tokens": n, "bytes": size} for n, size in sizes.items()],
        "fits": None if room is None else least <= room,
    }


def print_fitting(content: dict[str, Any], *, all_repos: bool = False) -> None:
    """Print a line for each model, and what the columns mean.

    all_repos: below the table if it has no room for the repositories.
    """
    free = content["free_memory"]
    memory = "unknown" if free is None else show_bytes(free)
    rate = content["read_bytes_per_second"] / 1e9
    console = make_console(width_without_terminal=WIDTH_OF_PIPES)
    models, table = content["models"], _table(content["models"], with_repos=True)
    with_repos = fits_on(console, table)
    print_table(console, table if with_repos else _table(models, with_repos=False))
    print_out()
    if all_repos and not with_repos:
        for model in models:
            print_out(f"{model['name']}: {model['repo']}")
        print_out()
    where = "" if with_repos or all_repos else "; pyvelo models NAME and --json show REPOSITORY"
    for note in (
        f"free memory: {memory}, which the processor reads at {rate:.1f} GB/s",
        "at 8k, at 32k: memory of weights and KV cache with so many tokens",
        "-: the model has fewer tokens",
        "answer: the most tokens per second of one, because each token reads the weights once",
        "prompt: the most tokens per second, by the speed of products with the weights",
        f"pyvelo chat REPOSITORY:TYPE downloads a model{where}",
    ):
        for line in wrap(note, min(NOTE_WIDTH, console.width), break_long_words=False):
            print_out(line)


def _table(models: Sequence[dict[str, Any]], *, with_repos: bool) -> Table:
    contexts = [f"at {n // 1024}k" for n in CONTEXTS]
    table = numbers_table("model", "type", "weights", *contexts, "answer", "prompt", "fits")
    table.padding = (0, 1, 0, 0)  # so that 80 columns hold it
    if with_repos:
        table.add_column("repository", no_wrap=True)
    for model in models:
        table.add_row(*_row(model), *[model["repo"]] * with_repos)
    return table


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    sizes = {told["tokens"]: show_bytes(told["bytes"]) for told in model["memory"]}
    fits = {True: "yes", False: "no", None: "unknown"}[model["fits"]]
    return (
        model["name"],
        model["quantization"],
        show_bytes(model["weight_bytes"]),
        *(sizes.get(n, "-") for n in CONTEXTS),
        f"{model['most_tokens_per_second']:.1f}",
        f"{model['most_prompt_tokens_per_second']:.0f}",
        fits,
    )
