"""The record of a run: what every step did, exactly, one JSON line each. `recorder` writes it, this reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Start:
    """A process began to train; `step` optimizer steps were already done (0: from scratch)."""

    time: float
    pid: int
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, counted from 1. Floats are written in hexadecimal: equal text is equal bits."""

    time: float
    pid: int
    step: int
    epoch: int
    batch: int
    loss: str
    lr: str
    samples: tuple[tuple[int, int], ...]

    @property
    def loss_value(self) -> float:
        return float.fromhex(self.loss)

    def exact(self) -> dict[str, object]:
        """Everything that must be the same whenever this step is trained."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.samples,
            "loss": self.loss,
            "learning rate": self.lr,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """One validation, after `step` optimizer steps."""

    time: float
    pid: int
    step: int
    loss: str

    @property
    def loss_value(self) -> float:
        return float.fromhex(self.loss)


Entry = Start | Step | Validation
_KINDS: Mapping[str, type[Start] | type[Step] | type[Validation]] = {
    kind.__name__.lower(): kind for kind in (Start, Step, Validation)
}


def read_record(path: Path, offset: int = 0) -> tuple[list[Entry], int]:
    """The complete entries of a record file from a byte offset on, and the offset behind them."""
    entries: list[Entry] = []
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            if (entry := _parse(line)) is not None:
                entries.append(entry)
    return entries, offset


def _parse(line: bytes) -> Entry | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None  # blank, or torn by a kill and closed off by the next process
    kind = _KINDS[values.pop("kind")]
    if kind is Step:
        values["samples"] = tuple((int(index), int(start)) for index, start in values["samples"])
    return kind(**values)


def steps_of(entries: list[Entry]) -> Iterator[Step]:
    """Only the training steps, in the order in which they were trained."""
    return (entry for entry in entries if isinstance(entry, Step))
