"""The runs: one that is left alone, one that is killed while it saves and started again, and the overhead pairs."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.config import load_config
from demo.folder import Durable, SnapshotFolder, Unfinished
from demo.overhead import BLOCKS, Block, Overhead, pair_up, read_blocks
from demo.process import TrainingFailedError, TrainingProcess
from demo.record import Entry, Start, Step
from demo.s3 import Remote
from demo.screen import Screen
from demo.settings import Settings

LOOK_SECONDS = 0.02
LOOK_AT_SAVING_SECONDS = 0.0005
STUCK_SECONDS = 180.0
"""Without a new step for that long a training process counts as stuck."""
PATIENCE_STEPS = 60
"""How many steps a kill that is due waits for the next save, at most."""
LONGEST_DELAY_SECONDS = 0.02
"""A kill strikes up to that long after a save was seen to begin."""

TRAINER = "trainer"
EVERYTHING = "trainer and writer"


@dataclass(frozen=True, slots=True)
class Kill:
    """One `kill -9`.

    Args:
        time: wall-clock seconds.
        step: the last finished step.
        victims: `trainer` (with its loader workers; the writer lives on) or `trainer and writer`.
        saving: the file that was being written at the last look, under a millisecond before; None: nothing was.
        torn: the file that was found half-written after the kill.
        disk_lost: whether the local snapshot folder was removed then.
    """

    time: float
    step: int
    victims: str
    saving: Unfinished | None
    torn: Unfinished | None
    disk_lost: bool = False


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a run, from its start to its kill or its end.

    Args:
        pid: its process id.
        spawned: when it was started (wall-clock seconds).
        first_batch: when it began to train.
        resumed_step: optimizer steps that were already done then.
        restore_seconds: reading and checking the snapshot, by the callback's own resume report; None: there is none.
        kill: how it ended; None: it finished.
        resumed_from: what the resume report says about the place that served; None: there was one place only.
    """

    pid: int
    spawned: float
    first_batch: float
    resumed_step: int
    restore_seconds: float | None
    kill: Kill | None
    resumed_from: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Args:
        lives: its processes in order.
        entries: everything it recorded.
        durable: every snapshot that became durable.
    """

    lives: tuple[Life, ...]
    entries: tuple[Entry, ...]
    durable: tuple[Durable, ...]

    def steps(self, pid: int) -> list[Step]:
        """The training steps of one of its processes."""
        return [entry for entry in self.entries if isinstance(entry, Step) and entry.pid == pid]


class Progress:
    """What a training process has done so far, for those who wait for it.

    Raises:
        TrainingFailedError: (by `look`) it is stuck or ended badly.
    """

    def __init__(self, process: TrainingProcess, screen: Screen) -> None:
        self._process = process
        self._screen = screen
        self._moved = time.monotonic()
        self.entries: list[Entry] = []
        self.start: Start | None = None
        self.step = 0

    def look(self) -> bool:
        """Take in what is new; False once the process has ended and everything is taken in."""
        running = self._process.running()
        for entry in (new := self._process.entries()):
            if isinstance(entry, Start):
                self.start, self.step = entry, entry.step
            elif isinstance(entry, Step):
                self.step = entry.step
                self._screen.step(entry)
        self.entries += new
        if new:
            self._moved = time.monotonic()
        elif running and time.monotonic() - self._moved > STUCK_SECONDS:
            raise TrainingFailedError(f"no step for {STUCK_SECONDS:.0f} s:\n{self._process.log_tail()}")
        return running


def run_reference(settings: Settings, screen: Screen) -> Run:
    """The run that is left alone. It has no checkpoint callback at all: a callback that disturbs the run would show."""
    with TrainingProcess(settings.training(settings.reference), settings.reference) as process:
        progress = Progress(process, screen)
        while progress.look():
            time.sleep(LOOK_SECONDS)
        return Run((_life(process, progress, None, None),), tuple(progress.entries), ())


def run_killed(settings: Settings, screen: Screen, remote: Remote | None = None) -> Run:
    """The run that is killed at random moments in which it saves, and started again each time.

    Args:
        remote: a second tier; with the last kill the first one is lost.
    """
    options: list[str | Path] = ["--ckpt", settings.yaml]
    if settings.flip_bit_at is not None:
        options += ["--flip-bit-at", str(settings.flip_bit_at)]
    command = settings.training(settings.killed, *options)
    folder = SnapshotFolder(settings.snapshots)
    rng = random.Random(settings.seed)
    lives: list[Life] = []
    entries: list[Entry] = []
    targets = list(_targets(settings, rng))
    for number, target in enumerate([*targets, None]):
        loses_disk = remote is not None and number == len(targets) - 1
        with TrainingProcess(command, settings.killed) as process:
            progress = Progress(process, screen)
            kill = None
            while progress.look():
                folder.look()
                for durable in folder.seen[-1:]:
                    screen.durable(durable)
                if target is not None and progress.step >= target and (not loses_disk or remote.newest()):
                    victims = EVERYTHING if number % 2 or loses_disk else TRAINER
                    kill = _kill_while_saving(settings, process, progress, folder, rng, victims)
                    break
                time.sleep(LOOK_SECONDS)
            progress.entries += process.entries()
            folder.look()
            life = _life(process, progress, _report(settings.snapshots, process.started), kill)
            if kill is not None and loses_disk:
                shutil.rmtree(settings.snapshots)
                kill = dataclasses.replace(kill, disk_lost=True)
                life = dataclasses.replace(life, kill=kill)
            lives.append(life)
            entries += progress.entries
            screen.lived(life)
            if kill is None:
                break
    if targets and not any(life.kill for life in lives):
        raise TrainingFailedError(
            "the run was over before it could be killed, which shows nothing: start the demo again"
        )
    return Run(tuple(lives), tuple(entries), tuple(folder.seen))


def _targets(settings: Settings, rng: random.Random) -> Iterator[int]:
    """Random steps from which on to kill: one in each equal part of the run, none near the boundary of an epoch."""
    first, last = settings.steps // 8, settings.steps - settings.steps // 8
    for i in range(settings.kills):
        low, high = (first + (last - first) * (i + part) // settings.kills for part in (0, 1))
        inside = [step for step in range(low, high) if settings.mid_epoch(step)]
        if inside:
            yield rng.choice(inside)


def _kill_while_saving(
    settings: Settings,
    process: TrainingProcess,
    progress: Progress,
    folder: SnapshotFolder,
    rng: random.Random,
    victims: str,
) -> Kill | None:
    """Wait until a snapshot is being written in the middle of an epoch, let a random moment pass, and kill."""
    latest = min(progress.step + PATIENCE_STEPS, settings.steps - 2)

    def due() -> bool:
        folder.look()
        is_time = folder.unfinished() is not None or progress.step >= latest
        return is_time and settings.mid_epoch(progress.step)

    while progress.look():
        if due():
            time.sleep(rng.uniform(0.0, LONGEST_DELAY_SECONDS))
            process.pause()  # a machine that lets us wait must not let it go on meanwhile
            progress.look()
            if due():
                break
            process.go_on()
        time.sleep(LOOK_AT_SAVING_SECONDS)
    else:
        return None
    others = process.descendants() if victims == EVERYTHING else []
    saving = folder.unfinished()
    when = process.kill(others)
    left = folder.unfinished()
    # With the writer alive a file may still be on its way; with the writer dead it stays as it is.
    torn = left if victims == EVERYTHING and saving and left and left.name == saving.name else None
    progress.entries += (last := process.entries())
    step = max((entry.step for entry in last if isinstance(entry, Step)), default=progress.step)
    return Kill(when, step, victims, saving, torn)


def _life(process: TrainingProcess, progress: Progress, report: Mapping[str, Any] | None, kill: Kill | None) -> Life:
    if progress.start is None:
        raise TrainingFailedError(f"the training process never began to train:\n{process.log_tail()}")
    seconds = None if report is None else float(report["seconds"])
    place = (
        None if report is None else next((note for note in report["notes"] if note.startswith("restored from ")), None)
    )
    return Life(process.pid, process.started, progress.start.time, progress.start.step, seconds, kill, place)


def _report(root: Path, since: float) -> Mapping[str, Any] | None:
    """The resume report of a process that was started at `since`; None: it resumed from nothing."""
    path = root / "resume-report.json"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    report: Mapping[str, Any] = json.loads(path.read_text())
    return report


def measure_overhead(settings: Settings, screen: Screen) -> Overhead:
    """Short trainings with and without the callback in turns, in a process of their own."""
    out = settings.out / "overhead"
    values = {
        "--out": out,
        "--ckpt": settings.yaml,
        "--pairs": settings.pairs,
        "--steps": settings.pair_steps,
        "--width": settings.width,
        "--threads": settings.threads,
        "--seed": settings.seed,
    }
    words = [str(word) for pair in values.items() for word in pair]
    blocks: list[Block] = []
    with TrainingProcess([sys.executable, "-m", "demo.measure_overhead", *words], out) as process:
        moved = time.monotonic()
        while process.running():
            time.sleep(LOOK_SECONDS)
            if len(new := read_blocks(out / BLOCKS)) > len(blocks):
                blocks, moved = new, time.monotonic()
                screen.advance(len(blocks), f"{blocks[-1].seconds:.2f} s for {settings.pair_steps} steps")
            elif time.monotonic() - moved > STUCK_SECONDS:
                raise TrainingFailedError(f"no result for {STUCK_SECONDS:.0f} s:\n{process.log_tail()}")
    pairs = pair_up(read_blocks(out / BLOCKS))
    return Overhead(100.0 * load_config(settings.yaml).overhead, settings.pair_steps, pairs)
