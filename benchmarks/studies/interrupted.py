"""Training that dies and starts again: `python -m benchmarks.studies.interrupted` is one such life."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import TorchSave
from benchmarks.run import Bench
from benchmarks.studies.emulated import AdaptiveRun, SleepingLoop, momentum_state, resnet18
from benchmarks.values import Check, Grid, Plot, Series
from benchmarks.workloads import SEED, everything_lazy
from ckpt_engine import Checkpointer

BUDGET = 0.035
HOURS_OF_EPOCH = 2.7
"""At which failures every five hours cost what figure 8 shows: 1 - 2.7 / 5 is 1 - 150 / 280 of the time."""
TRAIN, BATCH = 1344, 16
MOST_LIVES = 50
LIFE_STEPS = 28
"""A third of an epoch."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        hour: seconds that stand for one.
        hours: between failures.
        epochs: to train, in the part about recovery.
        digits: epochs of the part about the iterator.
    """

    hour: float
    hours: tuple[float, ...]
    epochs: int
    step_seconds: float
    digits: int
    seeds: int

    @property
    def epoch_steps(self) -> int:
        return max(2, round(HOURS_OF_EPOCH * self.hour / self.step_seconds))


FULL = Size(4.0, (5.0,), 5, 0.05, 2, 2)
QUICK = Size(1.2, (5.0,), 4, 0.02, 3, 1)
TINY = Size(1.0, (5.0,), 1, 0.02, 1, 1)
CONDITIONS = (
    f"processes are killed (SIGKILL) that train a state of ResNet18 (94 MB); an hour is {FULL.hour:g} s, an epoch "
    f"{HOURS_OF_EPOCH:g} h, both compared ways run the same steps. Time counts while a process has Python, torch "
    "and a model; recovery is from there until the step is reached at which the process before was killed"
)
PUBLISHED = {5.0: ("280 h / 150 h", "1.87 x")}
"""Figure 8, ResNet50 to 76.1 %: once an epoch, and CheckFreq."""


# ---------------------------------------------------------------- recovery


@dataclass
class Lives:
    """What became of one way to take snapshots: seconds that processes trained, and (seconds, steps) on the way."""

    seconds: float = 0.0
    recovery: list[float] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)


def recovery(folder: Path, size: Size, bench: Bench) -> tuple[Grid, Plot, list[Check]]:
    """Time to the same step with a failure every so many hours: snapshots once an epoch, and by this engine."""
    clean = size.epochs * size.epoch_steps * size.step_seconds
    rows, lines, checks = [], dict[str, tuple[tuple[float, float], ...]](), []
    for hours in size.hours:
        found = {}
        for way in ("epoch", "engine"):
            bench.say(f"recovery: every {hours:g} h, {way}")
            found[way] = _lives(folder / f"{way}-{hours:g}", way, hours * size.hour, size)
        once, ours = found["epoch"], found["engine"]
        published = PUBLISHED.get(hours, ("?", "?"))
        rows.append(
            (
                f"{hours:g} h",
                *(f"{one.seconds / clean:.2f} x" for one in (once, ours)),
                f"{once.seconds / ours.seconds:.2f} x",
                *published,
                *(f"{mean(one.recovery) / size.hour * 60:.0f} min" if one.recovery else "?" for one in (once, ours)),
                f"{mean(ours.recovery):.2f} s" if ours.recovery else "?",
            )
        )
        if not lines:
            ideal = ((0.0, 0.0), (clean / size.hour, float(size.epochs)))
            lines = {"no failures, no snapshots": ideal}
            for name, one in (("this engine", ours), ("once an epoch", once)):
                lines[name] = tuple((x / size.hour, y / size.epoch_steps) for x, y in one.points)
        checks.append(
            Check(f"time with failures every {hours:g} h / without any", "x", "at most", 1.25, (ours.seconds / clean,))
        )
    columns = (
        *("a failure every", "once an epoch / no failures", "this engine / no failures", "quotient"),
        *(
            "published hours",
            "published quotient",
            "recovery, once an epoch",
            "recovery, this engine",
            "of that, measured",
        ),
    )
    title = "Recovery (CheckFreq, figure 8), time-compressed"
    plot = Plot(f"A failure every {size.hours[0]:g} h", "hours", "epochs complete", lines)
    return Grid(title, columns, tuple(rows)), plot, checks


def _lives(folder: Path, way: str, life: float, size: Size) -> Lives:
    found, step, target = Lives(points=[(0.0, 0.0)]), 0, size.epochs * size.epoch_steps
    while step < target and len(found.points) < 2 * MOST_LIVES:
        command = [sys.executable, "-m", "benchmarks.studies.interrupted", str(folder), way, str(target)]
        command += [str(size.step_seconds), str(size.epoch_steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            began, killed_at, again = time.perf_counter(), step, True
            for number, line in enumerate(process.stdout):
                now, step = time.perf_counter() - began, int(line)
                if number == 0:
                    found.points.append((found.seconds + now, float(step)))
                if again and step > killed_at:
                    again = False
                    found.recovery += [now] if killed_at else []
                if now >= life and step < target:
                    process.kill()
                    break
            found.points.append((found.seconds + now, float(step)))
            found.seconds += now
    return found


def _live(folder: str, way: str, target: str, step_seconds: str, epoch_steps: str) -> None:
    """Train from the newest snapshot to the target, saying each step."""
    loop = SleepingLoop(momentum_state(resnet18()), float(step_seconds))
    print("ready", flush=True)
    if way == "engine":
        with Checkpointer(folder, keep={"last": 1}) as checkpointer:
            checkpointer.prepare(loop.state(0), lazy=everything_lazy)
            run = AdaptiveRun(checkpointer, BUDGET)
            loaded = checkpointer.load(into=loop.state(0))
            first = 0 if loaded is None else int(loaded["step"])
            run.train(loop, int(target), first, lambda step: print(step, flush=True))
        return
    saver, first = TorchSave(Path(folder)), 0
    if there := sorted(Path(folder).glob("[0-9].pt"), key=lambda path: path.stat().st_mtime):
        first = int(torch.load(there[-1])["step"])
    for step in range(first + 1, int(target) + 1):
        time.sleep(loop.step_seconds)
        if step % int(epoch_steps) == 0:
            saver.save(loop.state(step), step)
        print(step, flush=True)


# ---------------------------------------------------------------- the iterator


def iterator(folder: Path, size: Size, bench: Bench) -> tuple[Grid, tuple[Series, ...]]:
    """Accuracy on digits after a training that is interrupted three times an epoch."""
    found: dict[str, list[float]] = {}
    for seed in range(size.seeds):
        for name, interrupted, resumes, reshuffles in (
            ("not interrupted", False, True, False),
            ("the iterator resumes (this engine)", True, True, False),
            ("each start begins the epoch again", True, False, False),
            ("each start shuffles again", True, False, True),
        ):
            bench.say(f"iterator: {name}, seed {seed}")
            where = folder / f"digits-{seed}-{len(found)}-{name[:12].replace(' ', '-')}"
            found.setdefault(name, []).append(_digits(where, seed, size.digits, interrupted, resumes, reshuffles))
    series = tuple(Series(f"accuracy on digits, {name}", "%", tuple(all_of)) for name, all_of in found.items())
    best = series[0].median
    rows = tuple(
        (
            name,
            f"{one.median:.1f} % ({one.low:.1f} to {one.high:.1f})",
            f"{best - one.median:.1f} points",
            "up to 13 %" if at > 1 else "0",
        )
        for at, (name, one) in enumerate(zip(found, series, strict=True))
    )
    return Grid(
        "Loss of accuracy with and without a resumable iterator (CheckFreq: ResNet18)",
        ("training", "accuracy", "loss", "published loss"),
        rows,
    ), series


def _digits(folder: Path, seed: int, epochs: int, interrupted: bool, resumes: bool, reshuffles: bool) -> float:
    """Accuracy on what was not trained on."""
    from sklearn.datasets import load_digits  # slow, and of no use to a process that is killed

    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    steps, life = epochs * TRAIN // BATCH, LIFE_STEPS if interrupted else 10**9
    train = torch.utils.data.Subset(data, range(TRAIN))
    done = lives = 0
    while done < steps:
        torch.manual_seed(SEED + seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        order = torch.Generator().manual_seed(SEED + seed + (1000 * lives if reshuffles else 0))
        loader = DataLoader(train, batch_size=BATCH, shuffle=True, generator=order)
        try:
            with Checkpointer(folder, every_n_steps=LIFE_STEPS // 4, writer="thread") as checkpointer:
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
                run = checkpointer.track(**parts, **({"loader": loader} if resumes else {}))
                life_ends = min(steps, run.global_step + life)
                for step, (inputs, labels) in enumerate(_batches(loader, run.epoch, epochs), run.global_step + 1):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    if not resumes:
                        run.step()
                    done = step
                    if step >= life_ends:
                        raise _Interrupted
        except _Interrupted:
            lives += 1
    inputs, labels = data[TRAIN:]
    return 100.0 * float((model(inputs).argmax(1) == labels).float().mean())


class _Interrupted(Exception):
    """A life ends."""


def _batches(loader: DataLoader[Any], first: int, epochs: int) -> Iterator[Sequence[torch.Tensor]]:
    for _ in range(first, epochs):
        yield from loader


if __name__ == "__main__":
    _live(*sys.argv[1:])
