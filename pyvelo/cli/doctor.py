"""`pyvelo doctor`: whether this installation works, how it suits the machine, and what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import Any, Literal

from pyvelo import __version__
from pyvelo.cli.exits import ERROR, explain
from pyvelo.cli.render import cores_text, system_text
from pyvelo.cli.terminal import print_json, print_out
from pyvelo.cli.values import count, show_bytes
from pyvelo.cpu import CPUINFO, NEEDED, REBUILD, cpu_flags
from pyvelo.demo import DEMO_MODEL
from pyvelo.errors import ConfigError, VeloError

__all__ = ["Finding", "examine", "findings"]

State = Literal["ok", "note", "problem"]

EXTRAS = {
    "events": ("zmq", "KV events for routers"),
    "grammar": ("llguidance", "grammars, JSON schemas and regular expressions"),
    "hub": ("huggingface_hub", "models by name"),
    "report": ("matplotlib", "pictures"),
    "serve": ("uvicorn", "pyvelo serve"),
    "store": ("xxhash", "KV that outlives the process"),
}
"""A module of each extra, and what needs it. The command line itself has `cli`."""

OTHER_CACHE = "see to that folder, or set HF_HOME to another one"
OTHER_STATE_FOLDER = "see to that folder, or set XDG_STATE_HOME to another one"
SCARCE = 1 << 30  # bytes of free memory
FASTER = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
"""Instruction sets that kernels use, by Linux's names."""


@dataclass(frozen=True)
class Finding:
    """State of a part of the installation; `remedy`: what to do, "" for nothing."""

    part: str
    state: State
    text: str
    remedy: str = ""


def examine(*, as_json: bool) -> int:
    """Print the findings as lines or JSON; return 1 if there is a problem, else 0."""
    found = list(findings())
    if as_json:
        print_json({"version": __version__, "findings": [asdict(each) for each in found]})
    else:
        width = max(len(each.part) for each in found)
        for each in found:
            print_out(f"{each.state:7}  {each.part:{width}}  {each.text}")
            if each.remedy:
                print_out(f"{'':7}  {'':{width}}  -> {each.remedy}")
    return ERROR if any(each.state == "problem" for each in found) else 0


def findings() -> Iterator[Finding]:
    """Yield the findings, the package first; nothing raises."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("package", "ok", f"PyVelo {__version__} in {Path(__file__).parents[1]}, {python}")
    yield _instructions()
    try:
        from pyvelo import native
        from pyvelo.cli.info import machine_facts
        from pyvelo.memory.host import free_memory

        machine = machine_facts(free_memory())
    except VeloError as error:
        yield Finding("library", "problem", str(error))
    else:
        yield Finding("library", "ok", f"{system_text(machine)}, in {Path(native.__file__).parent}")
        yield from _machine(machine)
        yield _gpus(machine)
        yield _answer()
    yield from _extras()
    yield _cache()
    yield _history()
    yield from _sessions()


def _machine(machine: Mapping[str, Any]) -> Iterator[Finding]:
    from pyvelo.memory.rate import read_rate

    n_threads, free = machine["threads"], machine["free_memory"]
    yield Finding("processor", "ok", f"{cores_text(machine)}; a step uses {count(n_threads, 'thread')}")
    rate = read_rate(n_threads, free, seconds=1.0) / 1e9
    memory = "unknown" if free is None else show_bytes(free)
    text = f"{memory} free, read at {rate:.1f} GB/s; pyvelo models shows what fits"
    scarce = free is not None and free < SCARCE
    yield Finding("memory", "note" if scarce else "ok", text, "close other programs" if scarce else "")


def _instructions() -> Finding:
    """Compare the instruction sets of the build with the processor."""
    try:
        built = NEEDED.read_text(encoding="ascii").split()
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            has = cpu_flags(lines)
    except (OSError, ValueError):
        built = []
    if not built:
        return Finding("instructions", "ok", "unknown, or chosen for this processor when the library loads")
    used = [name for name in FASTER if name in built]
    unused = [name for name in FASTER if name in has and name not in built]
    text = f"built for {', '.join(used) or 'the oldest processors of this kind'}"
    if not unused:
        return Finding("instructions", "ok", text)
    text += f"; this processor also has {', '.join(unused)}"
    remedy = f"{REBUILD} builds it for this processor from the source in FOLDER"
    return Finding("instructions", "note", text, remedy)


def _gpus(machine: Mapping[str, Any]) -> Finding:
    from pyvelo.memory.offload import built_for_gpus

    devices = [each for each in machine["devices"] if each["kind"] in ("gpu", "igpu")]
    gpus = [f"{each['name']}: {each['description']}" for each in devices]
    if gpus:
        return Finding("GPU", "ok", "; ".join(gpus))
    if built_for_gpus():
        return Finding("GPU", "note", "none, though the library is built for CUDA", "see to NVIDIA's driver")
    return Finding("GPU", "ok", "not used: the library is built for the CPU alone")


def _answer() -> Finding:
    """Load the demo model, and let it answer."""
    from pyvelo import LLM, SamplingParams

    try:
        start = now()
        with LLM(DEMO_MODEL, n_ctx=256) as llm:
            text = llm.generate("The KV cache", SamplingParams(max_tokens=8, temperature=0))[0].text
        return Finding("demo model", "ok", f"answered in {now() - start:.2f} s: The KV cache{text}")
    except VeloError as error:
        return Finding("demo model", "problem", str(error), "install the package again with pip")


def _extras() -> Iterator[Finding]:
    for name, (module, purpose) in EXTRAS.items():
        part = f"extra {name}"
        if importlib.util.find_spec(module) is None:
            yield Finding(part, "note", f"not installed: {purpose}", f'pip install "pyvelo[{name}]"')
        else:
            yield Finding(part, "ok", purpose)


def _cache() -> Finding:
    from pyvelo.models.hub import cached_models

    if importlib.util.find_spec("huggingface_hub") is None:
        return Finding("models", "ok", "no cache without the extra hub; files work")
    try:
        models = cached_models()
    except VeloError as error:
        return Finding("models", "problem", str(error), OTHER_CACHE)
    from huggingface_hub import constants

    size = show_bytes(sum(model.n_bytes for model in models))
    text = f"{count(len(models), 'model')}, {size}, in {constants.HF_HUB_CACHE}"
    if not _takes_files(Path(constants.HF_HUB_CACHE)):
        return Finding("models", "note", f"{text}, which cannot be written", OTHER_CACHE)
    return Finding("models", "ok", text)


def _history() -> Finding:
    from pyvelo.cli.screen import history_file

    forgets = "chats forget the lines that you type"
    if importlib.util.find_spec("platformdirs") is None:
        return Finding("history", "note", forgets, 'pip install "pyvelo[cli]"')
    try:
        file = history_file()
    except ConfigError:
        return Finding("history", "note", f"{forgets}: there is no home folder")
    if not _takes_files(file.parent) or file.is_dir():
        return Finding("history", "note", f"{forgets}: {file.parent} cannot be written", OTHER_STATE_FOLDER)
    return Finding("history", "ok", f"chats keep the lines that you type in {file}")


def _sessions() -> Iterator[Finding]:
    from pyvelo.cli.chat_session import session_names, sessions_folder

    try:
        folder, names = sessions_folder(), session_names()
    except (ImportError, VeloError):  # see `_history`
        return
    except OSError as error:
        yield Finding("chats", "problem", explain(error), OTHER_STATE_FOLDER)
        return
    if not _takes_files(folder):
        text = f"chat --session cannot keep chats: {folder} cannot be written"
        yield Finding("chats", "note", text, OTHER_STATE_FOLDER)
        return
    named = f": {', '.join(names)}" if names else ""
    yield Finding("chats", "ok", f"{count(len(names), 'chat')} of --session in {folder}{named}")


def _takes_files(folder: Path) -> bool:
    """Return whether this user can make files in a folder, which need not exist yet."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
