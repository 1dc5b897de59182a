"""The CPU cores that this process may use, and how many threads compute by default."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Set
from dataclasses import dataclass
from pathlib import Path

from pyvelo.config import MAX_THREADS
from pyvelo.memory.cgroups import groups, read
from pyvelo.native import allowed_cpus, count_cores

__all__ = ["Cores", "find_cores", "threads_for"]

_log = logging.getLogger("pyvelo")

MOST_CPUS = 1 << 16  # what a damaged list may name at most
FAST_SHARE = 0.5  # of the largest cpu_capacity: a core with less is an efficiency core
FEW_CPUS = 4  # with more, half of them are taken for SMT siblings, if the system does not tell


@dataclass(frozen=True)
class Cores:
    """The CPUs of this process.

    logical: CPUs that the process may run on. An SMT sibling is a CPU.
    physical: cores of these CPUs; None: the system does not tell.
    performance: physical cores without efficiency cores; None: as `physical`.
    quota: CPU time of the control group, in CPUs; None: no limit.
    """

    logical: int
    physical: int | None
    performance: int | None
    quota: float | None

    @property
    def threads(self) -> int:
        """Default of `n_threads`: a thread for each performance core, but no more than the quota runs.

        If the system does not tell the physical cores: half of the CPUs if there are more than four.
        """
        guess = self.logical if self.logical <= FEW_CPUS else self.logical // 2
        threads = self.performance if self.performance is not None else guess
        if self.quota is not None:
            threads = min(threads, int(self.quota))
        return max(1, min(threads, MAX_THREADS))


def threads_for(asked: int | None) -> int:
    """Return the number of threads that compute: the default if none is asked for."""
    cores = find_cores()
    if asked is not None and asked > cores.logical:
        _log.warning(
            "n_threads=%d is more than the %d CPUs that this process may use: steps are slower than with %d",
            *(asked, cores.logical, cores.threads),
        )
    return asked or cores.threads


def find_cores(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Cores:
    """Return the cores that this process may use.

    Args:
        root: folder that contains /proc and /sys.
        allowed: numbers of the CPUs that the process may run on; None: ask the system.
    """
    cpus = root / "sys/devices/system/cpu"
    online = _cpu_list(read(cpus / "online"))
    usable = allowed_cpus() if allowed is None else frozenset(allowed)
    if usable is None:
        usable = online
    elif online & usable:
        usable = usable & online
    logical = len(usable) or os.cpu_count() or 1
    if not usable:  # not Linux
        physical, performance = count_cores()
        return Cores(logical, physical or None, performance or None, _quota(root))
    cores = {cpu: _core(cpus, cpu) for cpu in usable}
    if None in cores.values():
        return Cores(logical, None, None, _quota(root))
    fast = _performance(root, usable) or usable
    n_physical, n_performance = len(set(cores.values())), len({cores[cpu] for cpu in fast})
    return Cores(logical, n_physical, n_performance, _quota(root))


def _core(cpus: Path, cpu: int) -> frozenset[int] | None:
    """Return the CPUs of a CPU's core, itself among them; None if the system does not tell."""
    topology = cpus / f"cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second in Linux before 5.3
        siblings = _cpu_list(read(topology / name))
        if cpu in siblings:
            return siblings
    return None


def _performance(root: Path, usable: Set[int]) -> frozenset[int]:
    """Return the usable CPUs of performance cores; none if all cores are alike or only others are usable."""
    fast = _cpu_list(read(root / "sys/devices/cpu_core/cpus"))  # Intel
    if fast:
        return fast & usable
    capacities = {}  # ARM
    for cpu in usable:
        text = read(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").strip()
        if text.isdecimal() and text.isascii():
            capacities[cpu] = int(text)
    least = FAST_SHARE * max(capacities.values(), default=0)
    return frozenset(cpu for cpu, capacity in capacities.items() if capacity >= least)


def _quota(root: Path) -> float | None:
    """Return the least CPU time of the control groups around this process, in CPUs."""
    quotas = []
    for version, group in groups(root, "cpu"):
        if version == 2:
            numbers = read(group / "cpu.max").split()
        else:
            numbers = [read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(numbers) == 2 and all(n.isdecimal() and n.isascii() for n in numbers) and int(numbers[1]):
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def _cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list such as "0-3,8,10-11"; none if it is damaged."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and (first + last).isascii()):
            return frozenset()
        if len(last) > 9 or int(last) >= MOST_CPUS:
            return frozenset()
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)
