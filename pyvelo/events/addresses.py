"""Checks of a path before ZMQ binds it: ZMQ deletes any file at the path."""

from __future__ import annotations

import os
import socket
import stat
import sys

from pyvelo.errors import ConfigError

__all__ = ["check_path"]

_ANSWER = 1.0  # seconds


def check_path(address: str) -> None:
    """Raise ConfigError unless the path of an ipc address is free, or has a socket that nothing listens at.

    Addresses without a path are left to ZMQ: tcp, ipc://* and the abstract ones, ipc://@NAME.
    """
    path = address.removeprefix("ipc://")
    if path == address or path == "*" or path.startswith("@"):
        return
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # the path is free, or ZMQ names the reason why it cannot be used
        return
    if stat.S_ISDIR(mode):
        raise ConfigError(f"kv_events: {path} is a folder: give the path of a file in it, such as {path}/kv")
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"kv_events: {path} exists and is no socket: choose another path, or delete it")
    if _listens(path):
        raise ConfigError(f"kv_events: {path} is in use by another process or engine: choose another path")


def _listens(path: str) -> bool:
    """Return whether a connection to a socket is accepted, or may be later."""
    if sys.platform == "win32":  # Python has no Unix sockets there
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except FileNotFoundError:  # it was closed just now
            return False
        except PermissionError as error:
            raise ConfigError(f"kv_events: {path} is a socket that this user may not open") from error
        except OSError:  # too many connections wait
            return True
    return True
