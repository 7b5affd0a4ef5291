"""Stores a snapshot encoded, from another place or from the arena, by the codec that was given or by the one that pays.

Piece by piece, verified before it is encoded, in parts of bounded size: while one part is sent the next one is encoded.
A part's name follows from what it holds, so that an interrupted copy finds what it has sent, and a part that another
snapshot needs is never written over. What an older snapshot has there is referred to.

Writes one staged snapshot from the arena into one repository, encoded: data files of encoded pieces, manifest.

How one further tier stores what it gets: by the codec it was given, or by the one that pays (`auto`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ckpt_engine.copy.encode_pieces import DELTA, THREADS, EncodedPiece, Encoder, Files, Pick, chunk_of
from ckpt_engine.copy.encoding_plan import ROWS, Bases, placed, plan
from ckpt_engine.copy.transfer import Copied, CopySourceError, has_file, settle_data
from ckpt_engine.copy.write_snapshot import Staged
from ckpt_engine.errors import CkptError, StorageMissingError, WriterError
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.codecs import codec
from ckpt_engine.store.codecs.codec import RAW as RAW_CODEC
from ckpt_engine.store.codecs.codec import EncodingLimits, Knowledge, Speed, class_of, get_codec
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import Decoder, decoder_of
from ckpt_engine.store.manifest import RAW, Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.watchdog import CallProgress


@dataclass(slots=True)
class Tally:
    """What encoding and sending have taken, to choose codecs by.

    Args:
        raw_bytes, stored_bytes, seconds: by class and by the codec that was tried.
        codecs: stored bytes by the codec that was used.
    """

    raw_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    stored_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    codecs: Counter[str] = field(default_factory=Counter)
    put_bytes: int = 0
    put_seconds: float = 0.0

    def add(self, done: EncodedPiece) -> None:
        """Note an encoded piece."""
        key = done.kind, done.tried
        self.raw_bytes[key] += done.work.piece.raw_nbytes
        self.stored_bytes[key] += len(done.stored)
        self.seconds[key] = self.seconds.get(key, 0.0) + done.seconds
        self.codecs[done.codec] += len(done.stored)

    def speeds(self, decode_seconds_per_byte: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], Speed]:
        """What every codec did to the tensors of a class."""
        return {
            key: Speed(
                nbytes / max(1, self.stored_bytes[key]),
                self.seconds[key] / nbytes,
                decode_seconds_per_byte.get(key, 0.0),
            )
            for key, nbytes in self.raw_bytes.items()
            if key[1] != RAW
        }


def copy_encoded(
    source: Repository,
    target: Repository,
    snapshot: str,
    pick: Pick,
    tally: Tally,
    *,
    sink: Storage | None = None,
    committing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Copied:
    """Copy one snapshot, encoded; every piece is compared with its digest first. Needs the target's lease.

    Args:
        pick: the codec of each class of tensors; a piece that it does not pay for is stored as it is.
        tally: is told what it took.
        sink: what the objects are put into instead of `target.storage`: the same place at another pace.
        committing: held while the manifest is written: nobody may forget snapshots at the target meanwhile.

    Raises:
        SourceError: the snapshot is missing or damaged at the source, or the source cannot be read.
        StorageError: from the target.
    """
    put = sink or target.storage
    try:
        manifest = source.read(snapshot)
    except CkptError as err:
        raise CopySourceError(err) from err
    planned = plan(manifest, target, differences=_takes_differences(manifest, pick))
    decoder = decoder_of(source.storage, manifest)
    files = Files(manifest, planned)
    encoder = Encoder(manifest, decoder, Bases(manifest, source, planned.before, target), pick)
    copied = _put_parts(files, encoder, target, put, tally)
    stored, old = files.manifest(), files.old_files()
    with committing():
        if planned.before is not None and old and not target.still_has(planned.before.info.id, old):
            raise StorageMissingError(
                f"{target.storage.url}: what a copy was to refer to in {planned.before.info.id} was removed meanwhile",
                hint="the copy is made again",
            )
        target.commit_copy(stored, manifest_codec.encode(stored), put)
    return copied


def _put_parts(files: Files, encoder: Encoder, target: Repository, put: Storage, tally: Tally) -> Copied:
    """Put all data files of a plan; while one is sent the next one is encoded.

    Raises:
        SourceError: what is copied cannot be read.
        StorageError: from the target.
    """
    sent = present = 0
    with encoder.pool:
        try:
            for part in encoder.ahead(files.plan.parts):
                # Changed rows apart, which stay needed for longer than other differences.
                rows = [one for one in part if one.codec == ROWS]
                others = [one for one in part if one.codec != ROWS]
                part.clear()  # else a third part would be in memory
                for done in filter(None, (rows, others)):
                    file, header = files.add(done)
                    for one in done:
                        tally.add(one)
                    if has_file(target.storage, file):
                        present += file.nbytes
                    else:
                        began = time.monotonic()
                        put.put(file.name, [memoryview(header), *(memoryview(one.stored) for one in done)])
                        tally.put_seconds += time.monotonic() - began
                        tally.put_bytes += file.nbytes
                        sent += file.nbytes
                    done.clear()
        finally:
            encoder.pool.shutdown(cancel_futures=True)
    if present:
        settle_data(target.storage)
    return Copied(sent, present)


def _takes_differences(manifest: Manifest, pick: Pick) -> bool:
    kinds = {
        class_of(chunk_of(name, entry, piece)) for name, entry in manifest.entries.items() for piece in entry.pieces
    }
    return any(pick(kind) == DELTA for kind in kinds)


class Encoded:
    """A staged snapshot as data files of encoded pieces. See `write_snapshot.Contents`.

    Each piece is compared with its digest when it is encoded. At most two parts of the image
    (`encoding_plan.PART_BYTES`) are in memory beside it.

    Args:
        codec: a codec's name, or `DELTA`.

    Raises:
        WriterError: the image cannot be read.
        StorageError: from the repository.
    """

    def __init__(self, staged: Staged, repository: Repository, codec: str) -> None:
        self.staged = staged
        self.repository = repository
        self.write_seconds = 0.0
        digests, self.cpu_seconds = staged.timed_digest()
        self._codec = codec
        self._manifest = staged.manifest(repository.run_id, staged.whole(digests))
        self._files = Files(self._manifest, plan(self._manifest, repository, codec == DELTA))
        most_bytes = self._files.plan.most_bytes(manifest_codec.encode(self._manifest))
        self.new_bytes = max(staged.data.nbytes, most_bytes)

    @property
    def new(self) -> list[str]:
        return [file.name for file in self._files.new]

    def manifest(self) -> Manifest:
        """That of the image as it is, of which `new_bytes` counts what encoding adds."""
        return self._manifest

    def put(self, image: memoryview, progress: CallProgress) -> Manifest:
        manifest, planned, tally, began = self._manifest, self._files.plan, Tally(), time.monotonic()

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            progress.check()
            progress.moved()  # encoding is no storage call, and may take its time
            with image[piece.offset : piece.offset + piece.nbytes] as part:
                out[:] = part
            if digest(out) != piece.digest:
                raise WriterError(f"{entry!r} has changed in its arena slot while it was encoded; it is not written")

        bases = Bases(manifest, None, planned.before, self.repository)
        encoder = Encoder(manifest, Decoder(manifest, fetch), bases, lambda _: self._codec)
        try:
            done = _put_parts(self._files, encoder, self.repository, self.repository.storage, tally)
        except CopySourceError as err:
            raise err.error from err
        self.new_bytes = done.sent_bytes + done.present_bytes
        self.write_seconds = time.monotonic() - began
        self.cpu_seconds += sum(tally.seconds.values())
        return self._files.manifest()

    def stands(self) -> bool:
        before, old = self._files.plan.before, self._files.old_files()
        refers = bool(old) or not self._files.new  # until it is stored it may yet refer to anything there
        return before is None or not refers or self.repository.still_has(before.info.id, old)


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
        return self._codec == RAW_CODEC

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
            due = codec.due(self._known, list(sizes), TRIED, self._number)
            self._learn(_measured(source, manifest, due))
        except CkptError as err:
            raise CopySourceError(err) from err
        # Whatever else runs makes a link look slower, never faster.
        limits = EncodingLimits(max(self._links), THREADS, CPU_SHARE * THREADS * between_seconds)
        choice = codec.choose(codec.with_speeds(self._known, sizes), limits)
        self.why = choice.why
        codecs = dict(choice.codecs)
        return codecs.__getitem__ if set(codecs.values()) - {RAW_CODEC} else None

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
        self._known = codec.learn(self._known, measured, self._number)


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
