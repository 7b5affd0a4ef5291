"""What is on the screen while the demo runs: a bar per part and a line per event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from demo.folder import Durable
from demo.record import Step

if TYPE_CHECKING:
    from demo.runs import Life

LINES = 8
"""Of a part, where there is no terminal."""


class Screen:
    """Progress bars on a terminal; on anything else only the lines.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._total = self._said = 0
        self._durable: Durable | None = None

    @contextmanager
    def part(self, name: str, total: int) -> Iterator[None]:
        """One part of the demo, `total` steps long."""
        self._total, self._said = total, 0
        if not self.console.is_terminal:
            self.say(f"[bold]{name}[/]")
        if self._task is not None:
            self._bars.update(self._task, visible=False)  # it is on the screen already, above what was said since
        self._task = self._bars.add_task(f"[bold]{name:<22}[/]", total=total, note="starting")
        self._durable = None
        with self._bars:
            yield
            self._bars.update(self._task, completed=total, note="")

    def step(self, step: Step) -> None:
        """A training step ended."""
        durable = f"  newest snapshot: step {self._durable.step}" if self._durable else ""
        self.advance(step.step, f"loss {step.loss_value:.3f}{durable}")

    def advance(self, completed: int, note: str) -> None:
        """So much of the part is done."""
        if self._task is not None:
            self._bars.update(self._task, completed=completed, note=note)
        if not self.console.is_terminal and completed >= self._said + max(1, self._total // LINES):
            self._said = completed
            self.say(f"  {completed} of {self._total}: {note}")

    def durable(self, durable: Durable) -> None:
        """A snapshot became durable."""
        self._durable = durable

    def lived(self, life: Life) -> None:
        """A process of the killed run ended."""
        if life.resumed_step:
            seconds = life.first_batch - life.spawned
            place = f" ({life.resumed_from})" if life.resumed_from else ""
            self.say(f"  resumed from step {life.resumed_step}{place}; training again {seconds:.1f} s after the start")
        if life.kill is not None:
            saving = f"while it saved ({life.kill.saving.kind})" if life.kill.saving else "between two saves"
            self.say(f"  [red]kill -9[/] of {life.kill.victims} after step {life.kill.step}, {saving}")
            if life.kill.disk_lost:
                self.say("  [red]lost[/]: the local snapshot folder, with everything in it")

    def say(self, text: str) -> None:
        """One line of the story."""
        self.console.print(text, highlight=False, soft_wrap=True)
