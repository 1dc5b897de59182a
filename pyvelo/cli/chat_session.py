"""Named conversations of `pyvelo chat --session`, each in a file of the user's state folder."""

from __future__ import annotations

import importlib.util
import re
from contextlib import closing
from pathlib import Path

from pyvelo.cli.conversation import Conversation
from pyvelo.cli.exits import ERROR, explain
from pyvelo.cli.screen import state_folder
from pyvelo.cli.terminal import agreed, print_json, print_out
from pyvelo.cli.values import count
from pyvelo.errors import ConfigError
from pyvelo.private_files import FileLock, replace_file

__all__ = [
    "ChatSession",
    "default_store",
    "remove_session",
    "session_names",
    "session_salt",
    "sessions_folder",
]

MAX_BYTES = 100  # of a name


class ChatSession:
    """Conversation in a file, which one process has open.

    Raises:
        ConfigError: the name is no part of a path, the file cannot be used, or another process has it open.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.file = _file(name)
        self._kept = ""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock.take(self.file.with_suffix(".lock"))
        except OSError as error:
            raise ConfigError(f"--session {name}: {explain(error)}") from error
        if self._lock is None:
            raise ConfigError(f"--session {name}: another chat has it open: end that, or take another name")

    def load(self, system: str | None) -> Conversation:
        """Return the conversation, which is empty the first time.

        system: replaces its system message, unless None.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            found = Conversation.from_json(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Conversation(system)
        except (OSError, ValueError) as error:  # ConfigError and UnicodeDecodeError are ValueErrors
            reason = str(error).removeprefix("the file is not a chat of /save: ")
            raise ConfigError(
                f"--session {self.name}: {self.file} is damaged ({reason}): move it away or take another name"
            ) from error
        found.system = found.system if system is None else system
        return found

    def keep(self, conversation: Conversation) -> None:
        """Write the conversation to its file, for its owner alone, if it has changed; raise OSError."""
        text = conversation.to_json()
        if text == self._kept:
            return
        replace_file(self.file, text.encode(), self.file.with_suffix(".part"))
        self._kept = text

    def close(self) -> None:
        """Let another process open it; nothing is left of one without a conversation."""
        if self._lock is None:
            return
        if self.file.exists():
            self._lock.release()
        else:
            self._lock.remove()


def session_salt(name: str) -> str:
    """Return the cache salt of a conversation, by which its blocks in a KV store can be removed."""
    return f"chat {name}"


def remove_session(name: str, kv_store: str | None, *, ask: bool, as_json: bool) -> int:
    """Remove a conversation and its blocks, if the user agrees; print what was removed. Return the exit code.

    kv_store: the store that has its blocks, also if the conversation has gone; None: the one of
        `default_store`.

    Raises:
        ConfigError: there is none of this name, another process has it open, or `kv_store` is no store.
        StoreError: the store takes no changes now; the conversation is still there.
    """
    file = _file(name)
    if not file.exists() and kv_store is None:
        names = ", ".join(session_names()) or "none"
        raise ConfigError(f"--session {name}: there is no such chat; there are: {names}")
    session = ChatSession(name)
    try:
        if ask and not agreed(f"remove the chat {name}?"):
            return ERROR
        n_records = _purge(name, kv_store)
        file.unlink(missing_ok=True)
    finally:
        session.close()
    if as_json:
        print_json({"session": name, "files": [str(file)], "kv_records": n_records})
    else:
        print_out(f"removed the chat {name} and {count(n_records, 'record')} of its KV")
    return 0


def _purge(name: str, kv_store: str | None) -> int:
    """Remove the blocks of a conversation from a store; return how many records."""
    from pyvelo.kv_store import place_of
    from pyvelo.store.files import is_store
    from pyvelo.store.opening import open_store
    from pyvelo.store.record import owner_of

    where = kv_store or default_store()
    scheme, place = place_of(where) if where is not None else ("", "")
    if where is not None and (scheme or is_store(Path(place))):
        with closing(open_store(where)) as store:
            return store.purge(owner_of(session_salt(name).encode()))
    if kv_store is not None:
        raise ConfigError(f"--kv-store {place}: there is no KV store")
    return 0  # no chat has saved anything


def sessions_folder() -> Path:
    """Return the folder of the files; raise as `state_folder`."""
    return state_folder() / "sessions"


def session_names() -> list[str]:
    """Return the names of the kept conversations; raise as `state_folder`, or OSError."""
    try:
        return sorted(path.stem for path in sessions_folder().iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return []


def default_store() -> str | None:
    """Return the folder of the KV of named conversations; None: the extra `store` is not installed."""
    from pyvelo.store.opening import default_folder

    return str(default_folder()) if importlib.util.find_spec("xxhash") is not None else None


def _file(name: str) -> Path:
    fits = re.fullmatch(r"[\w. -]+", name) and len(name.encode()) <= MAX_BYTES and name.strip(". ")
    if not fits:
        raise ConfigError(
            f"--session {name!r}: give letters, digits, spaces, dots, dashes, underscores, {MAX_BYTES} bytes"
        )
    return sessions_folder() / f"{name}.json"
