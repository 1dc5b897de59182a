"""`pyvelo serve`."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from pyvelo.cli import options as opt
from pyvelo.cli.exits import UsageError
from pyvelo.cli.terminal import print_out
from pyvelo.cli.values import parse_lora, read_template
from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError, shown
from pyvelo.hosts import is_loopback
from pyvelo.kv_events import KVEvents

if TYPE_CHECKING:
    from pyvelo.server.serving import Serving
    from pyvelo.server.settings import Settings

__all__ = [
    "Loras",
    "Names",
    "check_model_names",
    "check_modules",
    "loras_by_name",
    "serve",
    "server_settings",
]

KEY_VARIABLE = "PYVELO_API_KEY"


Host = Annotated[str, Option(help="Address to listen at; without keys only this machine's own.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0: a free one.")]
Names = Annotated[
    list[str] | None,
    Option(
        "--model-name",
        help='Name of the model for clients; may be repeated; "*": any.',
        show_default="of its file",
    ),
]
KeyFile = Annotated[
    Path | None,
    Option(
        help=f"File of API keys, a line NAME KEY each; {KEY_VARIABLE} may have one, too.", show_default=False
    ),
]
Insecure = Annotated[bool, Option("--insecure", help="Let other machines use the server without a key.")]
Origins = Annotated[
    list[str] | None,
    Option(
        "--cors-origin",
        help='Allow web pages of this origin; may be repeated; "*": any.',
        show_default=False,
    ),
]
Hosts = Annotated[
    list[str] | None,
    Option(
        "--allow-host",
        help='Answer to this name in the header Host without a key; may be repeated; "*": any.',
        show_default=False,
    ),
]
Loras = Annotated[
    list[Any] | None,
    Option(
        "--lora",
        parser=parse_lora,
        metavar="FILE[:SCALE]",
        help="Serve a LoRA adapter (GGUF) as a model with the file's name, too; may be repeated.",
        show_default=False,
    ),
]
MaxQueue = Annotated[int, Option(min=0, max=1_000_000, help="Requests that may wait.")]
QueuedTokens = Annotated[
    int | None,
    Option("--max-queued-tokens", min=1, help="Prompt tokens that may wait.", show_default="4 pools"),
]
MaxSessions = Annotated[int, Option(min=0, max=1_000_000, help="Sessions of a key at /v1/sessions.")]
Drain = Annotated[
    float, Option(min=0, help="Seconds for answers in progress after SIGTERM or the first Ctrl-C.")
]
Page = Annotated[
    bool | None,
    Option(
        "--page/--no-page",
        help="Show the page with the block map and a chat at / also to other machines, or to none.",
        show_default="this machine",
    ),
]
Events = Annotated[
    str | None,
    Option(
        "--kv-events",
        metavar="ADDRESS",
        help="Tell routers there which prompts are cached, such as tcp://127.0.0.1:5557.",
        show_default=False,
    ),
]
EventsReplay = Annotated[
    str | None,
    Option(
        "--kv-events-replay",
        metavar="ADDRESS",
        help="Answer requests for past events there.",
        show_default=False,
    ),
]
EventsTopic = Annotated[
    str,
    Option(metavar="TOPIC", help="Topic of the events, such as kv@NAME@MODEL for llm-d.", show_default=False),
]
EventsEncoding = Annotated[
    str, Option(metavar="map|array", help="Form of the events: as vLLM since 0.24, or before.")
]
VllmMetrics = Annotated[bool, Option("--vllm-metrics", help="Name metrics as vLLM does, too.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Log no requests.")]


def serve(
    model: opt.DemoOrModel = str(DEMO_MODEL),
    host: Host = "127.0.0.1",
    port: Port = 8000,
    model_name: Names = None,
    chat_template: opt.ChatTemplate = None,
    api_key_file: KeyFile = None,
    insecure: Insecure = False,
    cors_origin: Origins = None,
    allow_host: Hosts = None,
    max_queue: MaxQueue = 256,
    max_queued_tokens: QueuedTokens = None,
    max_sessions: MaxSessions = 64,
    drain: Drain = 30.0,
    vllm_metrics: VllmMetrics = False,
    page: Page = None,
    quiet: Quiet = False,
    kv_type: opt.KVTypeOption = "f16",
    ctx: opt.Context = None,
    block_size: opt.BlockSize = 32,
    kv_cache_bytes: opt.CacheBytes = None,
    swap_bytes: opt.SwapBytes = "0",
    kv_store: opt.KvStore = None,
    kv_store_bytes: opt.KvStoreBytes = "10G",
    kv_events: Events = None,
    kv_events_replay: EventsReplay = None,
    kv_events_topic: EventsTopic = "",
    kv_events_encoding: EventsEncoding = "map",
    max_num_seqs: opt.MaxSeqs = 256,
    max_batch_tokens: opt.MaxBatch = 512,
    threads: opt.Threads = None,
    n_gpu_layers: opt.GpuLayers = "auto",
    lora: Loras = None,
    deterministic: opt.Deterministic = False,
    attention_precision: opt.Precision = "exact",
) -> int:
    """Serve a model to OpenAI's clients."""
    given = locals()
    engine = opt.engine_settings({**given, "lora": loras_by_name(lora or ())})
    check_modules(("uvicorn", "msgspec", "prometheus_client"))
    from pyvelo.server.run import Serve

    settings = server_settings(given, page=is_loopback(host) if page is None else page)
    events = _events(kv_events, kv_events_replay, kv_events_topic, kv_events_encoding)
    config = EngineConfig(model=model, kv_events=events, **engine)
    with _logs_to_stderr(quiet):
        Serve(config, settings, host=host, port=port, drain=drain, ready=_ready).run()
    return 0


def server_settings(options: Mapping[str, Any], page: bool) -> Settings:
    """Return the settings of a server from the options of a command; raise ConfigError for a wrong one."""
    from pyvelo.server.auth import read_keys
    from pyvelo.server.run import check_address
    from pyvelo.server.settings import Settings

    names, origins, hosts = (options[name] or () for name in ("model_name", "cors_origin", "allow_host"))
    check_model_names(names)
    _check_places(origins, hosts)
    keys = read_keys(options["api_key_file"], os.environ.get(KEY_VARIABLE, "").split(","))
    check_address(options["host"], keys.needed, options["insecure"])
    same = ("max_queue", "max_queued_tokens", "max_sessions", "vllm_metrics")
    return Settings(
        model_names=tuple(names),
        chat_template=read_template(options["chat_template"]),
        keys=keys,
        origins=tuple(origins),
        hosts=tuple(name.lower() for name in hosts),
        local=is_loopback(options["host"]),
        page=page,
        **{name: options[name] for name in same},
    )


def check_modules(names: Sequence[str]) -> None:
    """Raise ConfigError if a module of the extra `serve` is missing."""
    for module in names:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the server needs {module}: pip install 'pyvelo[serve]'")


def check_model_names(names: Sequence[str]) -> None:
    """Raise ConfigError for names of models that no client can send."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise ConfigError(f"--model-name {shown(name)}: give a name of printable characters, not empty")


def _check_places(origins: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise ConfigError for origins and hosts that no client can send."""
    from pyvelo.server.origins import is_host, is_origin

    for origin in origins:
        if not is_origin(origin):
            raise ConfigError(
                f"--cors-origin {shown(origin)}: give an origin as browsers send it, in lower case and "
                f'without a path, such as https://example.org or http://localhost:3000, or "*"'
            )
    for host in hosts:
        if not is_host(host):
            raise ConfigError(
                f"--allow-host {shown(host)}: give a name without scheme, port and path, such as "
                f'pyvelo.example.org, or "*"'
            )


def loras_by_name(loras: Sequence[tuple[str, float]]) -> dict[str, tuple[str, float]] | None:
    """Return adapters by the names of their files; raise ConfigError if two have the same."""
    found = {PurePath(path).stem: (path, scale) for path, scale in loras}
    if len(found) < len(loras):
        raise ConfigError("--lora: two files have the same name, by which clients name the models")
    return found or None


def _events(endpoint: str | None, replay: str | None, topic: str, encoding: str) -> KVEvents | None:
    """Return the settings of KV events; raise ConfigError if only details of them are given."""
    if endpoint is not None:
        try:
            return KVEvents(endpoint, replay, topic, cast(Any, encoding))
        except ConfigError as error:
            words = re.sub(r"^(\w+)=(.*) of kv_events", r"--kv-events-\1 \2", str(error))
            raise UsageError(words.replace("--kv-events-endpoint", "--kv-events")) from None
    if replay is not None or topic:
        raise UsageError("--kv-events-replay and --kv-events-topic need --kv-events")
    return None


def _ready(url: str, serving: Serving) -> None:
    print_out(f"{serving.model_name} is served at {url}/v1 (Ctrl-C ends)")
    if serving.engine.events is not None:
        print_out(f"KV events are at {serving.engine.events.endpoint}")
    sys.stdout.flush()


@contextmanager
def _logs_to_stderr(quiet: bool) -> Iterator[None]:
    """Let the server log a line for each request, and warnings, within a block."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    # of a stream that a signal ends, which has its line
    handler.addFilter(lambda record: "without completing response" not in record.getMessage())
    logs = [logging.getLogger(name) for name in ("pyvelo.server", "uvicorn.error")]
    before = [(log.level, log.propagate) for log in logs]
    for log in logs:
        log.setLevel(logging.WARNING if quiet or log.name == "uvicorn.error" else logging.INFO)
        log.addHandler(handler)
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, propagate) in zip(logs, before, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate
