"""What one process writes into a run now: it holds the run's lease as long as one of its saves is under way."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.log import LOGGER_NAME
from ckpt_engine.store import layout
from ckpt_engine.store.collect import collect, prune
from ckpt_engine.store.lease import Lease, acquire
from ckpt_engine.store.lines import continued
from ckpt_engine.store.manifest import Line, Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention import KeepAll, RetentionPolicy
from ckpt_engine.store.storage.base import Storage

LEASE_WAIT_SECONDS = 60.0
"""A process that was killed may still be finishing, or its lease on an object store has to run out."""


@dataclass(slots=True)
class _Run:
    repository: Repository
    lease: Lease
    under_way: set[str] = field(default_factory=set)
    busy: int = 0
    """Calls that need the lease."""


_runs: dict[str, _Run] = {}
_lines: dict[str, Line] = {}
"""By the URL of a run: the line of history of what this process saves there."""
_lock = threading.RLock()
"""The collector of garbage may end a save that nobody ended, at any instant of the thread that holds this."""


class Save:
    """One snapshot that this process coordinates: from its number to its manifest. Thread safe.

    Args:
        storage: where the run is.
        step: of training; None: one more than the newest snapshot's.

    Raises:
        LeaseHeldError: another process writes the run; names it.
        ForeignError, CorruptError, NewerFormatError, StorageError: as `Repository.create_if_absent`.
    """

    def __init__(self, storage: Storage, step: int | None) -> None:
        self._url = storage.url
        with _lock:
            run = _runs.get(self._url) or _open(storage)
            _runs[self._url] = run
            run.busy += 1
            try:
                newest = max(run.repository.ids(), key=lambda parsed: parsed.seq, default=None)
                if step is None:
                    step = newest.step + 1 if newest is not None else 0
                seq = max(run.repository.next_seq(), *(_seq(one) + 1 for one in run.under_way), 0)
                self.id = layout.snapshot_id(seq, step)
                self.run = run.repository.run_id
                run.under_way.add(self.id)
                self._run = run
            finally:
                run.busy -= 1
                _close_if_idle(self._url, run)

    def commit(self, manifest: Manifest, policy: RetentionPolicy) -> None:
        """Make the snapshot exist, then let go of what `policy` does not keep. All its data MUST be durable.

        Raises:
            LeaseHeldError: the lease was lost; the snapshot does not exist.
            StorageError: it does not exist. What goes wrong after it does is only told.
        """
        repository, lease = self._run.repository, self._run.lease
        line = _lines.setdefault(self._url, _begun())
        lease.check()
        repository.commit(replace(manifest, info=replace(manifest.info, line=line)))
        with _lock:
            self._run.under_way.discard(self.id)
            self._run.busy += 1
            try:
                if isinstance(policy, KeepAll):
                    repository.write_catalog_if_due()
                else:
                    under_way = self._run.under_way
                    prune(repository, lease, policy, line=line, verified=(self.id,), in_flight=under_way)
            except CkptError as err:
                logging.getLogger(LOGGER_NAME).warning("snapshot %s is there, but retention failed: %s", self.id, err)
            finally:
                self._run.busy -= 1

    def end(self) -> None:
        """Nothing more will be written for it. Data without a manifest goes with the next save. Twice is fine."""
        with _lock:
            self._run.under_way.discard(self.id)
            if _runs.get(self._url) is self._run:
                _close_if_idle(self._url, self._run)


def go_on(repository: Repository, info: SnapshotInfo) -> None:
    """A load of this process has read that snapshot: what it saves there comes after it.

    Raises:
        StorageError: nothing is known of what is newer.
    """
    url = repository.storage.url
    if url not in _lines or info.line.attempt != _lines[url].attempt:
        newer = [one for one in repository.list() if one.seq > info.seq]
        _lines[url] = replace(_begun(), before=continued(info, newer, ()))


def _begun() -> Line:
    return Line(os.urandom(8).hex())


def _open(storage: Storage) -> _Run:
    lease = acquire(storage, wait_seconds=LEASE_WAIT_SECONDS)
    try:
        repository = Repository(storage)
        repository.create_if_absent()
        collect(repository, lease)  # what saves that died have left
    except BaseException:
        lease.release()
        raise
    return _Run(repository, lease)


def _close_if_idle(url: str, run: _Run) -> None:
    if not run.under_way and not run.busy:
        _runs.pop(url, None)
        run.lease.release()


def _seq(snapshot: str) -> int:
    parsed = layout.parse_id(snapshot)
    assert parsed is not None
    return parsed.seq
