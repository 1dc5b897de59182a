"""Commands about models and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pyvelo.cli import options as opt
from pyvelo.cli.completion import cached_names, chats, quantizations
from pyvelo.cli.exits import UsageError
from pyvelo.cli.terminal import print_json
from pyvelo.demo import DEMO_MODEL

__all__ = ["doctor", "info", "list_models", "models", "pull", "rm"]

CachedName = Annotated[
    str | None,
    Argument(
        metavar="ORG/REPO[:QUANT]",
        autocompletion=cached_names,
        help="A model in the cache.",
        show_default=False,
    ),
]
KeptChat = Annotated[
    str | None,
    Option("--session", metavar="NAME", autocompletion=chats, help="A chat of pyvelo chat --session."),
]
ChatStore = Annotated[
    str | None, Option("--kv-store", metavar="PLACE", help="The store that --kv-store of the chat named.")
]
Yes = Annotated[bool, Option("-y", "--yes", help="Do not ask before.")]
FamilyWords = Annotated[
    list[str] | None,
    Argument(metavar="[NAME]...", help="Words of the names to show; all models without.", show_default=False),
]
Quant = Annotated[
    str,
    Option(
        "--quant",
        autocompletion=quantizations,
        help="Quantization of the weights: Q4_K_M, Q6_K or Q8_0.",
    ),
]


def info(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    block_size: opt.BlockSize = 32,
    n_gpu_layers: opt.GpuLayers = "auto",
    as_json: opt.Json = False,
) -> int:
    """Show what a model is, and what its KV cache costs here."""
    from pyvelo.cli.info import describe
    from pyvelo.cli.render import print_report
    from pyvelo.models.hub import locate

    report = describe(Path(locate(model)), block_size, n_gpu_layers)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    return 0


def pull(model: opt.HubModel, as_json: opt.Json = False) -> int:
    """Bring a model from the hub into the cache, and print its path."""
    from pyvelo.cli.models import pull_model

    return pull_model(model, as_json=as_json)


def list_models(as_json: opt.Json = False) -> int:
    """Show the models that are in the cache."""
    from pyvelo.cli.models import show_cached

    return show_cached(as_json=as_json)


def rm(
    model: CachedName = None,
    session: KeptChat = None,
    kv_store: ChatStore = None,
    yes: Yes = False,
    as_json: opt.Json = False,
) -> int:
    """Remove a model from the cache, or a chat and its blocks in the KV store."""
    from pyvelo.cli.chat_session import remove_session
    from pyvelo.cli.models import remove_model

    if session is not None and model is None:
        return remove_session(session, kv_store, ask=not yes, as_json=as_json)
    if model is None or session is not None or kv_store is not None:
        raise UsageError("give a model as ORG/REPO:QUANT, or a chat as --session NAME")
    return remove_model(model, ask=not yes, as_json=as_json)


def models(
    words: FamilyWords = None,
    quant: Quant = "Q4_K_M",
    kv_type: opt.KVTypeOption = "f16",
    as_json: opt.Json = False,
) -> int:
    """Show which well-known models fit this machine, and how fast they can be."""
    from pyvelo.cli.fit import show_fitting

    return show_fitting(" ".join(words or ()), quant, kv_type, as_json=as_json)


def doctor(as_json: opt.Json = False) -> int:
    """Check this installation and this machine, and say what to do."""
    from pyvelo.cli.doctor import examine

    return examine(as_json=as_json)
