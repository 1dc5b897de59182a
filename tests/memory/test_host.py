"""Free memory, from the files of different machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyvelo.memory.host import free_memory

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\n"
AVAILABLE = 8_000_000 * 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_reports_free_memory() -> None:
    free = free_memory()
    assert free is not None
    assert free > 1 << 20


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, {"proc/meminfo": MEMINFO})) == AVAILABLE


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_limit_of_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/statm": "1000 500 100 1 0 300 0\n"})
    for limit, free in ((1 << 30, (1 << 30) - 1000 * resource.getpagesize()), (4096, 0), (-1, AVAILABLE)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, -1))
        assert free_memory(root) == free


def test_version_2_the_group_with_the_least_memory_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/job/memory.current": "5000\n",
            "sys/fs/cgroup/user/memory.max": "1000000\n",
            "sys/fs/cgroup/user/memory.current": "600000\n",
            "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 40000\nactive_file 2000\n",
        },
    )
    assert free_memory(root) == 1_000_000 - 600_000 + 42_000


def test_version_2_inside_a_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "2000\n",
            "sys/fs/cgroup/memory.current": "500\n",
        },
    )
    assert free_memory(root) == 1500


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/memory/box", "sys/fs/cgroup/memory"])
def test_version_1_with_the_path_of_the_host_or_the_container(tmp_path: Path, folder: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "7:cpu:/box\n4:memory:/box\n0::/\n",
            f"{folder}/memory.limit_in_bytes": "9000\n",
            f"{folder}/memory.usage_in_bytes": "4000\n",
            f"{folder}/memory.stat": "inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 20\n",
        },
    )
    assert free_memory(root) == 5120


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "500\n",
        },
    )
    assert free_memory(root) == 0


def test_systems_without_these_files_are_asked(tmp_path: Path) -> None:
    free = free_memory(tmp_path)
    assert free is not None
    assert abs(free - (free_memory() or 0)) < 1 << 32  # the library's own figure; other processes run


IN_OTHER_GROUPS = """
mount --bind "$1/sys/fs/cgroup" /sys/fs/cgroup && mount --bind "$1/proc/self/cgroup" "/proc/$$/cgroup" &&
exec "$2" -c "$3"
"""
BOTH = """
from pyvelo.memory.host import free_memory
from pyvelo.native import devices
print(free_memory(), *(device.memory_free for device in devices() if device.kind == "cpu"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "7000", "a/memory.current": "500"}, 6500),
        ("0::/", {"memory.max": "7", "memory.current": "6", "memory.stat": "anon 1\nactive_file 2"}, 3),
        (
            "4:memory:/a\n0::/",
            {"memory/a/memory.limit_in_bytes": "9", "memory/a/memory.usage_in_bytes": "1"},
            8,
        ),
        ("2:x,memory:/", {"x,memory/memory.limit_in_bytes": "9", "x,memory/memory.usage_in_bytes": "1"}, 8),
    ],
)
def test_c_sees_the_same_limits(tmp_path: Path, groups: str, files: dict[str, str], free: int) -> None:
    write(tmp_path, {"proc/self/cgroup": groups + "\n"})
    write(tmp_path / "sys/fs/cgroup", files)
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    may = shutil.which("unshare") and subprocess.run([*apart, "true"], check=False, capture_output=True)
    if not may or may.returncode:
        pytest.skip("this user may not mount other files")
    command = [*apart, "sh", "-c", IN_OTHER_GROUPS, "sh", str(tmp_path), sys.executable, BOTH]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(free)] * 2
