"""Start of Ray for a command: a free port, an address that answers, and enough CPUs, or one sentence."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from pyvelo.cluster.options import Options
from pyvelo.errors import ConfigError, shown
from pyvelo.private_files import FileLock
from pyvelo.server.run import listen

__all__ = [
    "check_port",
    "check_resources",
    "join",
    "lacking",
    "only_command_at",
    "owns_ray",
    "prefer_fast_calls",
]

_ANSWER = 2.0
"""Seconds for an answer of a proxy of Ray Serve."""
_OWN = ("", "local")
"""Values of RAY_ADDRESS with which a command may start a Ray of its own."""
_FAST = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # gRPC between ingress and replicas, and no threads in between
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # else the ingress listens at other ports, too
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # of 0.1 s: 5 % of a core
}
_UNITS = {"CPU": ("CPUs", "--cpus"), "GPU": ("GPUs", "--gpus")}


def prefer_fast_calls() -> None:
    """Set variables of Ray Serve so that it takes little processor time; call this before Ray is imported.

    What the user has set stays as it is. A cluster that is joined has its settings since it started.
    """
    if os.environ.get("RAY_ADDRESS", "") in _OWN:
        for name, value in _FAST.items():
            os.environ.setdefault(name, value)


@contextmanager
def only_command_at(port: int) -> Iterator[None]:
    """Keep other clusters of this user from a port within a block: the ingresses of all could share it.

    Raises:
        ConfigError: another command has it.
    """
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    lock = FileLock.take(Path(tempfile.gettempdir()) / f"pyvelo-cluster-{user}-{port}.lock")
    if lock is None:
        raise ConfigError(f"another cluster of yours has port {port}: give another --port")
    try:
        yield
    finally:
        lock.release()


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
            ray.init(namespace="serve", include_dashboard=False)
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(_no_ray(address, error)) from None
    if owns_ray():
        listen(options.host, options.port).close()  # a proxy of another Ray is in the way
    return check_resources(options, ray.cluster_resources(), is_fixed=owns_ray())


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


def owns_ray() -> bool:
    """Return whether this process has started Ray, so that no other machine will join."""
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    return node is not None and bool(node.is_head())
