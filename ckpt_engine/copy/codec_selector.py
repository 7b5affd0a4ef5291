"""Selects the codec of each snapshot of one tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ckpt_engine.copy.encode_pieces import DELTA, EncodedPiece, Pick
from ckpt_engine.observe.units import size
from ckpt_engine.store.codecs.codec import codec_on_slow_link
from ckpt_engine.store.manifest import RAW

AUTO = "auto"
LINK_BYTES_PER_SECOND = 200e6
"""`auto` encodes what a slower link takes: a quarter of a core encodes 0.19 to 0.27 GB/s of trained states.

The source is docs/benchmarks.md: the rows "codecs" have 0.761 GB/s per core for bf16 weights and 1.08 for fp32 states.
"""
LEAST_BYTES = 1 << 20
"""Smaller transfers say nothing of the rate of the link: it is latency that they take."""
_LINKS = 2


@dataclass(slots=True)
class EncodeStats:
    """What encoding has saved, and what sending has taken.

    Args:
        raw_bytes: before encoding.
        codecs: stored bytes by the codec that was used.
    """

    raw_bytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    put_bytes: int = 0
    put_seconds: float = 0.0

    def add(self, done: EncodedPiece) -> None:
        """Note an encoded piece."""
        self.raw_bytes += done.work.piece.raw_nbytes
        self.codecs[done.codec] += len(done.stored)


@dataclass(eq=False)
class CodecSelector:
    """Selects the codec of each snapshot of one tier, one after another.

    Args:
        codec: a codec's name, or `auto`: as it is at first, to measure the link, and encoded while the link is slow.
    """

    _codec: str
    _links: list[float] = field(default_factory=list, init=False)
    why: str = field(default="", init=False)
    """How the snapshot under way is stored, in one line; empty: as it is, always."""

    @property
    def is_plain(self) -> bool:
        """Whether everything is copied as it is, always."""
        return self._codec == RAW

    @property
    def needs_bases(self) -> bool:
        """Whether what the tier has is worth keeping near: the next snapshot is made against it."""
        return self._codec == DELTA

    def pick(self) -> Pick | None:
        """The codecs of the next snapshot; None: it is copied as it is."""
        if self._codec != AUTO:
            return None if self.is_plain else lambda _: self._codec
        if not self._links:
            self.why = "as it is, to measure the link"
            return None
        link = max(self._links)  # whatever else runs makes a link look slower, never faster
        if link >= LINK_BYTES_PER_SECOND:
            self.why = f"as it is: the link takes {size(link)}/s, encoding is slower"
            return None
        self.why = f"auto: the link takes {size(link)}/s, encoding is faster"
        return codec_on_slow_link

    def done(self, tally: EncodeStats) -> None:
        """Note what copying the snapshot has taken."""
        if tally.put_bytes >= LEAST_BYTES and tally.put_seconds > 0:
            self._links = [*self._links, tally.put_bytes / tally.put_seconds][-_LINKS:]
        if self.is_plain or (self._codec == AUTO and not tally.raw_bytes):
            return
        saved = f"{size(tally.raw_bytes)} → {size(tally.codecs.total())}"
        used = ", ".join(f"{codec} {size(nbytes)}" for codec, nbytes in tally.codecs.most_common())
        if self._codec == AUTO:
            self.why = f"{self.why}; {saved} ({used})"
        else:
            self.why = f"{self._codec}: {saved}" + (f" ({used})" if self.needs_bases and used else "")
