"""Options of a cluster, from a command line or from the `args` of a config file of Ray Serve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from typer import Option

from pyvelo.cli import options as opt
from pyvelo.cli import serve as of_server
from pyvelo.cluster.policy import POLICIES, make_policy
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError, shown
from pyvelo.memory.cores import find_cores
from pyvelo.server.settings import Settings

__all__ = ["Options", "arguments_of", "parse"]

SHARE = 0.9
"""Share of the free memory that the pools of all replicas take together, if no size is given."""


@dataclass(frozen=True)
class Options:
    """Settings of a cluster.

    replicas: their number, without `autoscale`, which is the smallest and the largest one.
    cpus, gpus: that Ray reserves for a replica; ingress_cpus: for an ingress.
    target_requests: open requests of a replica that autoscaling aims at.
    upscale_delay, downscale_delay: seconds of more, or less, load before the number changes.
    router: arguments of `PrefixRouter.initialize_state`.
    """

    config: EngineConfig
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    autoscale: tuple[int, int] | None = None
    target_requests: float = 8.0
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    cpus: float = 1.0
    gpus: float = 0.0
    ingresses: int = 1
    ingress_cpus: float = 0.0
    drain: float = 30.0
    router: dict[str, Any] = field(default_factory=dict)


Replicas = Annotated[int, Option(min=1, max=10_000, help="Replicas of the model.")]
Autoscale = Annotated[
    str | None,
    Option(metavar="MIN:MAX", help="Change the number of replicas with the load.", show_default=False),
]
Target = Annotated[float, Option(min=0.1, help="Open requests of a replica that --autoscale aims at.")]
Up = Annotated[float, Option(min=0.1, help="Seconds of more load before a replica is added.")]
Down = Annotated[float, Option(min=0.1, help="Seconds of less load before a replica ends.")]
Cpus = Annotated[
    float | None,
    Option(min=0.0, help="CPUs that Ray reserves for a replica.", show_default="its threads"),
]
Gpus = Annotated[float, Option(min=0.0, help="GPUs that Ray reserves for a replica.")]
Ingresses = Annotated[int, Option(min=1, max=1000, help="Processes that forward requests.")]
IngressCpus = Annotated[float, Option(min=0.0, help="CPUs that Ray reserves for each of them.")]
PolicyName = Annotated[str, Option("--policy", help=f"Choice of a replica: {', '.join(POLICIES)}.")]
Factor = Annotated[
    float | None,
    Option(help="Load over the mean from which affinity yields.", show_default="1.25"),
]
Slack = Annotated[
    int | None, Option(help="Open requests that a replica may have in any case.", show_default="4")
]
Port = Annotated[int, Option(min=1, max=65535, help="Port to listen at.")]


def cluster(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    replicas: Replicas = 1,
    autoscale: Autoscale = None,
    target_requests: Target = 8.0,
    upscale_delay: Up = 10.0,
    downscale_delay: Down = 300.0,
    cpus: Cpus = None,
    gpus: Gpus = 0.0,
    ingresses: Ingresses = 1,
    ingress_cpus: IngressCpus = 0.0,
    policy: PolicyName = "affinity",
    factor: Factor = None,
    slack: Slack = None,
    host: of_server.Host = "127.0.0.1",
    port: Port = 8000,
    model_name: of_server.Names = None,
    chat_template: opt.ChatTemplate = None,
    api_key_file: of_server.KeyFile = None,
    insecure: of_server.Insecure = False,
    cors_origin: of_server.Origins = None,
    allow_host: of_server.Hosts = None,
    max_queue: of_server.MaxQueue = 256,
    max_queued_tokens: of_server.QueuedTokens = None,
    max_sessions: of_server.MaxSessions = 64,
    drain: of_server.Drain = 30.0,
    vllm_metrics: of_server.VllmMetrics = False,
    kv_type: opt.KVTypeOption = "f16",
    ctx: opt.Context = None,
    block_size: opt.BlockSize = 32,
    kv_cache_bytes: opt.CacheBytes = None,
    swap_bytes: opt.SwapBytes = "0",
    kv_store: opt.KvStore = None,
    kv_store_bytes: opt.KvStoreBytes = "10G",
    max_num_seqs: opt.MaxSeqs = 256,
    max_batch_tokens: opt.MaxBatch = 512,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    deterministic: opt.Deterministic = False,
    attention_precision: opt.Precision = "exact",
) -> Options:
    """Serve a model by several replicas on Ray."""
    given = locals()
    settings = of_server.server_settings(given, page=False)
    scale = None if autoscale is None else _range(autoscale)
    n_most = replicas if scale is None else scale[1]
    threads = threads or max(1, find_cores().threads // n_most)
    engine = opt.engine_settings({**given, "threads": threads})
    bounds = {"factor": factor, "slack": slack}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    if bounds and policy != "affinity":
        raise ConfigError(f"--{min(bounds)} is an option of --policy affinity")
    _check_policy(policy, bounds)
    return Options(
        config=EngineConfig(model=model, memory_utilization=SHARE / n_most, **engine),
        settings=settings,
        cpus=float(threads) if cpus is None else cpus,
        autoscale=scale,
        router={"policy": policy, **bounds},
        **{name: given[name] for name in _SAME},
    )


_SAME = (
    *("host", "port", "replicas", "target_requests", "upscale_delay", "downscale_delay", "gpus"),
    *("ingresses", "ingress_cpus", "drain"),
)

_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
)
_app.command()(cluster)


def parse(arguments: Sequence[str]) -> Options | int:
    """Return the options of a command line; an exit code if its help was printed.

    Raises:
        ConfigError: an option has a wrong value.
        Exception: of typer, with `format_message`, if the words are no command line.
    """
    found: Options | int = _app(
        args=list(arguments), prog_name="python -m pyvelo.cluster.ray", standalone_mode=False
    )
    return found


def arguments_of(fields: Mapping[str, Any]) -> list[str]:
    """Return the command line of fields such as {"model": "a.gguf", "replicas": 2, "insecure": True}.

    A field has the name of its option; a list repeats the option; False and None leave it out.
    """
    words = []
    for name, value in fields.items():
        option = f"--{name.replace('_', '-')}"
        if name == "model":
            words.append(str(value))
        elif isinstance(value, (list, tuple)):
            words += [word for each in value for word in (option, str(each))]
        elif value is True or (isinstance(value, str) and value.lower() == "true"):
            words.append(option)
        elif value is not None and value is not False and str(value).lower() not in ("false", ""):
            words += [option, str(value)]
    return words


def _check_policy(name: str, bounds: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the name of the option, for a wrong policy or bound."""
    try:
        make_policy(name, lambda: 0.0, **bounds)
    except ConfigError as error:
        raise ConfigError(re.sub(r"^(factor|slack)=", r"--\1 ", str(error))) from None


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) <= 10_000:
        return int(low), int(high)
    raise ConfigError(f"--autoscale {shown(text)}: give the least and the most replicas, such as 1:4")
