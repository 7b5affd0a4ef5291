"""What the differences between two runs mean.

It says which one is first, and what usually causes it.

Snapshots that both runs took at the same place of the training are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckpt_engine.grouping import grouped
from ckpt_engine.observe.resume_report import Replay
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.store.manifest import RANKS
from ckpt_engine.tools.compare import Comparison, DifferenceKind, LeafDifference
from ckpt_engine.tools.stored_run import Run

OTHERS = 5
"""Further differences of the same step that a verdict names."""
_SEED = "seed everything at the start (random, numpy, torch, own generators) to compare whole runs"
_UNSEEDED = f"nothing seeds this stream, and training has not shown a draw from it so far: all else is equal; {_SEED}"


class Area(StrEnum):
    """What a difference is about, the most telling first: batches come before weights that they change."""

    BATCH = "batch"
    POSITION = "data position"
    STREAM = "random stream"
    RATE = "learning rate"
    WEIGHTS = "tensor"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs first differ.

    Args:
        step: of the first step or snapshot that differs.
        first: what differs, with numbers.
        cause: what usually causes that, and what to do.
        others: further differences of this step.
        hidden: how many more there are.
        streams_only: nothing differs but random streams.
        declared: what the resumed run itself reported as not restored.
    """

    step: int
    area: Area
    first: str
    cause: str
    others: tuple[str, ...]
    hidden: int
    streams_only: bool = False
    declared: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        declared = [f"  the resume report says: {one}" for one in self.declared]
        others = [f"  also: {other}" for other in self.others]
        more = [f"  and {self.hidden:,} more"] if self.hidden else []
        return [f"  first: {self.first}", *declared, f"  likely cause: {self.cause}", *others, *more]


def of_replay(replay: Replay) -> FirstDifference | None:
    """The first difference between steps, which show less of the state than snapshots, and more of its causes."""
    if (first := replay.first) is None:
        return None
    return FirstDifference(first.step, _RECORDED[first.what], str(first), replay.why, (), 0)


def earliest(found: Iterable[FirstDifference | None], *, fresh: bool = False) -> FirstDifference | None:
    """The first one, of the same step the most telling.

    Args:
        fresh: both runs started from nothing: random streams alone say less than what comes after them.
    """
    differing = [one for one in found if one is not None]
    return min(
        differing, key=lambda one: (fresh and one.streams_only, one.step, list(Area).index(one.area)), default=None
    )


def judge_end(whole: int, again: int) -> FirstDifference | None:
    """Whether the resumed run went on as far as the uninterrupted one.

    Args:
        whole, again: the last steps that were saved.
    """
    if whole == again:
        return None
    cause = (
        "the script counts epochs or steps of this start instead of those of the run, or another limit applies to a "
        "resumed run"
    )
    first = f"the uninterrupted run went on to step {whole}, the resumed one to step {again}"
    return FirstDifference(min(whole, again) + 1, Area.VALUE, first, cause, (), 0)


def judge(step: int, differences: Sequence[LeafDifference], *, fresh: bool) -> FirstDifference | None:
    """What the differences of two snapshots of a step mean; None: there is none.

    Args:
        fresh: see `earliest`.
    """
    if not differences:
        return None
    # The most telling first, and one of each random stream: its state before its copies in data positions.
    ranked = sorted(differences, key=lambda one: (list(Area).index(area_of(one)), "rng" not in _parts(one.path)[:2]))
    named = grouped((_stream(one.path) if area_of(one) is Area.STREAM else one.path, one) for one in ranked)
    first, *rest = (found[0] for found in named.values())
    area, streams_only = area_of(first), {area_of(one) for one in ranked} == {Area.STREAM}
    cause = _UNSEEDED if fresh and streams_only else (_FRESH if fresh else _RESUMED)[area]
    others = tuple(map(_text, rest[:OTHERS]))
    return FirstDifference(step, area, _text(first), cause, others, max(len(rest) - OTHERS, 0), streams_only)


def area_of(difference: LeafDifference) -> Area:
    """What a difference is about."""
    parts = _parts(difference.path)
    if "rng" in parts[:2] or (parts[0] == "ckpt_engine" and "rng" in parts):
        return Area.STREAM  # positions have copies of the global streams
    if parts[0] == "ckpt_engine" and len(parts) > 1 and parts[1] in ("loaders", "validation", "feeds"):
        return Area.POSITION
    return Area.WEIGHTS if difference.kind is DifferenceKind.TENSOR else Area.VALUE


def _stream(path: str) -> str:
    """Which random stream a place is about."""
    parts = _parts(path)
    return parts[parts.index("rng") + 1] if "rng" in parts[:-1] else path


def _parts(path: str) -> list[str]:
    """Without the rank whose own it is."""
    return re.sub(f"^{RANKS}/[0-9]+/", "", path).split("/")


def _text(difference: LeafDifference) -> str:
    if area_of(difference) is Area.STREAM:
        return f"the random stream of {_stream(difference.path)} ({difference.path})"
    return str(difference)


def compare(
    a: Sequence[Run], b: Sequence[Run], first: int, last: int, *, fresh: bool
) -> tuple[FirstDifference | None, list[int], int]:
    """Compare snapshots of the same place in steps `first` to `last`, up to a difference.

    Returns the first difference, the steps of the snapshots that were compared, and how many values they have.

    Args:
        fresh: see `earliest`.

    Raises:
        CkptError: a snapshot cannot be read.
    """
    found: list[FirstDifference | None] = []
    steps, values = list[int](), 0
    for one, other in zip(a, b, strict=False):
        ones, others = (_by_place(run, first, last) for run in (one, other))
        for place in [place for place in ones if place in others]:
            comparison = Comparison(ones[place], others[place])
            differences = [one for one in comparison if not one.measured]
            found.append(judge(place[0], differences, fresh=fresh))
            steps.append(place[0])
            values += comparison.compared
            if (newest := found[-1]) is not None and not (fresh and newest.streams_only):
                break  # what follows from a difference is of no interest
    return earliest(found, fresh=fresh), steps, values


def _by_place(run: Run, first: int, last: int) -> Mapping[tuple[int, str, str], Candidate]:
    """The newest snapshot of each step, batch in the epoch and kind of boundary, in the order of training."""
    found = (assemble(one.id, holders) for one, holders in run.holders.items() if first <= one.step <= last)
    return {
        (one.info.step, str(one.manifest.notes.get("batch")), str(one.manifest.notes.get("kind"))): one for one in found
    }


_RECORDED = {"batch": Area.BATCH, "random": Area.STREAM, "learning_rate": Area.RATE, "weights": Area.WEIGHTS}
_FRESH = {
    Area.POSITION: f"the order of samples is drawn from a stream that nothing seeds; {_SEED}",
    Area.STREAM: f"the streams are not seeded, or are drawn from a different number of times; {_SEED}",
    Area.WEIGHTS: "weights are initialised or trained with something that nothing seeds, or that reads the clock; "
    + _SEED,
    Area.VALUE: "the script keeps something that is new in every run (a time, a path, a random name) in its state; "
    + _SEED,
}
"""The usual causes where both runs started from nothing."""
_RESUMED = {
    Area.POSITION: "the order of samples is not put back: a sampler with a generator of its own, a data set that "
    "changes between starts, or a loader that is made in another way after a restart",
    Area.STREAM: "code draws from this stream a different number of times after a restart: something that runs at "
    "every start or once per process (initialisation after resuming, a sanity check, sampling for logs)",
    Area.WEIGHTS: "data and random streams are equal, and still other numbers come out: a random generator or a "
    "counter that the state does not hold (a plain attribute of the model, an own random.Random), code that reads the "
    "clock, or operations that are not deterministic (torch.use_deterministic_algorithms shows those)",
    Area.VALUE: "this value is not put back, or counts something per process: the object that owns it needs a "
    "state_dict, or it has to be computed from the step",
}
