"""The result of a demo: in a few lines for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from demo.compare import Compared
from demo.overhead import Overhead
from demo.runs import Life, Run
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

    @property
    def summary(self) -> str:
        """The kill and the restart in a line."""
        restore = "" if self.restore_seconds is None else f", of which the restore takes {self.restore_seconds:.2f} s"
        return (
            f"kill -9 of {self.victims} at step {self.killed_step} ({self.evidence or 'between two saves'}); "
            f"{'the local folder is lost; ' if self.disk_lost else ''}resumed from step {self.resumed_step}"
            f"{f', {self.resumed_from}' if self.disk_lost and self.resumed_from else ''}: {self.lost_steps} steps "
            f"({self.lost_seconds:.1f} s) lost; trains again after {self.resume_seconds:.1f} s{restore}"
        )


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
        """The numbers behind the summary."""
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
        """Print the summary."""
        console.print()
        for number, one in enumerate(self.restarts, 1):
            _say(console, f"kill {number}: {one.summary}")
        if self.restarts:
            _say(console, f"a start from scratch takes {self.fresh_start_seconds:.1f} s")
        if self._missed:
            _say(console, f"the run ended before it was killed {self.settings.kills} times", "red")
        if self.overhead is not None:
            _say(console, f"overhead: {self.overhead.summary}")
        compared = self.compared
        verdict = "[bold green]yes[/]" if compared.identical else "[bold red]NO[/]"
        console.print(f"[bold]bitwise identical to the uninterrupted run:[/] {verdict}", highlight=False)
        for difference in compared.differences[:MOST_DIFFERENCES]:
            _say(console, f"  {difference}", "red")
        if (more := len(compared.differences) - MOST_DIFFERENCES) > 0:
            _say(console, f"  ... and {more} more differences", "red")
        _say(
            console,
            f"  compared: {compared.steps} steps with their losses and {compared.samples} samples, "
            f"{compared.validations} validations, {compared.tensors} tensors ({compared.tensor_bytes / 1e6:.0f} MB) "
            f"and {compared.values} other values at the end",
            "dim",
        )


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


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(line, highlight=False, markup=False, style=style, soft_wrap=True)
