"""Every way to save that can be installed here, beside ours: what a save keeps, drags, takes and brings back."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.disk import evict, warm
from benchmarks.measure import MachineMemory, children_seconds, interleave, timed
from benchmarks.peers import WAYS
from benchmarks.plain_loop import EngineSaver, PeerSaver, PlainLoop, Saver
from benchmarks.run import Bench, Scale
from benchmarks.table import number
from benchmarks.values import BarResult, Check, Grid, Series, ratios
from benchmarks.workloads import State, change_everything, tensors
from ckpt_engine import Checkpointer

TITLE = "Peers: every way to save that can be installed here, beside each other"
OURS = "ckpt-engine"
OUR_PROMISES = "synced, whole or not there, verified when loaded; other numbers of ranks can load it"
STEPS = {1: 8, 5: 11, 20: 21}
"""By the steps between two saves; each save of the longer ones has a next step."""
PLAIN_STEPS = 10
PATIENCE_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure; `alone` saves and `loads` are of each process."""

    parameters: int
    step_seconds: float
    rounds: int
    alone: int
    loads: int


SIZES = {
    Scale.FULL: Size(33_000_000, 0.2, 3, 3, 2),
    Scale.QUICK: Size(33_000_000, 0.2, 1, 1, 1),
    Scale.TINY: Size(20_000, 0.002, 1, 1, 1),
}


@dataclass(slots=True)
class Report:
    """What one process measured of one way, in seconds and bytes; `loops` are times that of training without saves.

    Args:
        drags: what the step after a save takes longer.
    """

    stalls: list[float] = field(default_factory=list)
    drags: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    loops: dict[str, float] = field(default_factory=dict)


def run(bench: Bench) -> BarResult:
    """Each sample is of a process of its own: no way inherits the memory, threads or process groups of another."""
    size = SIZES[bench.scale]
    loop = PlainLoop(size.parameters, size.step_seconds)
    names = [OURS, *(name for name, way in WAYS.items() if way.is_there)]
    reports: dict[str, list[Report]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    with bench.scratch("peers") as folder:
        numbers = iter(range(1_000_000))

        def measured(name: str) -> float:
            if name in failed:
                return 0.0
            target = folder / str(next(numbers))
            try:
                reports[name].append(_in_a_process(bench.scale, name, loop.batch_size, target))
            except _PeerError as err:
                if name == OURS:
                    raise
                failed[name] = str(err)
                del reports[name]
            shutil.rmtree(target)
            return 0.0

        interleave({name: partial(measured, name) for name in names}, size.rounds, tick=bench.say)
    missing = sorted({way.package for way in WAYS.values() if not way.is_there})
    return BarResult(
        "peers",
        TITLE,
        {
            "state": f"{loop.state_bytes / 1e6:.0f} MB: perceptron with fused Adam, batch of {loop.batch_size}, on "
            f"{torch.get_num_threads()} threads",
            "processes": f"a new one for each way and round; {size.rounds} rounds. Two saves come before what is shown",
            "stall, next step": "of saves every 5 and 20 steps: what `save` keeps training, and what the next step "
            "takes longer than a usual one, waiting before its update included",
            "durable, processor time": "a save while nothing else runs, until it says that it is written; of "
            "all processes",
            "memory": "private and shared memory of all processes at its peak, beyond that before the first save",
            "load": "until the live tensors have the values, compared afterwards; cold: the files' pages dropped",
            "every …": "wall time until all is written, by that of as many steps without saves in the same process",
            "kept": "the two newest",
            "packages": ", ".join(
                f"{name} {version(name)}" for name in sorted({WAYS[one].package for one in reports if one != OURS})
            ),
        },
        tuple(_checks(reports)),
        tuple(series for name, found in reports.items() for series in _series(name, found, loop.state_bytes)),
        (
            "What is not synced can be lost in a power cut, and is written by the kernel after its time is taken here.",
            "Each waits for its save before where it must, or would skip one; AsyncCheckpointIO queues instead.",
            "NVRx (nvidia-resiliency-ext) saves on machines with a GPU only.",
            *(f"{name} is left out, as it failed: {why}" for name, why in failed.items()),
            *(
                [f"Not installed (requirements/peers.txt), so they did not take part: {', '.join(missing)}."]
                * bool(missing)
            ),
        ),
        (_grid({name: list(_series(name, found, loop.state_bytes)) for name, found in reports.items()}),),
    )


def _checks(reports: Mapping[str, Sequence[Report]]) -> Iterator[Check]:
    others = {name: found for name, found in reports.items() if name != OURS}
    synced = {name: found for name, found in others.items() if WAYS[name].syncs}
    quantities: dict[str, tuple[Callable[[Report], float], Mapping[str, Sequence[Report]]]] = {
        "stall and next step / least of all": (lambda one: statistics.median(_both(one)), others),
        "durable / least of those that sync": (lambda one: statistics.median(one.durable), synced),
        "processor time / least of those that sync": (lambda one: statistics.median(one.cpu), synced),
        "cold load / least of all": (lambda one: statistics.median(one.cold), others),
        "warm load / least of all": (lambda one: statistics.median(one.warm), others),
        **{
            f"every {every} / least of those that sync": (lambda one, every=every: one.loops[str(every)], synced)
            for every in STEPS
        },
    }
    for what, (quantity, rivals) in quantities.items():
        least = [min(quantity(one) for one in together) for together in zip(*rivals.values(), strict=True)]
        yield Check(f"{OURS}: {what}", "x", "at most", 1.0, ratios([quantity(one) for one in reports[OURS]], least))


def _both(report: Report) -> list[float]:
    return [stall + max(0.0, drag) for stall, drag in zip(report.stalls, report.drags, strict=True)]


def _series(name: str, found: Sequence[Report], nbytes: int) -> Iterator[Series]:
    def all_of(samples: Callable[[Report], Sequence[float]], scale: float = 1.0) -> tuple[float, ...]:
        return tuple(scale * sample for one in found for sample in samples(one))

    note = "" if name == OURS or WAYS[name].syncs else "not synced"
    yield Series(f"{name}: stall", "ms", all_of(lambda one: one.stalls, 1e3))
    yield Series(f"{name}: next step longer by", "ms", all_of(lambda one: one.drags, 1e3))
    yield Series(f"{name}: durable after", "s", all_of(lambda one: one.durable), note)
    yield Series(f"{name}: processor time", "CPU-s/GB", all_of(lambda one: one.cpu, 1e9 / nbytes))
    yield Series(f"{name}: memory", "x state", tuple(one.extra_bytes / nbytes for one in found))
    yield Series(f"{name}: cold load", "s", all_of(lambda one: one.cold))
    yield Series(f"{name}: warm load", "s", all_of(lambda one: one.warm))
    for every in STEPS:
        yield Series(f"{name}: every {every}", "x", tuple(one.loops[str(every)] for one in found), note)


def _grid(found: Mapping[str, Sequence[Series]]) -> Grid:
    """A row for each way; medians."""
    columns = tuple(series.name.removeprefix(f"{OURS}: ") for series in found[OURS])
    promises = {name: OUR_PROMISES if name == OURS else WAYS[name].promises for name in found}
    rows = [
        (name, *(number(series.median, series.unit) for series in all_of_it), promises[name])
        for name, all_of_it in found.items()
    ]
    return Grid("Medians, and what each promises", ("", *columns, "promises"), tuple(rows))


class _PeerError(Exception):
    """A way to save failed in its process."""


def _in_a_process(scale: Scale, name: str, batch_size: int, folder: Path) -> Report:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.bars.peers",
        scale.value,
        name,
        str(batch_size),
        str(folder),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except subprocess.TimeoutExpired as err:
        raise _PeerError(f"it did not end within {PATIENCE_SECONDS:.0f} s") from err
    if done.returncode:
        raise _PeerError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}")
    return Report(**json.loads(done.stdout.splitlines()[-1]))


def _opened(name: str, folder: Path, loop: PlainLoop) -> tuple[Saver, Callable[[State], object], Callable[[], None]]:
    """What saves, what loads, and what gives everything back."""
    if name == OURS:
        engine = EngineSaver(folder, lazy=False)
        return engine, lambda into: Checkpointer(folder).load(into=into), engine.checkpointer.close
    peer = WAYS[name].make(folder, loop.model, loop.optimizer)
    return PeerSaver(peer), peer.load, peer.close


def _measure(scale: Scale, name: str, batch_size: int, folder: Path) -> Report:
    size, report = SIZES[scale], Report()
    loop = PlainLoop(size.parameters, size.step_seconds, batch_size)
    for _ in range(3):
        loop.step()
    os.sync()  # what another process has left to the kernel would be written beside this one
    saver, load, close = _opened(name, folder, loop)
    with MachineMemory() as memory:
        for step in (1, 2):
            _save(saver, loop.state(step), step)
            saver.finish()
    report.extra_bytes = memory.extra_bytes
    os.sync()
    laps = [timed(loop.step) for _ in range(PLAIN_STEPS)]
    seconds = {every: _train(loop, saver, every, steps, report) for every, steps in STEPS.items()}
    os.sync()
    laps += [timed(loop.step) for _ in range(PLAIN_STEPS)]
    report.loops = {str(every): seconds[every] / steps / statistics.fmean(laps) for every, steps in STEPS.items()}
    report.drags = [lap - statistics.median(laps) for lap in report.drags]
    for step in range(size.alone):
        state = loop.state(step)
        change_everything(state)
        used = _cpu_seconds()
        report.durable.append(timed(partial(_save_to_the_end, saver, state, step)))
        report.cpu.append(_cpu_seconds() - used)
    expected = [tensor.clone() for tensor in tensors(loop.state(0))]
    for prepare, samples in ((evict, report.cold), (warm, report.warm)):
        for _ in range(size.loads):
            change_everything(loop.state(0))
            for path in filter(Path.is_file, folder.rglob("*")):
                prepare(path)
            samples.append(timed(partial(load, loop.state(0))))
            if not all(map(torch.equal, tensors(loop.state(0)), expected)):
                raise RuntimeError(f"{name} did not bring back what it had saved")
    close()
    return report


def _save(saver: Saver, state: State, step: int) -> None:
    saver.save(state, step)
    saver.before_update()


def _save_to_the_end(saver: Saver, state: State, step: int) -> None:
    _save(saver, state, step)
    saver.finish()


def _train(loop: PlainLoop, saver: Saver, every: int, steps: int, report: Report) -> float:
    """Train with a save after every `every`-th step; wall seconds until all of them are written."""
    began, saved = time.perf_counter(), False
    for step in range(1, steps + 1):
        lap = timed(partial(loop.step, saver))
        if saved and every > 1:
            report.drags.append(lap)
        saved = step % every == 0
        if saved:
            stall = timed(partial(saver.save, loop.state(step), step))
            if every > 1:
                report.stalls.append(stall)
    saver.before_update()
    saver.finish()
    return time.perf_counter() - began


def _cpu_seconds() -> float:
    """Of this process and of those that it has started, ended ones included."""
    ended, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime + children_seconds()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    target = Path(sys.argv[4])
    target.mkdir(parents=True, exist_ok=True)
    print(json.dumps(asdict(_measure(Scale(sys.argv[1]), sys.argv[2], int(sys.argv[3]), target))))
