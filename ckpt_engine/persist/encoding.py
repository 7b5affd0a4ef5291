"""How one further tier stores what it gets: by the codec it was given, or by the one that pays (`auto`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from ckpt_engine.errors import CkptError
from ckpt_engine.store.codecs import choose
from ckpt_engine.store.codecs.base import get_codec
from ckpt_engine.store.codecs.choose import RAW, Knowledge, Limits, Speed, class_of
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.recode import Tally
from ckpt_engine.store.recode_encode import DELTA, THREADS, Pick, chunk_of
from ckpt_engine.store.recode_plan import placed
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.transfer import SourceError

AUTO = "auto"
TRIED = ("byteplane-zstd", "zstd")
"""The codecs that `auto` chooses from, beside raw."""
CPU_SHARE = 0.25
"""Of the time between two snapshots the encoding threads may use so much; they have the lowest priority."""
LEAST_BYTES = 1 << 20
"""Smaller transfers say nothing of the rate of the link: it is latency that they take."""
_LINKS = 2


class Encoding:
    """Tells the codec for each snapshot of one tier, one after another, and learns from what it took.

    Args:
        codec: a codec's name, or `auto`.
    """

    def __init__(self, codec: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._codec = codec
        self._clock = clock
        self._known: Knowledge = {}
        self._links: list[float] = []
        self._number = 0
        self._began: float | None = None
        self.why = ""
        """The choice for the snapshot under way, in one line; empty: nothing was chosen."""

    @property
    def is_plain(self) -> bool:
        """Whether everything is copied as it is, always."""
        return self._codec == RAW

    @property
    def needs_bases(self) -> bool:
        """Whether what the tier has is worth keeping near: the next snapshot is made against it."""
        return self._codec == DELTA

    def pick(self, source: Repository, snapshot: str) -> Pick | None:
        """The codecs of the next snapshot; None: it is copied as it is.

        Raises:
            SourceError: the snapshot is missing or damaged at the source, or the source cannot be read.
        """
        if self._codec != AUTO:
            return None if self.is_plain else lambda _: self._codec
        now = self._clock()
        between_seconds = now - self._began if self._began is not None else float("inf")
        self._began = now
        self._number += 1
        if not self._links:
            self.why = "as it is, to measure the link"
            return None
        try:
            manifest = source.read(snapshot)
            sizes: Counter[str] = Counter()
            for name, entry in manifest.entries.items():
                for piece in entry.pieces:
                    sizes[class_of(chunk_of(name, entry, piece))] += piece.raw_nbytes
            due = choose.due(self._known, list(sizes), TRIED, self._number)
            self._learn(_measured(source, manifest, due))
        except CkptError as err:
            raise SourceError(err) from err
        # Whatever else runs makes a link look slower, never faster.
        limits = Limits(max(self._links), THREADS, CPU_SHARE * THREADS * between_seconds)
        choice = choose.choose(choose.with_speeds(self._known, sizes), limits)
        self.why = choice.why
        codecs = dict(choice.codecs)
        return codecs.__getitem__ if set(codecs.values()) - {RAW} else None

    def done(self, tally: Tally) -> None:
        """Note what copying the snapshot has taken."""
        if tally.put_bytes >= LEAST_BYTES and tally.put_seconds > 0:
            self._links = [*self._links, tally.put_bytes / tally.put_seconds][-_LINKS:]
        if self._codec == AUTO:
            decode = {key: known.speed().decode_seconds_per_byte for key, known in self._known.items()}
            self._learn(tally.speeds(decode))
        elif not self.is_plain:
            before, after = sum(tally.raw_bytes.values()), sum(tally.stored_bytes.values())
            used = ", ".join(f"{codec} {nbytes / 1e6:.3g} MB" for codec, nbytes in tally.codecs.most_common())
            more = f" ({used})" if self.needs_bases and used else ""
            self.why = f"{self._codec}: {before / 1e6:.3g} MB → {after / 1e6:.3g} MB{more}"

    def _learn(self, measured: dict[tuple[str, str], Speed]) -> None:
        self._known = choose.learn(self._known, measured, self._number)


def _measured(source: Repository, manifest: Manifest, due: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Speed]:
    """What codecs do to the largest piece of their class, encoded and decoded once."""
    found = {}
    decoder = decoder_of(source.storage, manifest)
    for kind, name in due:
        _, entry_name, start, piece = max(
            (piece.raw_nbytes, entry_name, start, piece)
            for entry_name, entry in manifest.entries.items()
            for start, piece in placed(entry.pieces)
            if class_of(chunk_of(entry_name, entry, piece)) == kind
        )
        data = memoryview(bytearray(piece.raw_nbytes))
        decoder.read(entry_name, start, piece, data)
        codec, chunk = get_codec(name), chunk_of(entry_name, manifest.entries[entry_name], piece)
        began = time.thread_time()
        stored = codec.encode(data, chunk, None)
        encoded = time.thread_time()
        if stored is None:
            found[kind, name] = Speed(1.0, (encoded - began) / data.nbytes, 0.0)
            continue
        wanted, ratio = digest(data), data.nbytes / memoryview(stored).nbytes
        again = time.thread_time()
        codec.decode(memoryview(stored), data, None)
        decoded = time.thread_time()
        if digest(data) != wanted:
            ratio = 0.0  # it is not to be trusted here
        found[kind, name] = Speed(ratio, (encoded - began) / data.nbytes, (decoded - again) / data.nbytes)
    return found
