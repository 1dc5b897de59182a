"""What starting costs: what is imported, and what of a model and of the cache is touched before its use."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from pyvelo import LLM, AsyncLLM, SamplingParams
from pyvelo.errors import ConfigError

SMAPS = Path("/proc/self/smaps")
linux_only = pytest.mark.skipif(not SMAPS.exists(), reason="resident pages are read from /proc")

HEAVY = (
    *("numpy", "jinja2", "rich", "typer", "prompt_toolkit", "asyncio"),
    *("gguf", "matplotlib", "huggingface_hub", "llguidance", "pyvelo.native"),
)


def imported(program: str, *arguments: str) -> set[str]:
    """Which of HEAVY are there when `program` has run."""
    program += f"\nimport sys; print('imported', *(name for name in {HEAVY} if name in sys.modules))"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    word, *names = done.stdout.splitlines()[-1].split()
    assert word == "imported"
    return set(names)


EXECUTE = "from pyvelo.cli.app import execute; import sys; assert execute(sys.argv[1:]) == 0"


def test_the_package_imports_nothing_heavy() -> None:
    assert imported("import pyvelo; pyvelo.SamplingParams(max_tokens=3)") == set()


def test_the_native_part_comes_with_the_first_model() -> None:
    assert imported("from pyvelo import LLM, SamplingParams") >= {"numpy", "pyvelo.native"}


def test_help_needs_no_engine() -> None:
    assert imported(EXECUTE, "run", "--help") <= {"typer"}


def test_a_run_imports_what_it_uses() -> None:
    assert imported(EXECUTE, "run", "-p", "Hello", "-n", "1") == {"numpy", "jinja2", "typer", "pyvelo.native"}


def resident(path: Path) -> tuple[int, int]:
    """Bytes of a file that are mapped here, and those of them that are in memory."""
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
def test_weights_are_mapped_and_read_by_the_first_step(tiny_model_f32: Path) -> None:
    n_bytes = tiny_model_f32.stat().st_size
    with LLM(tiny_model_f32) as llm:  # nothing repacks weights of 32 bits
        mapped, loaded = resident(tiny_model_f32)
        assert mapped > 0.9 * n_bytes
        assert loaded < 0.1 * mapped
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert resident(tiny_model_f32)[1] > 0.5 * mapped


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
        n_loading = len(shares)
        llm.generate("Once", SamplingParams(max_tokens=1))
        assert len(shares) == n_loading


def test_what_progress_raises_ends_the_load(tiny_model: Path) -> None:
    shares: list[float] = []

    def enough(share: float) -> None:
        shares.append(share)
        if share > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(tiny_model, progress=enough)
    assert 0.3 < shares[-1] < 1.0
    if SMAPS.exists():
        assert resident(tiny_model) == (0, 0)
    LLM(tiny_model).close()


def test_progress_of_asyncio(tiny_model: Path) -> None:
    shares: list[float] = []

    async def load() -> None:
        async with AsyncLLM(tiny_model, progress=shares.append):
            pass

    asyncio.run(load())
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_progress_is_a_function(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="progress=3"):
        LLM(tiny_model, progress=3)  # type: ignore[arg-type]
