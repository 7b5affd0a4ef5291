"""How much memory snapshots occupy, and whether a thousand of them leave anything behind."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import psutil

from benchmarks.engine import save_timed, wait_ready
from benchmarks.measure import children, rss_bytes, started_since
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from benchmarks.workloads import gpt2_state, state_bytes
from ckpt_engine import Checkpointer

TITLE = "Memory: what snapshots hold and keep"
ARENA_LIMIT = 1.05
GROWTH_LIMIT_KIB = 1.0
"""Per snapshot: below what a single kept object of any size would show as."""
_SETTLED = 0.2
"""Share of the snapshots after which caches are full and growth starts to count."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    arena_bytes: int
    state_bytes: int
    snapshots: int
    stride: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 8_000_000, 1250, 25),
    Scale.QUICK: Size(300_000_000, 8_000_000, 250, 25),
    Scale.TINY: Size(4_000_000, 500_000, 20, 5),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What trainer and writer occupy at one moment."""

    trainer_bytes: int
    writer_bytes: int
    arena_bytes: int
    descriptors: int
    threads: int


def run(bench: Bench) -> BarResult:
    """Measure the arena of a big state, then growth over many durable snapshots of a small one."""
    size = SIZES[bench.scale]
    slots, per_slot = _arena(bench, size)
    usage, files = _many(bench, size)
    settled = usage[int(len(usage) * _SETTLED)]
    ended, count = usage[-1], len(usage) - 1 - int(len(usage) * _SETTLED)

    def growth(attribute: str) -> float:
        return float(getattr(ended, attribute) - getattr(settled, attribute)) / 1024 / (count * size.stride)

    return BarResult(
        "memory",
        TITLE,
        {
            "arena": f"{size.arena_bytes / 1e9:.2f} GB state, {slots} slots",
            "growth": f"{size.state_bytes / 1e6:.1f} MB state with changing values, {size.snapshots} snapshots, each "
            f"durable, two kept; counted over the last {count * size.stride}",
            "resident": "private resident memory after a garbage collection, shared pages left out",
        },
        (
            Check("arena per slot / state", "x", "at most", ARENA_LIMIT, (per_slot,)),
            Check("growth of trainer", "KiB per snapshot", "at most", GROWTH_LIMIT_KIB, (growth("trainer_bytes"),)),
            Check("growth of writer", "KiB per snapshot", "at most", GROWTH_LIMIT_KIB, (growth("writer_bytes"),)),
            Check("growth of arena", "KiB per snapshot", "at most", 0.0, (growth("arena_bytes"),)),
            Check("more open files", "", "at most", 0.0, (float(ended.descriptors - settled.descriptors),)),
            Check("more threads", "", "at most", 0.0, (float(ended.threads - settled.threads),)),
            Check("snapshots left on disk", "", "at most", 2.0, (float(files),)),
        ),
        (
            Series("trainer", "MB", tuple(h.trainer_bytes / 1e6 for h in (settled, ended)), "settled, at the end"),
            Series("writer", "MB", tuple(h.writer_bytes / 1e6 for h in (settled, ended)), "settled, at the end"),
            Series("arena", "MB", tuple(h.arena_bytes / 1e6 for h in (settled, ended)), "settled, at the end"),
        ),
    )


def _arena(bench: Bench, size: Size) -> tuple[int, float]:
    """Slots, and bytes of one per byte of state."""
    bench.say("arena")
    state = gpt2_state(size.arena_bytes)
    with bench.scratch("arena") as folder, Checkpointer(folder) as checkpointer:
        checkpointer.prepare(state)
        wait_ready(checkpointer, lambda: None)
        checkpointer.save(state, step=1).wait()
        slots = checkpointer.config.slots
        return slots, checkpointer.engine._pipeline.slots.nbytes() / slots / state_bytes(state)


def _many(bench: Bench, size: Size) -> tuple[list[Usage], int]:
    """What is occupied every so often during many snapshots, and how many of them are on disk at the end."""
    state = gpt2_state(size.state_bytes)
    before = children()
    trainer = psutil.Process()
    usage = []
    with bench.scratch("memory") as folder:
        with Checkpointer(folder) as checkpointer:
            checkpointer.engine.start()
            (writer,) = started_since(before)
            for step in range(size.snapshots):
                state["step"] = step
                state["model"]["wpe"].add_(1)
                _, handle = save_timed(checkpointer, state, step)
                handle.wait()
                if (step + 1) % size.stride == 0:
                    bench.say(f"snapshot {step + 1}/{size.snapshots}")
                    gc.collect()
                    usage.append(
                        Usage(
                            rss_bytes(trainer),
                            rss_bytes(writer),
                            checkpointer.engine._pipeline.slots.nbytes(),
                            trainer.num_fds() + writer.num_fds(),
                            trainer.num_threads() + writer.num_threads(),
                        )
                    )
        return usage, len(checkpointer.snapshots())
