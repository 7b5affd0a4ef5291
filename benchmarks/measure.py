"""Take samples: interleaved rounds in rotating order, processor seconds of several processes, peak memory."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

Candidate = Callable[[], float]
"""Does one thing once and returns the sample, usually seconds."""

SETTLE_SECONDS = 0.05
LOOK_SECONDS = 0.02


def timed(action: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    kept = action()  # freed after the clock is read
    seconds = time.perf_counter() - began
    del kept
    return seconds


def interleave(
    candidates: Mapping[str, Candidate],
    rounds: int,
    *,
    at_most: Mapping[str, int] | None = None,
    tick: Callable[[str], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Samples of every candidate, one per round, so that drift hits all of them alike.

    The order rotates from round to round: no candidate always runs after the same one.

    Args:
        at_most: rounds of candidates that are too slow to take part in all of them; they take part in the first ones.
        tick: called with the name of each candidate before it runs.
    """
    limits = at_most or {}
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if number < limits.get(name, rounds):
                tick(f"round {number + 1}/{rounds} · {name}")
                samples[name].append(candidates[name]())
                # Lets what the candidate left behind (unlinked files, ending threads) finish before the next one.
                time.sleep(SETTLE_SECONDS)
    return samples


class CpuMeter:
    """Processor seconds of this process and of others, threads that have ended included.

    Args:
        processes: the others. Their clock ticks in hundredths of a second: measure over several rounds.
    """

    def __init__(self, processes: Iterable[psutil.Process] = ()) -> None:
        self._processes = tuple(processes)

    def read(self) -> float:
        """Seconds used so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        total = usage.ru_utime + usage.ru_stime
        for process in self._processes:
            times = process.cpu_times()
            total += times.user + times.system
        return total


def children() -> set[psutil.Process]:
    """Processes started by this one."""
    return set(psutil.Process().children(recursive=True))


def children_seconds() -> float:
    """Processor seconds that the processes started by this one have used so far, those that have ended left out."""
    return sum(sum(one.cpu_times()[:2]) for one in children())


def started_since(before: Iterable[psutil.Process]) -> tuple[psutil.Process, ...]:
    """Children that are not in `before`: a writer, for example."""
    return tuple(children() - set(before))


class PeakMemory:
    """The most memory this process used since `restart`, beyond what it used then."""

    def __init__(self) -> None:
        self._base = 0
        self.restart()

    def restart(self) -> None:
        """Forget earlier peaks."""
        Path("/proc/self/clear_refs").write_text("5")
        self._base = _status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """Peak since `restart`, minus the memory at that time."""
        return _status_bytes("VmHWM") - self._base


class MachineMemory:
    """The most private and shared memory that all processes used in a `with` block, beyond what they used at its start.
    Page cache of files does not count. Only what lasts for some hundredths of a second is seen.
    """

    def __enter__(self) -> Self:
        self._base = self._most = _used_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="machine memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self._most - self._base

    def _look(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            self._most = max(self._most, _used_bytes())


def _used_bytes() -> int:
    """What the kernel calls available is off by hundreds of megabytes after large pieces of memory were freed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("AnonPages:", "Shmem:")))


def rss_bytes(process: psutil.Process) -> int:
    """Private resident memory: without shared pages, which the arena consists of."""
    info = process.memory_info()
    return int(info.rss - info.shared)


def each_per(samples: Sequence[float], amount: float) -> tuple[float, ...]:
    """Samples divided by one amount, for instance seconds per GB."""
    return tuple(sample / amount for sample in samples)


def rate(samples: Sequence[float], amount: float) -> tuple[float, ...]:
    """An amount divided by each sample, for instance GB per second."""
    return tuple(amount / sample for sample in samples)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
