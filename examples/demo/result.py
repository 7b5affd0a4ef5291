"""The result of a demo: as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demo.compare import Compared
from demo.overhead import Overhead
from demo.runs import TRAINER, Life, Run
from demo.settings import Settings

MOST_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class Restart:
    """A kill and the restart after it.

    Args:
        killed_step: the last step finished before the kill.
        resumed_step: the step of the snapshot the next process went on from.
        lost_seconds: training time of the steps between the two, which are trained again.
        resume_seconds: from the start of the process to its first batch; imports and loaders included.
        restore_seconds: reading and verifying the snapshot, by the resume report.
        evidence: why we know that it was saving at the kill; None: it was not.
        disk_lost: whether the local snapshot folder was removed between the two.
        resumed_from: what the resume report says about the place that served, if there were several.
    """

    killed_step: int
    victims: str
    resumed_step: int
    lost_seconds: float
    resume_seconds: float
    restore_seconds: float | None
    evidence: str | None
    disk_lost: bool
    resumed_from: str | None

    @property
    def lost_steps(self) -> int:
        return self.killed_step - self.resumed_step


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a demo found out."""

    settings: Settings
    reference: Run
    killed: Run
    compared: Compared
    overhead: Overhead | None
    seconds: float

    @property
    def restarts(self) -> list[Restart]:
        lives = self.killed.lives
        return [_restart(self.killed, life, after) for life, after in itertools.pairwise(lives)]

    @property
    def _missed(self) -> bool:
        return len(self.killed.lives) - 1 < self.settings.kills

    @property
    def fresh_start_seconds(self) -> float:
        """From the start of the reference process to its first batch."""
        life = self.reference.lives[0]
        return life.first_batch - life.spawned

    def to_json(self) -> dict[str, Any]:
        """The numbers behind the tables."""
        return {
            "identical": self.compared.identical,
            "compared": dataclasses.asdict(self.compared),
            "restarts": [dataclasses.asdict(one) | {"lost_steps": one.lost_steps} for one in self.restarts],
            "kills_asked": self.settings.kills,
            "fresh_start_seconds": self.fresh_start_seconds,
            "snapshots": [dataclasses.asdict(one) for one in self.killed.durable],
            "overhead": None if self.overhead is None else self.overhead.to_json(),
            "seconds": self.seconds,
            "settings": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in dataclasses.asdict(self.settings).items()
            },
        }

    def show(self, console: Console) -> None:
        """Print the tables and the verdict."""
        console.print()
        if self.restarts:
            console.print(self._restart_table())
        if self.settings.kills:
            _notes(console, self._restart_notes())
        if self.overhead is not None:
            console.print(_overhead_table(self.overhead))
            _notes(console, _overhead_notes(self.overhead, self.settings.threads))
            console.print()
        compared = self.compared
        verdict = "[bold green]yes[/]" if compared.identical else "[bold red]NO[/]"
        console.print(f"[bold]bitwise identical to the uninterrupted run:[/] {verdict}", highlight=False)
        for difference in compared.differences[:MOST_DIFFERENCES]:
            console.print(f"  {difference}", highlight=False, markup=False, style="red", soft_wrap=True)
        if (more := len(compared.differences) - MOST_DIFFERENCES) > 0:
            console.print(f"  ... and {more} more differences", style="red", highlight=False)
        _notes(
            console,
            [
                f"compared: {compared.steps} steps, those trained again included (loss, learning rate),",
                f"{compared.samples} sample ids, {compared.validations} validations, and at the end {compared.tensors} "
                f"tensors, {compared.tensor_bytes / 1e6:.0f} MB",
                f"(weights, AdamW, random streams) and {compared.values} other values",
            ],
        )

    def _restart_table(self) -> Table:
        table = Table(title="kill -9 and restart", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
        table.add_column("killed")
        for name in ("at step", "resumed from", "steps lost", "time lost", "restart", "restore"):
            table.add_column(name, justify="right")
        table.add_column("saving")
        for one in self.restarts:
            table.add_row(
                "trainer" if one.victims == TRAINER else "both",
                str(one.killed_step),
                str(one.resumed_step) if one.resumed_step else "scratch",
                f"[bold]{one.lost_steps}[/]",
                f"{one.lost_seconds:.1f} s",
                f"{one.resume_seconds:.1f} s",
                "-" if one.restore_seconds is None else f"{one.restore_seconds:.2f} s",
                "yes" if one.evidence else "[red]no[/]",
            )
        return table

    def _restart_notes(self) -> list[str]:
        return [
            *(f"kill {number}: {one.evidence or 'no save was seen'}" for number, one in enumerate(self.restarts, 1)),
            *(
                f"kill {number}: the local snapshot folder was removed; {one.resumed_from or 'nothing was resumed'}"
                for number, one in enumerate(self.restarts, 1)
                if one.disk_lost
            ),
            *([f"the run ended before it was killed {self.settings.kills} times"] if self._missed else []),
            "killed: the trainer with its loader workers, or both it and the writer",
            f"restart: until the first batch, imports included; {self.fresh_start_seconds:.1f} s from scratch",
            "restore: finding, reading and verifying the snapshot; part of the restart",
        ]


def _restart(run: Run, life: Life, after: Life) -> Restart:
    kill = life.kill
    assert kill is not None
    seconds = {step.step: step.time for step in run.steps(life.pid)}
    lost = seconds[kill.step] - seconds.get(after.resumed_step, life.first_batch)
    return Restart(
        killed_step=kill.step,
        victims=kill.victims,
        resumed_step=after.resumed_step,
        lost_seconds=max(0.0, lost),
        resume_seconds=after.first_batch - after.spawned,
        restore_seconds=after.restore_seconds,
        evidence=_evidence(run, life, after),
        disk_lost=kill.disk_lost,
        resumed_from=after.resumed_from,
    )


def _evidence(run: Run, life: Life, after: Life) -> str | None:
    """What proves that a snapshot was under way: a half-written file, or a commit by the writer after the kill."""
    kill = life.kill
    assert kill is not None
    if kill.torn is not None:
        return f"an unfinished {kill.torn.kind} of {kill.torn.nbytes / 1e6:.0f} MB was left behind, and ignored"
    later = [durable for durable in run.durable if kill.time < durable.time < after.first_batch]
    if later:
        milliseconds = 1e3 * (later[0].time - kill.time)
        return f"the writer lived on and made step {later[0].step} durable {milliseconds:.0f} ms after the kill"
    return f"a {kill.saving.kind} was being written" if kill.saving is not None else None


def _overhead_table(overhead: Overhead) -> Table:
    table = Table(title="overhead", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in ("budget", "measured", "CPU time", "own account", "snapshots"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    words = {"within": "[green]within[/]", "over": "[red]over[/]", "undecided": "[yellow]undecided[/]"}
    table.add_row(
        f"{overhead.budget_percent:.2f} %",
        f"[bold]{overhead.percent:+.2f} %[/]",
        f"{overhead.cpu_percent:+.2f} %",
        f"{overhead.own_percent:.2f} %",
        str(overhead.snapshots),
        words[overhead.verdict],
    )
    return table


def _overhead_notes(overhead: Overhead, threads: int) -> list[str]:
    percents = [pair.percent for pair in overhead.pairs]
    error = f" ± {overhead.error_percent:.2f} %" if math.isfinite(overhead.error_percent) else ""
    return [
        f"measured: median of {len(overhead.pairs)} interleaved pairs with and without the callback{error}",
        f"  of {overhead.steps} steps each, from {min(percents):+.1f} to {max(percents):+.1f} %",
        f"noise: the trainings without the callback differ by {overhead.noise_percent:.1f} %"
        + ("; too much to decide" if overhead.verdict == "undecided" else ""),
        "CPU time: of the training process alone, the same median; it shows no waiting",
        "own account: stalls, fences and slowdown as the callback measures them itself",
        f"setting: {threads} torch thread{'s' * (threads > 1)}, 2 loader workers, the writer; {os.cpu_count()} cores",
    ]


def _notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="dim", soft_wrap=True)
