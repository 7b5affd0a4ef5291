"""Proves that a resumed run repeats what was done before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ckpt_engine.errors import RanksError, ReplayError
from ckpt_engine.observe.resume_report import Replay
from ckpt_engine.probe.rank_verdicts import joined, publish
from ckpt_engine.probe.repeated_steps import RepeatedSteps
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.store.rows import Row


class ReplayProof:
    """Of the resume of one process.

    Args:
        ranks: this process is one of them; None: it is alone.
        stops: a difference raises.

    Attributes:
        resumed: of several ranks: the step at which they have resumed, until rank 0 has reported what all have found.
        told: hears of the outcome, once.
    """

    def __init__(self, ranks: Ranks | None, *, stops: bool) -> None:
        self._ranks, self._stops = ranks, stops
        self.resumed: int | None = None
        self._comparison: RepeatedSteps | None = None
        self._why = ""
        self.told: Callable[[Replay], object] = lambda _: None

    @property
    def replay(self) -> Replay:
        """How the resume is proved so far."""
        return self._comparison.replay if self._comparison is not None else Replay("not compared", 0, self._why)

    @property
    def holds_back(self) -> bool:
        """Whether nothing may be overwritten yet."""
        return self._stops and self._comparison is not None and not self._comparison.over

    def expect(self, step: int, found: RepeatedSteps | str) -> None:
        """The run continues from a snapshot of `step`.

        Args:
            found: the steps to compare; a text: why none are.
        """
        self._comparison, self._why = (None, found) if isinstance(found, str) else (found, "")
        if self._ranks is not None:
            self.resumed = step
            if self._comparison is None:
                publish(self._ranks, step, self.replay)

    def compare(self, row: Iterable[Any]) -> None:
        """One more step, as long as there are some to compare.

        Args:
            row: as in a `Row`.

        Raises:
            ReplayError: it differs, and that is to end training.
        """
        steps = self._comparison
        if steps is None or steps.over or not steps.compare(Row._make(row)):
            return
        self._judged()
        if self._stops and self.replay.first is not None:  # a step that is not to be is no measure of others
            raise ReplayError(
                self.replay.text(),
                hint="`replay: warn` trains on, and reports the same; `resume: off` starts afresh",
            )

    def end(self) -> None:
        """What was compared is the outcome."""
        with suppress(RanksError):  # rank 0 may have ended
            if self._comparison is not None and self._comparison.end():
                self._judged()
            self.join(last=True)

    def join(self, *, last: bool) -> None:
        """On rank 0: report what all ranks have found, once."""
        if self._ranks is None or self.resumed is None or self._ranks.rank:
            return
        if (replay := joined(self._ranks, self.resumed, last=last)) is not None:
            self.resumed = None
            if replay.first is not None or self._comparison is not None:
                self.told(replay)

    def _judged(self) -> None:
        """This process has compared its steps. Rank 0 reports later, for all."""
        if self._ranks is not None and self.resumed is not None:
            publish(self._ranks, self.resumed, self.replay)
        if self._ranks is None or self._ranks.rank:
            self.told(self.replay)
