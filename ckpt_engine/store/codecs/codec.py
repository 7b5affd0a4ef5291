"""The seam of codecs: what a codec knows and promises, which there are by name, and which one pays for which tensors.

Encoding overlaps sending. A snapshot is durable after the longer of the two, so that a codec pays as long as the link
is the slower one: `auto` takes cheap savings first, until the link waits for the processor or the budget is spent.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, cast

from ckpt_engine.errors import ConfigError, CorruptError, NewerFormatError
from ckpt_engine.observe.units import duration, size
from ckpt_engine.plugins import CODECS, plugin

if TYPE_CHECKING:
    from ckpt_engine.store.codecs.adam import AdamCodec


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a codec may know about the bytes it encodes.

    Args:
        dtype: torch dtype name without `torch.`, e.g. "bfloat16".
        shape: shape of the rows in this chunk; the first dimension counts rows.
        name: entry name, for telling classes of tensors apart; never needed for decoding.
    """

    dtype: str
    shape: tuple[int, ...]
    name: str = ""


class Codec(Protocol):
    """Encodes bytes without loss; what it stores describes itself, so that decoding needs nothing but the base.

    One object serves all threads at once. Buffers are contiguous bytes. Stored bytes are not digested again here: a
    damaged byte in a part that is stored as it is decodes to other bytes, which the digest of the piece tells.
    """

    @property
    def name(self) -> str:
        """What `Piece.codec` says; stable forever."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether `encode` and `decode` need the bytes of an older snapshot, as many as they have to do with."""
        ...

    def encode(self, data: memoryview, chunk: Chunk, base: memoryview | None) -> bytes | memoryview | None:
        """The bytes to store, or None where encoding does not pay: then the piece is to be stored raw."""
        ...

    def decode(self, stored: memoryview, out: memoryview, base: memoryview | None) -> None:
        """Fill `out`, which has exactly the decoded size.

        Raises:
            CorruptError: `stored` is not what `encode` returned for this many bytes and this base.
            NewerFormatError: a later version of this codec wrote it.
        """
        ...


_CODECS = {
    "raw": ("simple", "RawCodec"),
    "zstd": ("simple", "ZstdCodec"),
    "byteplane-zstd": ("numbers", "BytePlaneCodec"),
    "delta-byteplane-zstd": ("numbers", "DeltaCodec"),
    "rows": ("numbers", "RowsCodec"),
}
"""Name → module and class. Modules are imported when asked for: most readers need none of them."""

_known: dict[str, Codec] = {}


def get_codec(name: str) -> Codec:
    """The codec that `Piece.codec` names, also one that an installed package registers in `ckpt_engine.codecs`.

    Raises:
        NewerFormatError: neither this version nor a package has a codec of that name, or the package is not as it
            should be.
    """
    codec = _known.get(name)
    if codec is None:
        codec = _known.setdefault(name, _of_ours(name) if name in _CODECS else _of_a_package(name))
    return codec


def _of_ours(name: str) -> Codec:
    module, attribute = _CODECS[name]
    made = getattr(importlib.import_module(f"ckpt_engine.store.codecs.{module}"), attribute)
    return cast(Codec, made())


def _of_a_package(name: str) -> Codec:
    hint = "install the package that has this codec, or the version of ckpt-engine that wrote it"
    try:
        made = plugin(CODECS, name)
        codec = made and made()
    except Exception as err:  # whatever the class of a package raises
        text, hint = (err.message, err.hint or hint) if isinstance(err, ConfigError) else (repr(err), hint)
        raise NewerFormatError(f"a piece is encoded with {name!r:.80}: {text}", hint=hint) from err
    if codec is None or codec.name != name:
        raise NewerFormatError(
            f"a piece is encoded with {name!r:.80}; this version knows {', '.join(_CODECS)}", hint=hint
        )
    return cast(Codec, codec)


def get_group_codec(name: str) -> AdamCodec:
    """The codec that `Piece.codec` names where the piece has a `Piece.group`.

    Raises:
        NewerFormatError: this version has no codec of that name.
    """
    if name != "adam":
        raise NewerFormatError(
            f"pieces are encoded together with {name!r:.80}; this version knows adam",
            hint="read it with the version of ckpt-engine that wrote it, or a later one",
        )
    from ckpt_engine.store.codecs.adam import AdamCodec  # most readers need it not

    return AdamCodec()


def damaged(codec: str, what: str) -> CorruptError:
    """The error of stored bytes that `codec` cannot have written."""
    return CorruptError(f"a piece encoded with {codec!r} is damaged: {what}")


Stored = bytes | memoryview

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
class EncodingLimits:
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
class CodecMeasurements:
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


Knowledge = Mapping[tuple[str, str], CodecMeasurements]
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


def class_of(name: str, dtype: str) -> str:
    """The class of a tensor: its role in the optimizer, as its name tells, and its dtype."""
    role = next((moment for moment in _MOMENTS if name.endswith(moment)), "values")
    return f"{role}/{dtype}"


def learn(known: Knowledge, measured: Mapping[tuple[str, str], Speed], snapshot: int) -> Knowledge:
    """What is known after snapshot number `snapshot`."""
    news = {
        key: CodecMeasurements((*(known[key].speeds if key in known else ()), speed)[-KEPT:], snapshot)
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


def choose(known: Knowledge, sizes: Mapping[str, int], limits: EncodingLimits) -> tuple[dict[str, str], str]:
    """The codec of every class with which a snapshot is durable soonest, and why, with what is expected, in one line.

    Savings are taken in the order of bytes saved per processor second, as long as the snapshot gets durable sooner
    and the processor time allowed is not exceeded.

    Args:
        sizes: bytes of each class in one snapshot.
    """
    speeds = {key: had.speed() for key, had in known.items()}
    codecs = dict.fromkeys(sizes, RAW)
    raw_nbytes = float(sum(sizes.values()))
    nbytes, cpu = raw_nbytes, 0.0
    link, cores = limits.link_bytes_per_second, limits.cores
    while True:
        now = max(nbytes / link, cpu / cores)
        steps = [step for kind, has in sizes.items() for step in _steps(kind, has, codecs[kind], speeds, limits)]
        affordable = [step for step in steps if cpu + step.seconds <= limits.cpu_seconds]
        better = [step for step in affordable if max((nbytes - step.nbytes) / link, (cpu + step.seconds) / cores) < now]
        if not better:
            break
        best = max(better, key=lambda step: (step.worth, step.nbytes))
        codecs[best.kind] = best.codec
        nbytes, cpu = nbytes - best.nbytes, cpu + best.seconds
    if len(affordable) < len(steps):
        bound = f"processor budget {duration(limits.cpu_seconds)}"
    else:
        bound = "the link is faster than more encoding" if steps else "no codec saves more"
    parts = [f"{kind}: {codec}" for kind, codec in codecs.items()]
    times = f"{duration(raw_nbytes / link)} → {duration(max(nbytes / link, cpu / cores))} at {size(link)}/s"
    why = (
        f"{', '.join(parts) or 'nothing to store'}; {size(raw_nbytes)} → {size(nbytes)}, "
        f"{times}, encoding {duration(cpu)}; {bound}"
    )
    return codecs, why


def _steps(
    kind: str, nbytes: int, codec: str, speeds: Mapping[tuple[str, str], Speed], limits: EncodingLimits
) -> list[_Step]:
    """The codecs that save more than the one a class has."""
    had = speeds[kind, codec] if codec != RAW else Speed(1, 0, 0)
    return [
        _Step(
            kind,
            name,
            nbytes * (1 / had.ratio - 1 / speed.ratio),
            nbytes * (speed.encode_seconds_per_byte - had.encode_seconds_per_byte),
        )
        for (of, name), speed in speeds.items()
        if of == kind and speed.ratio > had.ratio and speed.ratio >= LEAST_GAIN and _restores_in_time(speed, limits)
    ]


def _restores_in_time(speed: Speed, limits: EncodingLimits) -> bool:
    link = 1 / limits.link_bytes_per_second
    return max(link / speed.ratio, speed.decode_seconds_per_byte / limits.cores) <= MOST_RESTORE * link
