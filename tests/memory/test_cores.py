"""Cores and threads, from the files of machines that differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo import LLM
from pyvelo.memory.cores import Cores, _cpu_list, find_cores
from tests.memory.test_host import write

SYSTEM = "sys/devices/system/cpu"


def machine(root: Path, cores: list[str], name: str = "core_cpus_list", **files: str) -> Path:
    """A machine whose cores have these CPUs, such as "0,4"."""
    found = {cpu: core for core in cores for cpu in _cpu_list(core)}
    topology = {f"{SYSTEM}/cpu{cpu}/topology/{name}": f"{core}\n" for cpu, core in found.items()}
    return write(root, {f"{SYSTEM}/online": f"0-{max(found)}\n", **topology, **files})


def capacities(*values: int) -> dict[str, str]:
    return {f"{SYSTEM}/cpu{cpu}/cpu_capacity": f"{value}\n" for cpu, value in enumerate(values)}


def test_this_machine() -> None:
    found = find_cores()
    assert 1 <= found.threads <= found.logical <= (os.cpu_count() or 1)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize("cores", [["0,4", "1,5", "2,6", "3,7"], ["0-1", "2-3", "4-5", "6-7"]])
def test_smt_siblings_count_once(tmp_path: Path, name: str, cores: list[str]) -> None:
    found = find_cores(machine(tmp_path, cores, name), range(8))
    assert found == Cores(logical=8, physical=4, performance=4, quota=None)
    assert found.threads == 4


def test_without_smt_every_cpu_counts(tmp_path: Path) -> None:
    assert find_cores(machine(tmp_path, ["0", "1", "2", "3", "4", "5"]), range(6)).threads == 6


@pytest.mark.parametrize(("allowed", "threads"), [([0, 1], 2), ([0, 4], 1), ([4, 5, 6], 3), ([2], 1)])
def test_affinity(tmp_path: Path, allowed: list[int], threads: int) -> None:
    found = find_cores(machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"]), allowed)
    assert (found.logical, found.physical, found.threads) == (len(allowed), threads, threads)


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0,4", "1", "2"], **{f"{SYSTEM}/online": "0-2,4\n"})
    assert find_cores(root, range(8)) == Cores(4, 3, 3, None)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (range(12), Cores(12, 8, 4, None)),
        ([0, 2, 8, 9], Cores(4, 4, 2, None)),
        ([8, 9, 10], Cores(3, 3, 3, None)),  # efficiency cores alone: all of them
    ],
)
def test_intel_with_two_kinds_of_cores(tmp_path: Path, allowed: list[int], expected: Cores) -> None:
    cores = ["0-1", "2-3", "4-5", "6-7", "8", "9", "10", "11"]
    files = {"sys/devices/cpu_core/cpus": "0-7\n", "sys/devices/cpu_atom/cpus": "8-11\n"}
    assert find_cores(machine(tmp_path, cores, **files), allowed) == expected


@pytest.mark.parametrize(
    ("values", "performance"),
    [
        ((446, 446, 446, 446, 1024, 1024), 2),
        ((325, 325, 325, 325, 828, 828, 828, 1024), 4),  # middle cores are fast enough
        ((1024,) * 4, 4),
        ((512, 1024), 2),
        ((0, 0), 2),
    ],
)
def test_arm_with_several_kinds_of_cores(tmp_path: Path, values: tuple[int, ...], performance: int) -> None:
    root = machine(tmp_path, list(map(str, range(len(values)))), **capacities(*values))
    found = find_cores(root, range(len(values)))
    assert found == Cores(len(values), len(values), performance, None)


@pytest.mark.parametrize(
    ("quota", "threads"), [("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1), ("max 100000", 8)]
)
def test_quota_of_a_container(tmp_path: Path, quota: str, threads: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"}
    assert find_cores(machine(tmp_path, list("01234567"), **files), range(8)).threads == threads


def test_the_least_quota_of_all_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n0::/user/job\n",
        "sys/fs/cgroup/user/job/cpu.max": "600000 100000\n",
        "sys/fs/cgroup/user/cpu.max": "250000 50000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, list("01234567"), **files)
    assert find_cores(root, range(8)).quota == 5.0
    write(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n"})
    assert find_cores(root, range(8)).quota == 2.0
    assert find_cores(root, range(8)).threads == 2


@pytest.mark.parametrize(("n", "threads"), [(1, 1), (4, 4), (6, 3), (64, 32)])
def test_nothing_can_be_read(tmp_path: Path, n: int, threads: int) -> None:
    assert find_cores(tmp_path, range(n)) == Cores(n, None, None, None)
    assert find_cores(tmp_path, range(n)).threads == threads


def test_one_cpu_without_topology(tmp_path: Path) -> None:
    assert find_cores(machine(tmp_path, ["0,1", "2,3"]), range(5)) == Cores(4, 2, 2, None)
    root = machine(tmp_path, ["0,1", "2,3"], **{f"{SYSTEM}/online": "0-5\n"})
    assert find_cores(root, range(6)).physical is None


def test_systems_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvelo.memory.cores.allowed_cpus", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert find_cores(tmp_path).threads == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert find_cores(tmp_path).threads == 1
    assert find_cores(machine(tmp_path, ["0,2", "1,3"])) == Cores(4, 2, 2, None)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
@pytest.mark.parametrize("bind", ["OMP_PROC_BIND=true", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-9"])
def test_a_thread_that_openmp_binds(bind: str) -> None:
    code = "from pyvelo.memory.cores import find_cores; print(find_cores().logical)"
    command = [sys.executable, "-c", code]
    counted = [
        subprocess.run(each, capture_output=True, check=True).stdout
        for each in (command, ["env", bind, *command])
    ]
    assert counted[0] == counted[1]


def test_more_cores_than_threads_can_be() -> None:
    assert Cores(2000, 1000, 1000, None).threads == 512


@given(st.text(alphabet="0123456789,-\n ²٣x", max_size=12), st.text(max_size=5), st.text(max_size=20))
def test_damaged_files_are_ignored(listed: str, number: str, quota: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = {
            f"{SYSTEM}/online": listed,
            f"{SYSTEM}/cpu0/topology/core_cpus_list": listed,
            f"{SYSTEM}/cpu0/cpu_capacity": number,
            "sys/devices/cpu_core/cpus": listed,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": quota,
        }
        root = Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert 1 <= find_cores(root, [0]).threads <= 1


def test_an_engine_uses_that_many(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pyvelo.memory.cores.find_cores", lambda: Cores(8, 4, 3, None))
    seen: list[int] = []
    monkeypatch.setattr("pyvelo.engine.engine.Context", _counting(seen))
    with LLM(tiny_model, n_ctx=256):
        pass
    with LLM(tiny_model, n_ctx=256, n_threads=1):
        pass
    with LLM(tiny_model, n_ctx=256, n_threads=8):
        pass
    assert seen == [3, 1, 8]
    assert not caplog.records
    with LLM(tiny_model, n_ctx=256, n_threads=9):
        pass
    (record,) = caplog.records
    assert "n_threads=9 is more than the 8 CPUs" in record.getMessage()


def _counting(seen: list[int]) -> object:
    from pyvelo.native import Context

    def make(*args: object, **settings: object) -> Context:
        seen.append(settings["n_threads"])  # type: ignore[arg-type]
        return Context(*args, **settings)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("told", "physical", "performance", "threads"), [((10, 4), 10, 4, 4), ((0, 0), None, None, 6)]
)
def test_windows_and_macos_are_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: tuple[int, int],
    physical: int | None,
    performance: int | None,
    threads: int,
) -> None:
    monkeypatch.setattr("pyvelo.memory.cores.allowed_cpus", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr("pyvelo.memory.cores.count_cores", lambda: told)
    assert find_cores(tmp_path) == Cores(12, physical, performance, None)
    assert find_cores(tmp_path).threads == threads
