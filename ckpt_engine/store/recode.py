"""Copies a snapshot to a place where it is stored encoded: the same snapshot, in data files of that place's own.

Piece by piece, verified before it is encoded, in parts of bounded size: while one part is sent the next one is encoded.
A part's name follows from what it holds, so that an interrupted copy finds what it has sent, and a part that another
snapshot needs is never written over. What an older snapshot has there is referred to.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ckpt_engine.errors import CkptError, StorageExistsError
from ckpt_engine.store import layout, manifest_codec
from ckpt_engine.store.codecs.choose import Speed, class_of
from ckpt_engine.store.decode import Decoder, decoder_of
from ckpt_engine.store.manifest import RAW, Manifest
from ckpt_engine.store.recode_bases import Bases
from ckpt_engine.store.recode_encode import DELTA, Encoder, Pick, chunk_of
from ckpt_engine.store.recode_files import Done, Files
from ckpt_engine.store.recode_plan import ROWS, plan, require_old
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.transfer import Copied, SourceError, has_file, settle_data


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

    def add(self, done: Done) -> None:
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
        raise SourceError(err) from err

    def commit(stored: Manifest) -> None:
        text = manifest_codec.encode(stored)
        try:
            put.put(layout.manifest_name(snapshot), [memoryview(text)])
        except StorageExistsError:
            if target.storage.get(layout.manifest_name(snapshot)) != text:
                raise
        target.remember(stored)

    return store_encoded(
        manifest, decoder_of(source.storage, manifest), source, target, pick, tally, put, commit, committing
    )


def store_encoded(
    manifest: Manifest,
    decoder: Decoder,
    source: Repository | None,
    target: Repository,
    pick: Pick,
    tally: Tally,
    put: Storage,
    commit: Callable[[Manifest], object],
    committing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Copied:
    """Store a snapshot encoded, wherever its bytes come from. Needs the target's lease.

    Args:
        manifest: of the snapshot as `decoder` reads it.
        source: a place of the same run that may have older snapshots; None: there is none.
        put: what data files are put into.
        commit: makes the snapshot exist, given its manifest.

    Raises:
        SourceError: `decoder` cannot read it.
        StorageError: from the target.
    """
    planned = plan(manifest, target, differences=_takes_differences(manifest, pick))
    encoder = Encoder(manifest, decoder, Bases(manifest, source, planned.before, target), pick)
    files = Files(manifest, planned)
    sent = present = 0
    with encoder.pool:
        try:
            for part in encoder.ahead(planned.parts):
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
    with committing():
        require_old(planned.before, files.old_files(), target)
        commit(files.manifest())
    return Copied(sent, present)


def _takes_differences(manifest: Manifest, pick: Pick) -> bool:
    kinds = {
        class_of(chunk_of(name, entry, piece)) for name, entry in manifest.entries.items() for piece in entry.pieces
    }
    return any(pick(kind) == DELTA for kind in kinds)
