"""What snapshots write when little of the state changes, and how long reading them back takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.disk import evict
from benchmarks.engine import save_timed
from benchmarks.measure import interleave, timed
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import change_everything, state_bytes
from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Event, SnapshotCommitted

TITLE = "Incremental: adapters beside frozen weights, and tables of which few rows change"
ADAPTER_LIMIT, TABLE_LIMIT, RESTORE_LIMIT, STALL_LIMIT = 1.05, 2.0, 1.3, 0.05
WIDTH = 128
FIRST = 3
"""Snapshots whose stall is not that of later ones: they touch memory of their slots that is new."""
SHARE = 100
"""One row of so many is touched between two snapshots."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    frozen_bytes: int
    adapter_bytes: int
    table_bytes: int
    adapter_snapshots: int
    table_snapshots: int
    rounds: int


SIZES = {
    Scale.FULL: Size(1_000_000_000, 10_000_000, 1_000_000_000, 9, 20, 5),
    Scale.QUICK: Size(1_000_000_000, 10_000_000, 1_000_000_000, 5, 20, 2),
    Scale.TINY: Size(4_000_000, 40_000, 4_000_000, 5, 5, 1),
}


@dataclass(slots=True)
class Life:
    """A run, its snapshots' figures, and a run with the last state as one plain snapshot."""

    folder: Path
    plain: Path
    touched_bytes: int
    written: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        if isinstance(event, SnapshotCommitted):
            self.written.append(event.written_bytes)

    def live(self, state: dict[str, Any], change: Callable[[], object], snapshots: int) -> None:
        """Save the state once, and again after each change."""
        with Checkpointer(self.folder, keep={"last": 2}) as checkpointer:
            checkpointer.engine.events = self
            for step in range(snapshots):
                began = perf_counter()
                stall, handle = save_timed(checkpointer, state, step)
                handle.wait()
                self.latencies.append(perf_counter() - began)
                self.stalls.append(stall)
                change()
            save_timed(checkpointer, state, snapshots)[1].wait()
        with Checkpointer(self.plain) as checkpointer:
            checkpointer.save(state, step=0).wait()

    @property
    def shares(self) -> tuple[float, ...]:
        """Bytes written by each snapshot but the first, against those that had changed."""
        return tuple(nbytes / self.touched_bytes for nbytes in self.written[1:])


def run(bench: Bench) -> BarResult:
    """Measure both kinds of state; reading back is interleaved with reading plain snapshots."""
    size = SIZES[bench.scale]
    generator = torch.Generator().manual_seed(0)
    with bench.scratch("incremental") as folder:
        adapter = _adapter(size, folder)
        bench.say("adapter saved")
        table = _table(size, folder, generator)
        bench.say("table saved")
        copies = [_copy(size) for _ in range(size.rounds)]
        reads = {
            f"{name}, {kind}": _cold(path)
            for name, life in (("adapter", adapter), ("table", table))
            for kind, path in (("shared", life.folder), ("plain", life.plain))
        }
        taken = interleave(reads, size.rounds, tick=bench.say)
    restore = {name: ratios(taken[f"{name}, shared"], taken[f"{name}, plain"]) for name in ("adapter", "table")}
    stalls = tuple(stall / min(copies) for stall in adapter.stalls[FIRST:])
    checks = (
        Check("adapter: written / changed bytes", "x", "at most", ADAPTER_LIMIT, adapter.shares),
        Check("adapter: stall / copy of the state", "x", "at most", STALL_LIMIT, stalls),
        Check("table: written / changed bytes", "x", "at most", TABLE_LIMIT, table.shares),
        Check(
            "table: the most that a snapshot writes / changed bytes", "x", "at most", TABLE_LIMIT, (max(table.shares),)
        ),
        Check("adapter: cold load / that of a plain snapshot", "x", "at most", RESTORE_LIMIT, restore["adapter"]),
        Check("table: cold load / that of a plain snapshot", "x", "at most", RESTORE_LIMIT, restore["table"]),
    )
    series = [
        Series("adapter: save to durable", "s", tuple(adapter.latencies[1:])),
        Series("table: save to durable", "s", tuple(table.latencies[1:])),
        *(Series(f"cold load: {name}", "s", tuple(seconds)) for name, seconds in taken.items()),
    ]
    return BarResult(
        "incremental",
        TITLE,
        {
            "adapter": f"{size.frozen_bytes / 1e6:.0f} MB frozen, {size.adapter_bytes / 1e6:.2f} MB change",
            "table": f"{size.table_bytes / 1e6:.0f} MB, rows of {4 * WIDTH} bytes, one of {SHARE} changes, by chance",
            "snapshots": f"adapter {size.adapter_snapshots + 1}, table {size.table_snapshots + 1}; the first writes "
            "everything; two are kept",
        },
        checks,
        tuple(series),
        (
            "Frozen host memory is copied for each snapshot, here right behind the one before (decision 0130).",
            f"The table is read back from {size.table_snapshots} deltas behind each other.",
            "With more, or more than 0.3 of its bytes in deltas, they are replaced a few pieces at a time: then a "
            "snapshot writes about three times what changes, if rows change at random.",
        ),
    )


def _adapter(size: Size, folder: Path) -> Life:
    frozen = {str(n): torch.randn(size.frozen_bytes // 64) for n in range(16)}
    trained = {name: torch.randn(size.adapter_bytes // 12) for name in ("weights", "exp_avg", "exp_avg_sq")}
    life = Life(folder / "adapter", folder / "adapter-plain", state_bytes(trained))
    life.live({"frozen": frozen, "trained": trained}, lambda: change_everything(trained), size.adapter_snapshots)
    return life


def _table(size: Size, folder: Path, generator: torch.Generator) -> Life:
    table = torch.randn(size.table_bytes // (4 * WIDTH), WIDTH)

    def touch() -> None:
        table[torch.randperm(len(table), generator=generator)[: len(table) // SHARE]] += 1

    life = Life(folder / "table", folder / "table-plain", len(table) // SHARE * 4 * WIDTH)
    life.live({"table": table}, touch, size.table_snapshots)
    return life


def _copy(size: Size) -> float:
    """Seconds that copying as many bytes as the adapter's state has takes, into touched memory."""
    source = torch.ones((size.frozen_bytes + size.adapter_bytes) // 4)
    target = torch.zeros_like(source)
    return timed(lambda: target.copy_(source))


def _cold(folder: Path) -> Callable[[], float]:
    def measured() -> float:
        for path in (folder / "data").iterdir():
            evict(path)
        return timed(lambda: Checkpointer(folder).load())

    return measured
