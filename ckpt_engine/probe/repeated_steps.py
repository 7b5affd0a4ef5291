"""Compares the steps that a resumed process repeats with what an earlier process did. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from ckpt_engine.observe.resume_report import Replay, ReplayDifference
from ckpt_engine.store.rows import CHUNK_BYTES, ProcessRows, Row

Names = Callable[[Row], Sequence[tuple[str, str]]]
"""Of the words of a row the tensor and its dtype."""
_LETTERS: dict[str, Any] = {"float64": "d", "float32": "f", "float16": "e"}
_ROUNDING = 1e-4
"""A difference of weights up to here may come from kernels that add up in another order."""
CAUSES = {
    "batch": "the loop got other data: a data set or loader that changed, or a position that is not in the snapshot",
    "random": "something drew other random numbers since the snapshot: a generator of its own, or an unseeded one",
    "learning_rate": "the schedule is at another place: a scheduler or a counter that no snapshot has, or changed code",
    "weights": "batches, random streams and learning rates were the same: state that no snapshot has, or changed code",
}
"""Of each part of a step, in the order in which one follows from the other."""


def steps_behind(lives: Sequence[ProcessRows], calls: int) -> dict[int, Row]:
    """What was done behind a snapshot, each step as the newest process that ran it did it, by its number.

    An older process counts as far as it did the same as the newer ones: else those went another way.

    Args:
        lives: of the processes, oldest first.
        calls: optimizer steps at the snapshot.
    """
    found: dict[int, Row] = {}
    for life in reversed(lives):
        rows = {row.calls: row for row in life.rows if row.calls > calls}
        if any(what_differs(row, found[at]) for at, row in rows.items() if at in found):
            break
        found = {**rows, **found}
    return {at: found[at] for at in takewhile(found.__contains__, count(calls + 1))}


def what_differs(row: Row, other: Row) -> str:
    """Which part of a step is not the same, the first one in the order in which one follows from the other; or ""."""
    if row.optimizer != other.optimizer:
        return "weights"
    if row.batch and other.batch and row.batch != other.batch:
        return "batch"
    if row.stream != other.stream or (row.streams and other.streams and row.streams != other.streams):
        return "random"
    if row.rates != other.rates:
        return "learning_rate"
    return "weights" if row.plan == other.plan and row.words != other.words else ""


class RepeatedSteps:
    """The steps of one resumed process beside those of earlier ones.

    Args:
        expected: see `steps_behind`; at least one.
        about, now: of the process that ran the last of them, and of this one.
        names: of this process.
    """

    def __init__(
        self, expected: Mapping[int, Row], about: Mapping[str, Any], now: Mapping[str, Any], names: Names
    ) -> None:
        self._expected, self._names = expected, names
        self._about, self._now = about, now
        self.replay = Replay("not compared", 0, f"{len(expected)} repeated steps are compared as they come")
        self.over, self._unseen = False, ""

    def compare(self, row: Row) -> bool:
        """Take one more step; whether `replay` is final."""
        other = self._expected.get(row.calls)
        if other is None:
            return False
        if what := what_differs(row, other):
            self._differs(row, other, what)
        else:
            if row.plan != other.plan:
                self._unseen = "; their weights or moments are of other forms than before, and were not compared"
            elif not row.words:
                self._unseen = "; weights on a device are not looked at"
            self.replay = replace(self.replay, steps=self.replay.steps + 1)
            if self.replay.steps == len(self._expected):
                self._equal()
        return self.over

    def end(self) -> bool:
        """Training is over; whether that makes `replay` final."""
        if self.over or not self.replay.steps:
            return False
        self._equal()
        return True

    def _equal(self) -> None:
        self.over = True
        why = f"{self.replay.steps} of {len(self._expected)} repeated steps gave the same batches"
        result = "not compared" if self._unseen else "exact"
        self.replay = replace(self.replay, result=result, why=why + (self._unseen or " and weights"))

    def _differs(self, row: Row, other: Row, what: str) -> None:
        self.over = True
        name, relative, why = "", None, CAUSES[what]
        if what == "weights" and row.plan == other.plan and row.optimizer == other.optimizer:
            name, relative = first_word(row, other, self._names(row))
            if relative is not None and relative <= _ROUNDING and self._kernels:
                why = self._kernels
        elif what == "weights":
            why = "the steps of the optimizers came in another order"
        self.replay = Replay("different", self.replay.steps, why, ReplayDifference(row.step, what, name, relative))

    @property
    def _kernels(self) -> str:
        """What may round otherwise now."""
        changed = [
            f"{key} is {self._now.get(key)} and was {value}"
            for key, value in self._about.items()
            if key in ("threads", "torch", "device", "machine") and self._now.get(key) != value
        ]
        return f"{', '.join(changed)}: sums may be rounded otherwise" if changed else ""


def first_word(row: Row, other: Row, names: Sequence[tuple[str, str]]) -> tuple[str, float | None]:
    """The tensor whose words are the first that differ, and by how much of the larger one; None: that says nothing."""
    for number, (name, dtype) in enumerate(names):
        start = number * CHUNK_BYTES
        one, two = (words[start : start + CHUNK_BYTES] for words in (row.words, other.words))
        if one != two:
            return name, _relative(one, two, dtype)
    return "", None


def _relative(one: bytes, two: bytes, dtype: str) -> float | None:
    if dtype == "bfloat16":
        one, two = (b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)) for data in (one, two))
        dtype = "float32"
    if dtype not in _LETTERS:
        return None
    values: Any = (memoryview(data).cast(_LETTERS[dtype]) for data in (one, two))
    pairs = zip(*values, strict=True)
    found = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b and abs(a) + abs(b) < math.inf]
    return max(found, default=None)
