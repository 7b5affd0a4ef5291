"""Which codec for which tensors: a pure choice from measured speeds, the link and the processor time allowed.

Encoding overlaps sending. A snapshot is durable after the longer of the two, so that a codec pays as long as the link
is the slower one: cheap savings are taken first, until the link waits for the processor or the budget is spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_engine.store.codecs.base import Chunk

RAW = "raw"
LEAST_GAIN = 1.03
"""A codec that does not reach this ratio is no better than raw."""
MOST_RESTORE = 1.5
"""Reading back may take at most this many times as long as raw."""
RETRY_SNAPSHOTS = 16
"""A codec that is not in use is measured again after so many snapshots: on one piece, see `due`."""
KEPT = 2

_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "exp_avg", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class Speed:
    """What a codec did to some tensors.

    Args:
        ratio: bytes before divided by bytes after.
        encode_seconds_per_byte: processor time per byte before encoding.
        decode_seconds_per_byte: likewise for reading back.
    """

    ratio: float
    encode_seconds_per_byte: float
    decode_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that codecs treat alike.

    Args:
        nbytes: in one snapshot.
        speeds: by codec name; raw need not be there.
    """

    name: str
    nbytes: int
    speeds: Mapping[str, Speed]


@dataclass(frozen=True, slots=True)
class Limits:
    """What encoding may use.

    Args:
        link_bytes_per_second: what the tier takes, measured.
        cores: that encode at the same time.
        cpu_seconds: processor time that encoding one snapshot may take.
    """

    link_bytes_per_second: float
    cores: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of every class, with what is expected of it.

    Args:
        seconds: until a snapshot is durable; `raw_seconds` without any codec.
        cpu_seconds: of encoding.
        why: all of this in one line.
    """

    codecs: Mapping[str, str]
    seconds: float
    raw_seconds: float
    cpu_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Known:
    """The newest measurements of one codec on one class, oldest first.

    Args:
        snapshot: number of the snapshot at which it was measured last.
    """

    speeds: tuple[Speed, ...]
    snapshot: int

    def speed(self) -> Speed:
        """What to expect: the newest ratio, which is no accident, and the shortest of the newest times.

        Times are lengthened by whatever else runs, never shortened. A codec that became slower or worse is seen as such
        after two snapshots at the latest.
        """
        return Speed(
            self.speeds[-1].ratio,
            min(speed.encode_seconds_per_byte for speed in self.speeds),
            min(speed.decode_seconds_per_byte for speed in self.speeds),
        )


Knowledge = Mapping[tuple[str, str], Known]
"""By class and codec."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Another codec for one class: `seconds` more processor time save `nbytes` more bytes."""

    kind: str
    codec: str
    nbytes: float
    seconds: float

    @property
    def worth(self) -> float:
        """Bytes saved per second spent."""
        return self.nbytes / self.seconds if self.seconds > 0 else float("inf")


def class_of(chunk: Chunk) -> str:
    """The class of a tensor: its role in the optimizer, as its name tells, and its dtype."""
    role = next((moment for moment in _MOMENTS if chunk.name.endswith(moment)), "values")
    return f"{role}/{chunk.dtype}"


def learn(known: Knowledge, measured: Mapping[tuple[str, str], Speed], snapshot: int) -> Knowledge:
    """What is known after snapshot number `snapshot`."""
    news = {
        key: Known((*(known[key].speeds if key in known else ()), speed)[-KEPT:], snapshot)
        for key, speed in measured.items()
    }
    return MappingProxyType({**known, **news})


def due(known: Knowledge, classes: Sequence[str], codecs: Sequence[str], snapshot: int) -> list[tuple[str, str]]:
    """Classes and codecs to be measured on one piece of this snapshot: never tried, or not for `RETRY_SNAPSHOTS`."""
    return [
        (kind, codec)
        for kind in classes
        for codec in codecs
        if codec != RAW and ((kind, codec) not in known or snapshot - known[kind, codec].snapshot >= RETRY_SNAPSHOTS)
    ]


def with_speeds(known: Knowledge, nbytes: Mapping[str, int]) -> list[TensorClass]:
    """Classes of the given sizes with everything that is known of them."""
    return [
        TensorClass(kind, size, {codec: had.speed() for (name, codec), had in known.items() if name == kind})
        for kind, size in nbytes.items()
    ]


def choose(classes: Sequence[TensorClass], limits: Limits) -> Choice:
    """The codecs with which a snapshot is durable soonest.

    Savings are taken in the order of bytes saved per processor second, as long as the snapshot gets durable sooner
    and the processor time allowed is not exceeded.
    """
    codecs = {kind.name: RAW for kind in classes}
    raw_nbytes = float(sum(kind.nbytes for kind in classes))
    nbytes, cpu = raw_nbytes, 0.0
    link, cores = limits.link_bytes_per_second, limits.cores
    while True:
        now = max(nbytes / link, cpu / cores)
        steps = [step for kind in classes for step in _steps(kind, codecs[kind.name], limits)]
        affordable = [step for step in steps if cpu + step.seconds <= limits.cpu_seconds]
        better = [step for step in affordable if max((nbytes - step.nbytes) / link, (cpu + step.seconds) / cores) < now]
        if not better:
            break
        best = max(better, key=lambda step: (step.worth, step.nbytes))
        codecs[best.kind] = best.codec
        nbytes, cpu = nbytes - best.nbytes, cpu + best.seconds
    if len(affordable) < len(steps):
        bound = f"processor budget {limits.cpu_seconds:.3g} s"
    else:
        bound = "the link is faster than more encoding" if steps else "no codec saves more"
    seconds = max(nbytes / link, cpu / cores)
    raw_seconds = raw_nbytes / link
    parts = [f"{kind}: {codec}" for kind, codec in codecs.items()]
    why = (
        f"{', '.join(parts) or 'nothing to store'}; {_megabytes(raw_nbytes)} → {_megabytes(nbytes)}, "
        f"{raw_seconds:.3g} → {seconds:.3g} s at {_megabytes(link)}/s, encoding {cpu:.3g} s; {bound}"
    )
    return Choice(MappingProxyType(codecs), seconds, raw_seconds, cpu, why)


def _steps(kind: TensorClass, codec: str, limits: Limits) -> list[_Step]:
    """The codecs that save more than the one a class has."""
    had = kind.speeds[codec] if codec != RAW else Speed(1, 0, 0)
    return [
        _Step(
            kind.name,
            name,
            kind.nbytes * (1 / had.ratio - 1 / speed.ratio),
            kind.nbytes * (speed.encode_seconds_per_byte - had.encode_seconds_per_byte),
        )
        for name, speed in kind.speeds.items()
        if speed.ratio > had.ratio and speed.ratio >= LEAST_GAIN and _restores_in_time(speed, limits)
    ]


def _restores_in_time(speed: Speed, limits: Limits) -> bool:
    link = 1 / limits.link_bytes_per_second
    return max(link / speed.ratio, speed.decode_seconds_per_byte / limits.cores) <= MOST_RESTORE * link


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB"
