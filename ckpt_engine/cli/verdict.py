"""What differences between two runs mean: which one is first, and what usually causes it. Pure functions of values.

Snapshots that both runs took at the same place of the training make a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ckpt_engine.audit.audit import remedy
from ckpt_engine.cli.compare import Comparison, DifferenceKind, LeafDifference
from ckpt_engine.cli.rehearsal_runs import Attributes, Trace
from ckpt_engine.cli.root import open_run
from ckpt_engine.observe.resume_report import NotRestored
from ckpt_engine.restore.choose import Candidate, assemble

OTHERS = 5
"""Further differences of the same step that a verdict names."""


_HIDDEN = "hidden state "
_STREAMS = (
    "random.Random",
    "torch._C.Generator",
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
)


class Area(StrEnum):
    """What a difference is about, the most telling first: batches come before weights that they change."""

    BATCH = "batch"
    POSITION = "data position"
    STREAM = "random stream"
    WEIGHTS = "tensor"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Moved:
    """Hidden state that the resumed run does not have as the uninterrupted one does.

    Args:
        path: the attribute as users reach it, or `function().variable`.
        type: its class.
        remedy: the line of code that makes it exact.
    """

    path: str
    type: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} (its type is {self.type}); {self.remedy}"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs first differ.

    Args:
        step: of the first pair that differs.
        first: what differs, with numbers.
        cause: what usually causes that, and what to do.
        others: further differences of this step.
        hidden: how many more there are.
        streams_only: nothing differs but random streams.
        moved: the hidden state that explains it, the most telling first.
        declared: what the resumed run itself reported as not restored.
    """

    step: int
    area: Area
    first: str
    cause: str
    others: tuple[str, ...]
    hidden: int
    streams_only: bool = False
    moved: tuple[Moved, ...] = ()
    declared: tuple[str, ...] = ()


def area_of(path: str) -> Area:
    """What a place in the state is about."""
    parts = path.split("/")
    if "rng" in parts[:2] or (parts[0] == "ckpt_engine" and "rng" in parts):
        return Area.STREAM  # positions have copies of the global streams
    if parts[0] == "ckpt_engine" and len(parts) > 1 and parts[1] in ("loaders", "validation", "feeds"):
        return Area.POSITION
    return Area.WEIGHTS


def judge(pairs: Sequence[Pair], *, fresh: bool) -> FirstDifference | None:
    """The first divergence, or None if all pairs are equal.

    Args:
        fresh: both runs started from nothing; otherwise the second was resumed. Random streams alone say less there
            than what comes after them.
    """
    found = [_divergence(pair, fresh=fresh) for pair in pairs if pair.differences or pair.batch is not None]
    if fresh:
        found.sort(key=lambda one: one.streams_only)
    return found[0] if found else None


def explain(
    divergence: FirstDifference, whole: Trace, killed: Trace, again: Trace, missing: Sequence[NotRestored]
) -> FirstDifference:
    """The same divergence with the hidden state that explains it.

    What differs between two starts of which neither was resumed (a time, a path) explains nothing.

    Args:
        whole, killed, again: the traces of the three runs.
        missing: what the resumed run reported as not restored.
    """
    one, other = whole.attributes.get(divergence.step, {}), again.attributes.get(divergence.step, {})
    varies = {
        path
        for step, attributes in killed.attributes.items()
        for path in _differing(whole.attributes.get(step, {}), attributes)
    }
    reported = {row.name.removeprefix(_HIDDEN) for row in missing}
    paths = sorted(_differing(one, other) - varies - reported, key=lambda path: (_rank(one[path][0]), path))
    by_hand = all("()." in path for path in one)
    moved = tuple(Moved(path, one[path][0], _remedy(path, one[path][0], by_hand=by_hand)) for path in paths[:OTHERS])
    declared = tuple(f"{row.name}: {row.why}" for row in missing)
    return replace(divergence, moved=moved, declared=declared)


def _differing(one: Attributes, other: Attributes) -> set[str]:
    return {path for path in one.keys() & other.keys() if one[path] != other[path]}


def _rank(kind: str) -> int:
    """Streams and counts are causes more often than what is computed with them."""
    if kind in _STREAMS:
        return 0
    return 1 if kind in ("bool", "int", "float", "str") else 2


def _remedy(path: str, kind: str, *, by_hand: bool) -> str:
    _, local, variable = path.partition("().")
    if not local:
        return remedy(path, kind)
    if by_hand:
        return (
            f"to make it exact: save({{…, {variable!r}: {variable}}}, step=step), "
            f"and {variable} = state[{variable!r}] after load()"
        )
    if "." in variable:
        return remedy(variable, kind)
    return f"to make it exact: carry = Carry({variable}={variable}), track(…, carry=carry), and use carry.{variable}"


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


def _divergence(pair: Pair, *, fresh: bool) -> FirstDifference:
    ranked = _ranked(pair.differences)
    if pair.batch is not None:
        loader, number = pair.batch
        area, first, rest = Area.BATCH, f"batch {number} of training loader {loader} has other content", ranked
    else:
        area, first, rest = _area(ranked[0]), _told(ranked[0]), ranked[1:]
    areas = {area, *map(_area, ranked)}
    return FirstDifference(
        pair.step,
        area,
        first,
        _cause_fresh(area, areas) if fresh else _cause_resumed(area, areas),
        tuple(map(_told, rest[:OTHERS])),
        max(len(rest) - OTHERS, 0),
        areas == {Area.STREAM},
    )


def _ranked(differences: Sequence[LeafDifference]) -> list[LeafDifference]:
    """The most telling first, and one of each random stream: its state before its copies in data positions."""
    ranked = sorted(differences, key=lambda one: (list(Area).index(_area(one)), "rng" not in one.path.split("/")[:2]))
    told: set[str] = set()
    kept = []
    for one in ranked:
        name = _stream(one.path) if _area(one) is Area.STREAM else one.path
        if name not in told:
            told.add(name)
            kept.append(one)
    return kept


def _stream(path: str) -> str:
    """Which random stream a place is about."""
    parts = path.split("/")
    return parts[parts.index("rng") + 1] if "rng" in parts[:-1] else path


def _area(difference: LeafDifference) -> Area:
    area = area_of(difference.path)
    return Area.VALUE if area is Area.WEIGHTS and difference.kind is not DifferenceKind.TENSOR else area


def _told(difference: LeafDifference) -> str:
    if area_of(difference.path) is Area.STREAM:
        return f"the random stream of {_stream(difference.path)} ({difference.path})"
    return str(difference)


def _cause_fresh(area: Area, areas: set[Area]) -> str:
    if areas == {Area.STREAM}:
        return (
            "nothing seeds this stream, and training has not shown a draw from it so far: all else is equal; seed "
            "everything at the start (random, numpy, torch) to compare whole runs"
        )
    what = {
        Area.BATCH: "the data or its augmentation is drawn from streams that nothing seeds, or reads the clock",
        Area.POSITION: "the order of samples is drawn from a stream that nothing seeds",
        Area.STREAM: "the streams are not seeded, or are drawn from a different number of times",
        Area.WEIGHTS: "weights are initialised or trained with something that nothing seeds, or that reads the clock",
        Area.VALUE: "the script keeps something that is new in every run (a time, a path, a random name) in its state",
    }[area]
    return f"{what}; seed everything at the start (random, numpy, torch, own generators) to compare whole runs"


def _cause_resumed(area: Area, areas: set[Area]) -> str:
    if area is Area.BATCH and Area.POSITION not in areas:
        return (
            "the same samples come with other content: augmentation draws from a generator of its own "
            "(np.random.default_rng(), random.Random()), workers seed themselves from the clock or the process id, or "
            "it depends on the time; draw from the global streams (random, numpy, torch), which workers get back too"
        )
    if area in (Area.BATCH, Area.POSITION):
        return (
            "the order of samples is not put back: a sampler with a generator of its own, a data set that changes "
            "between starts, or a loader that is made in another way after a restart"
        )
    if area is Area.STREAM:
        return (
            "code draws from this stream a different number of times after a restart: something that runs at every "
            "start or once per process (initialisation after resuming, a sanity check, sampling for logs)"
        )
    if area is Area.WEIGHTS:
        return (
            "data and random streams are equal, and still other numbers come out: a random generator or a counter "
            "that the state does not hold (a plain attribute of the model, an own random.Random), code that reads the "
            "clock, or operations that are not deterministic (torch.use_deterministic_algorithms shows those)"
        )
    return (
        "this value is not put back, or counts something per process: the object that owns it needs a state_dict, "
        "or it has to be computed from the step"
    )


Place = tuple[int, str, str]
"""Step, batch in the epoch, and kind of the boundary."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two snapshots of the same place.

    Args:
        differences: without those that two correct runs may have.
        values: how many were compared.
        batch: the first batch on the way to this step whose content differs: loader, number in the epoch.
    """

    step: int
    differences: tuple[LeafDifference, ...]
    values: int
    batch: tuple[int, int] | None


def compare(a: Path, b: Path, traces: tuple[Trace, Trace], first: int, last: int) -> Iterator[Pair]:
    """Pairs of steps `first` to `last` in the order of training, compared one by one.

    Args:
        a, b: run folders.
        traces: of the same runs.

    Raises:
        CkptError: a snapshot cannot be read.
    """
    ones, others = _by_place(a, first, last), _by_place(b, first, last)
    for place in [place for place in ones if place in others]:
        comparison = Comparison(ones[place], others[place])
        found = [one for one in comparison if not one.measured]
        yield Pair(place[0], tuple(found), comparison.compared, _batch(traces, place[0]))


def without_counterpart(a: Path, b: Path, first: int, last: int) -> int:
    """How many snapshots of `a` in these steps have none of the same place in `b`."""
    ones, others = _by_place(a, first, last), _by_place(b, first, last)
    return sum(place not in others for place in ones)


def _by_place(folder: Path, first: int, last: int) -> Mapping[Place, Candidate]:
    """The newest snapshot of each place, in the order of training."""
    found: dict[Place, Candidate] = {}
    for parsed, holders in open_run(str(folder)).holders.items():
        if first <= parsed.step <= last:
            candidate = assemble(parsed.id, holders)
            notes = candidate.manifest.notes
            found[parsed.step, str(notes.get("batch")), str(notes.get("kind"))] = candidate
    return found


def _batch(traces: tuple[Trace, Trace], step: int) -> tuple[int, int] | None:
    one, other = (trace.batches.get(step, {}) for trace in traces)
    return next((key for key in sorted(one) if key in other and one[key] != other[key]), None)
