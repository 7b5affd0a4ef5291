"""Writes one staged snapshot from the arena into one repository, encoded: data files of encoded pieces, manifest."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.errors import CkptError, WriterError
from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.persist.snapshots import Staged, SupersededError
from ckpt_engine.persist.stall import Progress
from ckpt_engine.store import layout, manifest_codec
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.recode import Tally, store_encoded
from ckpt_engine.store.recode_encode import DELTA
from ckpt_engine.store.recode_plan import plan
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.transfer import SourceError


def most_bytes(staged: Staged, repository: Repository, codec: str) -> int:
    """At most so many bytes of data are written, if nothing can be encoded.

    Raises:
        WriterError: the image cannot be read.
        StorageError: from the repository.
    """
    manifest = staged.manifest(repository.run_id, staged.whole(staged.digest()))
    planned = plan(manifest, repository, codec == DELTA)
    return max(staged.data.nbytes, planned.most_bytes(manifest_codec.encode(manifest)))


def write_encoded(
    staged: Staged,
    repository: Repository,
    tier: str,
    codec: str,
    progress: Progress,
    undo_failed: Callable[[CkptError], object],
) -> SnapshotCommitted:
    """Make `staged` durable in `repository`, its pieces encoded. Needs its lease.

    The arena slot is read until this returns, left behind or not; each piece is compared with its digest when it is
    encoded. At most two parts of the image (`recode_plan.PART_BYTES`) are in memory beside it.

    Args:
        tier: how the place is called in the event.
        codec: a codec's name, or `DELTA`.
        progress: of the call that this is part of: a snapshot that nobody waits for any more is not committed.
        undo_failed: told if data of a snapshot that was not committed stays.

    Raises:
        CkptError: it does not exist there.
        AbandonedError: as before; nobody waits for it.
    """
    job, began, cpu_before = staged.job, time.monotonic(), time.thread_time()
    progress.check()
    digests, digest_seconds = staged.timed_digest()
    manifest, tally = staged.manifest(repository.run_id, staged.whole(digests)), Tally()
    with staged.slot.image(staged.data.nbytes) as image:

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            progress.check()
            progress.moved()  # encoding is no storage call, and may take its time
            with image[piece.offset : piece.offset + piece.nbytes] as part:
                out[:] = part
            if digest(out) != piece.digest:
                raise WriterError(f"{entry!r} has changed in its arena slot while it was encoded; it is not written")

        def commit(stored: Manifest) -> None:
            progress.check()
            if not staged.unchanged():
                raise SupersededError(f"the snapshot of step {job.step} was left: a newer one has taken its place")
            repository.commit(stored)

        try:
            done = store_encoded(
                manifest,
                Decoder(manifest, fetch),
                None,
                repository,
                lambda _: codec,
                tally,
                repository.storage,
                commit,
            )
        except SourceError as err:
            _undo(staged, repository, undo_failed)
            raise err.error from err
        except BaseException:
            _undo(staged, repository, undo_failed)
            raise
    return SnapshotCommitted(
        snapshot=staged.snapshot,
        step=job.step,
        tier=tier,
        nbytes=manifest.info.nbytes,
        written_bytes=done.sent_bytes + done.present_bytes,
        latency_seconds=time.monotonic() - job.instant_monotonic,
        write_seconds=time.monotonic() - began,
        cpu_seconds=time.thread_time() - cpu_before + digest_seconds + sum(tally.seconds.values()),
        time=time.time(),
    )


def _undo(staged: Staged, repository: Repository, failed: Callable[[CkptError], object]) -> None:
    """Free the data of a snapshot that could not be committed."""
    try:
        # The manifest goes first: a commit may have landed although it reported an error.
        repository.forget([staged.snapshot])
        listed = [item.name for item in repository.storage.list(layout.DATA)]
        mine = [name for name in listed if (owner := layout.data_owner(name)) and owner.id == staged.snapshot]
        repository.storage.delete(*mine)
    except CkptError as err:
        failed(err)
