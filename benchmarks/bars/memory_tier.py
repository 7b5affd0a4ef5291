"""What a snapshot in memory after every step costs, against the copy it cannot do without; and resuming from memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bars.stall import ReferenceCopy
from benchmarks.measure import CpuMeter, interleave, timed
from benchmarks.memory_saver import LINGER_SECONDS, MemorySaver
from benchmarks.plain_loop import NoSaver, PlainLoop
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import gpt2_state, state_bytes
from ckpt_engine import Checkpointer

TITLE = "Memory tier: a snapshot in memory after every step, and resuming from it"
STEP_COPIES = 40.0
FLOOR_LIMIT = 1.5
OVERHEAD_LIMIT = 3.5
RESTART_LIMIT = 1.2
RESTART_SECONDS = 0.5
INTERVALS = (1, 2, 5, 10)
CHILD_SECONDS = 300.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    parameters: int
    iterations: int
    rounds: int
    restart_bytes: int
    restarts: int


SIZES = {
    Scale.FULL: Size(8_000_000, 10, 9, 1_493_000_000, 5),
    Scale.QUICK: Size(8_000_000, 10, 3, 1_493_000_000, 3),
    Scale.TINY: Size(20_000, 3, 1, 4_000_000, 1),
}
PLAIN = "no snapshots"


def run(bench: Bench) -> BarResult:
    """Measure loops with snapshots at several intervals, interleaved; then restarts after a kill."""
    size = SIZES[bench.scale]
    copy = ReferenceCopy(12 * size.parameters)
    meter = CpuMeter()
    for _ in range(3):
        copy.run()
    began = meter.read()
    copies = [copy.run() for _ in range(10)]
    copy_cpu = (meter.read() - began) / len(copies)
    loop = PlainLoop(size.parameters, STEP_COPIES * min(copies))
    with bench.scratch("memory-tier") as folder:
        savers = {"eager": MemorySaver(folder / "eager", lazy=False), "lazy": MemorySaver(folder / "lazy", lazy=True)}
        with savers["eager"].checkpointer, savers["lazy"].checkpointer:
            for saver in savers.values():
                saver.warm_up(loop)
            candidates: dict[str, Callable[[], float]] = {PLAIN: lambda: loop.train(size.iterations, NoSaver(), 1)}
            for kind, saver in savers.items():
                for every in INTERVALS:
                    candidates[_label(kind, every)] = _train(loop, size, saver, every)
            taken = interleave(candidates, size.rounds, tick=bench.say)
        restarts = [_restart(folder / f"restart-{i}", size, bench) for i in range(size.restarts)]
    step = min(taken[PLAIN]) / size.iterations
    floor = copy_cpu / (os.cpu_count() or 1) / step
    overhead = {name: _overhead(taken[name], taken[PLAIN]) for name in candidates if name != PLAIN}
    every_step = overhead[_label("lazy", 1)]
    return BarResult(
        "memory-tier",
        TITLE,
        {
            "state": f"{loop.state_bytes / 1e6:.0f} MB: perceptron with fused Adam, batch of {loop.batch_size}",
            "loop": f"{size.iterations} steps of {step:.3g} s on {torch.get_num_threads()} threads, "
            f"{step / min(copies):.0f} times as long as one copy of the state",
            "floor": f"processor time of one `copy_` of the state ({copy_cpu:.3g} s), divided by cores and step: "
            f"{100 * floor:.2f} %",
            "overhead": "wall time of the loop beyond that of the loop without snapshots in the same round",
            "restart": f"{restarts[0].nbytes / 1e9:.2f} GB (GPT-2 with Adam) kept for a trainer that was killed: "
            "`load` into live tensors, every byte verified, and `start` while the rescue is written; less a `start` in "
            "a new folder",
        },
        (
            Check(
                "lazy, every step: overhead / floor", "x", "at most", FLOOR_LIMIT, tuple(o / floor for o in every_step)
            ),
            Check(
                "lazy, every step: overhead",
                "%",
                "at most",
                OVERHEAD_LIMIT,
                tuple(100 * o for o in every_step),
            ),
            Check(
                f"time added by resuming, less {RESTART_SECONDS:g} s / one copy",
                "x",
                "at most",
                RESTART_LIMIT,
                tuple((one.added - RESTART_SECONDS) / one.copy for one in restarts),
            ),
        ),
        (
            *(Series(f"overhead, {name}", "%", tuple(100 * o for o in found)) for name, found in overhead.items()),
            Series("one copy_ of the state", "s", tuple(copies)),
            Series("one step", "s", tuple(sample / size.iterations for sample in taken[PLAIN])),
            Series("restart: load from memory", "s", tuple(one.load for one in restarts)),
            Series("restart: start of the writer", "s", tuple(one.start for one in restarts)),
            Series("restart: start in a new folder", "s", tuple(one.fresh for one in restarts)),
            Series("restart: one copy_ of the state", "s", tuple(one.copy for one in restarts)),
        ),
        (
            "Host memory is copied before training continues, whatever `lazy` says (decision 0130).",
            "CheckFreq (FAST 2021) publishes an overhead of at most 3.5 % at the intervals it chooses, 5 % every 14 "
            "iterations in its table 5, and 18 to 73 % for synchronous checkpoints at the same intervals; on GPUs, and "
            "durable.",
        ),
    )


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds of the parts of one restart."""

    nbytes: int
    load: float
    start: float
    fresh: float
    copy: float

    @property
    def added(self) -> float:
        """What resuming took beyond a start from scratch."""
        return self.load + self.start - self.fresh


def _restart(folder: Path, size: Size, bench: Bench) -> Restart:
    """Let a trainer die, and do what the next one does."""
    bench.say(f"restart · {folder.name}")
    live = gpt2_state(size.restart_bytes)
    nbytes = state_bytes(live)
    copy = ReferenceCopy(nbytes)
    copy.run()
    copied = copy.run()
    fresh = Checkpointer(tiers=["memory", str(folder / "fresh")])
    with fresh:
        fresh_seconds = timed(fresh.engine.start)
    command = [sys.executable, "-m", "benchmarks.bars.memory_tier", str(folder / "run"), str(size.restart_bytes)]
    status = subprocess.run(command, cwd=ROOT, timeout=CHILD_SECONDS, check=False).returncode
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the trainer to be killed ended with status {status}")
    with Checkpointer(tiers=["memory", str(folder / "run")], linger=LINGER_SECONDS) as ckpt:
        load_seconds = timed(lambda: ckpt.load(into=live))
        if ckpt.loaded is None or not ckpt.loaded.from_memory:
            raise RuntimeError("the state did not come from memory")
        start_seconds = timed(ckpt.engine.start)
    return Restart(nbytes, load_seconds, start_seconds, fresh_seconds, copied)


def _overhead(samples: list[float], plain: list[float]) -> tuple[float, ...]:
    return tuple(ratio - 1.0 for ratio in ratios(samples, plain))


def _train(loop: PlainLoop, size: Size, saver: MemorySaver, every: int) -> Callable[[], float]:
    return lambda: loop.train(size.iterations, saver, every)


def _label(kind: str, every: int) -> str:
    return f"{kind}, every step" if every == 1 else f"{kind}, every {every}"


def _die(folder: str, nbytes: str) -> None:
    """Keep a state in memory, and get killed."""
    ckpt = Checkpointer(tiers=["memory", folder], linger=LINGER_SECONDS)
    ckpt.save(gpt2_state(int(nbytes)), step=1, durable=False).wait()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _die(*sys.argv[1:])
