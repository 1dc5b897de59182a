"""Costs of a start: imported modules, and the memory of model and cache that is touched before its use."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pyvelo
from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.engine import engine
from pyvelo.errors import ConfigError
from pyvelo.native import reserved_memory

SMAPS = Path("/proc/self/smaps")
linux_only = pytest.mark.skipif(not SMAPS.exists(), reason="resident pages are read from /proc")

HEAVY = (
    *("numpy", "jinja2", "rich", "typer", "prompt_toolkit", "asyncio"),
    *("gguf", "matplotlib", "huggingface_hub", "llguidance", "pyvelo.native"),
)


def imported(program: str, *arguments: str) -> set[str]:
    """Return the modules of HEAVY that are loaded after `program`."""
    program += f"\nimport sys; print('imported', *(name for name in {HEAVY} if name in sys.modules))"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    word, *names = done.stdout.splitlines()[-1].split()
    assert word == "imported"
    return set(names)


EXECUTE = "from pyvelo.cli.app import execute; import sys; assert execute(sys.argv[1:]) == 0"


def test_the_package_imports_nothing_heavy() -> None:
    assert imported("import pyvelo; pyvelo.SamplingParams(max_tokens=3)") == set()


def test_dir_lists_what_is_loaded_late() -> None:
    assert set(pyvelo.__all__) <= set(dir(pyvelo))


def test_the_native_part_comes_with_the_first_model() -> None:
    assert imported("from pyvelo import LLM, SamplingParams") >= {"numpy", "pyvelo.native"}


def test_help_needs_no_engine() -> None:
    assert imported(EXECUTE, "run", "--help") <= {"typer"}


def test_a_run_imports_what_it_uses() -> None:
    assert imported(EXECUTE, "run", "-p", "Hello", "-n", "1") == {"numpy", "jinja2", "typer", "pyvelo.native"}


def resident(path: Path) -> tuple[int, int]:
    """Return the bytes of a file that are mapped, and the ones that are in memory."""
    size = rss = 0
    inside = False
    for line in SMAPS.read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            inside = line.endswith(f" {path}")
            first, last = (int(address, 16) for address in name.split("-"))
            size += (last - first) if inside else 0
        elif inside and name == "Rss:":
            rss += int(rest.split()[0]) * 1024
    return size, rss


def own(model: Path, folder: Path) -> Path:
    """Copy a model, so that `resident` counts no mapping of another test that is still to be collected."""
    return Path(shutil.copy(model, folder))


POOL = """
import sys
from pathlib import Path
from pyvelo import LLM, SamplingParams
with LLM(sys.argv[1], kv_cache_bytes=int(sys.argv[2])) as llm:
    llm.generate("Once", SamplingParams(max_tokens=1))
    print(llm.stats().pool_bytes, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def pool_and_peak(model: Path, pool_bytes: int) -> tuple[int, int]:
    """Bytes of an engine's pool, and the most that its process ever had in memory."""
    command = [sys.executable, "-c", POOL, str(model), str(pool_bytes)]
    pool, peak = subprocess.check_output(command, text=True).split()
    return int(pool), int(peak) * 1024


@linux_only
def test_weights_are_mapped_and_read_by_the_first_step(tiny_model_f32: Path, tmp_path: Path) -> None:
    model = own(tiny_model_f32, tmp_path)
    n_bytes = model.stat().st_size
    with LLM(model, n_threads=1) as llm:  # nothing repacks weights of 32 bits
        mapped, loaded = resident(model)
        assert mapped > 0.9 * n_bytes
        assert loaded < 0.1 * mapped
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert resident(model)[1] > 0.5 * mapped


@linux_only
def test_weights_are_mapped_until_the_first_step_packs_them(packed_model: Path, tmp_path: Path) -> None:
    model = own(packed_model, tmp_path)
    n_bytes = model.stat().st_size
    with LLM(model) as llm:
        mapped, loaded = resident(model)
        assert mapped > 0.9 * n_bytes
        assert loaded < 0.1 * mapped
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert resident(model)[1] < 0.2 * mapped  # what is packed is not needed twice


@linux_only
def test_an_embedding_packs_weights_too(packed_model: Path, tmp_path: Path) -> None:
    model = own(packed_model, tmp_path)
    others = reserved_memory()  # of engines that other tests left to the garbage collector
    with LLM(model) as llm:
        mapped, loaded = resident(model)
        assert loaded < 0.1 * mapped
        assert reserved_memory() > others
        llm.embed("Once", pooling="mean")
        assert reserved_memory() <= others
        assert resident(model)[1] < 0.2 * mapped


def test_memory_that_weights_will_take_is_not_free(
    packed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the next engine: a pool is sized before anything is in it."""
    free = 30 << 20
    monkeypatch.setattr(engine, "free_memory", lambda: free)

    def pool_bytes() -> int:
        with LLM(packed_model, kv_type="f32", memory_utilization=0.9) as other:
            return other.stats().pool_bytes

    alone = pool_bytes()
    with LLM(packed_model) as llm:
        promised = reserved_memory()
        assert promised > 0.7 * packed_model.stat().st_size
        beside = pool_bytes()
        grain = 2 * 256 * llm.stats().block_bytes // llm.stats().block_size  # of f32
        assert alone - beside == pytest.approx(0.9 * promised, abs=grain)
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert pool_bytes() == alone  # the system counts what is packed


@linux_only
def test_the_cache_takes_memory_as_it_fills(tiny_model: Path) -> None:
    small, least = pool_and_peak(tiny_model, 16 << 20)
    large, most = pool_and_peak(tiny_model, 1 << 30)
    assert (small, large) == (16 << 20, 1 << 30)
    assert most - least < 100 << 20  # also while it is made


# ---- how far a load is ----


def test_progress_goes_from_0_to_1(tiny_model: Path) -> None:
    shares: list[float] = []
    with LLM(tiny_model, progress=shares.append) as llm:
        assert (shares[0], shares[-1]) == (0.0, 1.0)
        assert shares == sorted(shares)
        assert len(shares) > 3
        llm.generate("Once", SamplingParams(max_tokens=1))
        shares.clear()
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert shares == []


def test_progress_of_the_first_step(packed_model: Path) -> None:
    shares: list[float] = []
    with LLM(packed_model, n_threads=2, progress=shares.append) as llm:
        shares.clear()
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert (shares[0], shares[-1]) == (0.0, 1.0)
        assert shares == sorted(shares)
        assert len(shares) > 10


def test_what_progress_raises_ends_the_requests_of_the_step(packed_model: Path) -> None:
    shares: list[float] = []
    raised: list[Exception] = []

    def enough(share: float) -> None:
        shares.append(share)
        if shares.count(1.0) == 1 and 0.3 < share < 0.6 and not raised:
            raised.append(LookupError("enough"))
            raise raised[0]

    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(packed_model, n_threads=2, progress=enough) as llm:
        with pytest.raises(LookupError, match="enough"):
            llm.generate("Once", params)
        assert llm.stats().blocks_used == 0
        answer = llm.generate("Once", params)[0].token_ids
    with LLM(packed_model) as llm:
        assert llm.generate("Once", params)[0].token_ids == answer


ENDS_IN_A_CALLBACK = """
import sys, threading, time
from pyvelo import LLM

begun = threading.Event()
shares = []

def progress(share):
    shares.append(share)
    if (1.0 in shares[:-1]) == (sys.argv[2] == "packing"):
        begun.set()
        time.sleep(0.02)

threading.excepthook = lambda args: None
threading.Thread(target=lambda: LLM(sys.argv[1], progress=progress).generate("Once"), daemon=True).start()
assert begun.wait(60)
"""


@pytest.mark.parametrize("phase", ["load", "packing"])
def test_a_process_ends_while_a_thread_reports_progress(packed_model: Path, phase: str) -> None:
    command = [sys.executable, "-c", ENDS_IN_A_CALLBACK, str(packed_model), phase]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_in_the_first_step(packed_model: Path) -> None:
    shares: list[float] = []
    sent: list[bool] = []

    def interrupt(share: float) -> None:
        shares.append(share)
        if shares.count(1.0) == 1 and 0.3 < share < 0.6 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(packed_model, n_threads=2, progress=interrupt) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Once", params)
        assert llm.stats().blocks_used == 0
        assert llm.generate("Once", params)[0].usage.completion_tokens == 4
        assert shares[-1] == 1.0


def test_what_progress_raises_ends_the_load(tiny_model: Path, tmp_path: Path) -> None:
    model = own(tiny_model, tmp_path)
    shares: list[float] = []

    def enough(share: float) -> None:
        shares.append(share)
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(model, progress=enough)
    assert 0.3 < shares[-1] < 1.0
    if SMAPS.exists():
        assert resident(model) == (0, 0)
    LLM(model).close()


def test_progress_of_asyncio(packed_model: Path) -> None:
    shares: list[float] = []

    async def load() -> None:
        async with AsyncLLM(packed_model, n_threads=2, progress=shares.append) as llm:
            assert (shares[0], shares[-1]) == (0.0, 1.0)
            shares.clear()
            await llm.generate("Once", SamplingParams(max_tokens=1))

    asyncio.run(load())
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_progress_is_a_function(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="progress=3"):
        LLM(tiny_model, progress=3)  # type: ignore[arg-type]
