"""Describe the machine, the file system and the software that numbers depend on, and how busy others kept it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "lightning", "accelerate", "transformers", "numpy", "safetensors", "xxhash", "psutil")


def describe(folder: Path) -> dict[str, Any]:
    """What the results depend on, as JSON values. `folder` is where the benchmarks write."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": file_system(folder),
        "huge_pages": _huge_pages(),
    }


def versions() -> dict[str, str]:
    """Python and package versions, and the commit of this source tree."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["commit"] = _commit()
    return found


def slug(machine: dict[str, Any]) -> str:
    """A file name part for the machine: processor and cores, nothing that identifies its owner."""
    words = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    return f"{words}-{machine['cores']}-cores"


def file_system(folder: Path) -> str:
    """Type and device of the file system that holds `folder`."""
    best = max(
        (p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
        default=None,
    )
    return "unknown" if best is None else f"{best.fstype} on {best.device}"


@dataclass(frozen=True, slots=True)
class _Jiffies:
    at: float
    busy_seconds: float
    stolen_seconds: float
    own_seconds: float


class Disturbance:
    """How much of the processors others used while a child process of ours measured."""

    def __init__(self) -> None:
        self._before = _jiffies()

    def shares(self) -> dict[str, float]:
        """Shares of all cores since construction: of other processes, and what the hypervisor took away."""
        now = _jiffies()
        whole = (now.at - self._before.at) * (os.cpu_count() or 1)
        others = (now.busy_seconds - self._before.busy_seconds) - (now.own_seconds - self._before.own_seconds)
        stolen = now.stolen_seconds - self._before.stolen_seconds
        return {"others": max(0.0, others / whole), "stolen": max(0.0, stolen / whole)}


def _jiffies() -> _Jiffies:
    cpu = psutil.cpu_times()
    busy = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq
    own = sum(_seconds(resource.getrusage(who)) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return _Jiffies(time.monotonic(), busy, cpu.steal, own)


def _seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _huge_pages() -> str:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    chosen = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            found = re.search(r"\[(\w+)\]", (folder / name).read_text())
        except OSError:
            found = None
        chosen[name] = found[1] if found else "unknown"
    return f"anonymous {chosen['enabled']}, shared {chosen['shmem_enabled']}"


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.stdout.strip()
