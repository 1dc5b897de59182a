"""Server on Ray: replicas with an engine each, a router by prefix, and an ingress.

    python -m pyvelo.cluster.ray MODEL --replicas 2
    serve run pyvelo.cluster.ray:app model=MODEL replicas=2

It needs `pip install 'pyvelo[ray,serve]'`. docs/CLUSTER.md tells more.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pyvelo.cli.exits import ERROR, INTERRUPTED, USAGE, as_options, code_of, explain, without_prefix
from pyvelo.cli.terminal import print_error, print_out
from pyvelo.errors import ConfigError, VeloError

__all__ = ["app", "main"]

NAME = "pyvelo"
"""Name of the application in Ray Serve."""


def app(args: dict[str, Any]) -> Any:
    """Return the application for the fields of a config file, or of `serve run`.

    args: options of the command line by their names, such as model, replicas and kv_cache_bytes.

    Raises: ConfigError for a wrong one.
    """
    from pyvelo.cluster.deployments import application

    try:
        return application(_parsed(_arguments(args)))
    except _WrongWords as error:
        raise ConfigError(f"args: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code."""
    try:
        options = _parsed(sys.argv[1:] if arguments is None else arguments)
        return options if isinstance(options, int) else _serve(options)
    except _WrongWords as error:
        return _fail(str(error), USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except VeloError as error:
        message = as_options(str(error))
        return _fail(message, code_of(error, message))
    except OSError as error:
        return _fail(explain(error), ERROR)


def _serve(options: Any) -> int:
    from pyvelo.cluster.start import join, only_command_at, prefer_fast_calls
    from pyvelo.models.gguf_parts import scan_model
    from pyvelo.models.hub import locate

    prefer_fast_calls()
    # here, and not in a replica that Ray would start again and again
    scan_model(locate(options.config.model))
    with only_command_at(options.port):
        warning = join(options)
        if warning:
            print_error(f"pyvelo: {warning}")
        _run(options)
    return 0


def _run(options: Any) -> None:
    from ray import serve

    from pyvelo.cluster.deployments import application
    from pyvelo.cluster.start import owns_ray

    listens = owns_ray()
    if listens:
        serve.start(proxy_location="Disabled")
    else:
        serve.start(http_options={"host": options.host, "port": options.port})
    try:
        route = None if listens else "/"
        try:
            serve.run(application(options, listens=listens), name=NAME, route_prefix=route)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"Ray Serve does not start the server: {reason}: its log says more") from None
        host = f"[{options.host}]" if ":" in options.host else options.host
        print_out(f"served at http://{host}:{options.port}/v1 (Ctrl-C ends)")
        sys.stdout.flush()
        _wait_for_signal()
        print_error(f"pyvelo: ending; requests in progress have {options.drain:g} s, or until a signal")
        asyncio.run(_end(options.drain))
    finally:
        with suppress(RuntimeError):  # of the event loop that a second signal has closed
            serve.shutdown()


async def _end(seconds: float) -> None:
    """Let the replicas refuse new requests, wait for the others for some seconds, and end the application."""
    from ray import serve

    with suppress(Exception):  # of Ray: a replica or the ingress has just ended
        await serve.get_app_handle(NAME).drain.remote(seconds)
    await serve.shutdown_async()


def _wait_for_signal() -> None:
    import signal

    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()
    for each in (signal.SIGINT, signal.SIGTERM):  # a second one ends at once
        signal.signal(each, signal.default_int_handler)


def _arguments(fields: dict[str, Any]) -> list[str]:
    _check_installed()
    from pyvelo.cluster.options import arguments_of

    return arguments_of(fields)


class _WrongWords(Exception):
    """Words that are no command line."""


def _parsed(arguments: Sequence[str]) -> Any:
    """Return the options, or an exit code if the help was printed."""
    _check_installed()
    from pyvelo.cluster.options import parse

    try:
        return parse(arguments)
    except (VeloError, OSError):
        raise
    except Exception as error:
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        raise _WrongWords(without_prefix(describe())) from None


def _check_installed() -> None:
    modules = {"ray": "ray", **dict.fromkeys(("uvicorn", "msgspec", "prometheus_client", "typer"), "serve")}
    for module, extra in modules.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"a cluster needs {module}: pip install 'pyvelo[{extra}]'")


def _fail(message: str, code: int) -> int:
    print_error(f"pyvelo: {' '.join(message.split())}")
    return code


if __name__ == "__main__":
    sys.exit(main())
