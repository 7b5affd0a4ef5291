"""How several ranks commit a snapshot without a collective: each leaves a part record, one writer gathers them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, WaitTimeoutError
from ckpt_engine.persist import parts
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.leftovers import require_files
from ckpt_engine.persist.parts import Part
from ckpt_engine.persist.snapshots import Staged
from ckpt_engine.persist.stall import Progress
from ckpt_engine.store import layout as names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.retries import GrowingPauses

LOOKS = GrowingPauses(0.005, 0.5, 1.5)
"""Between two looks for the parts of other ranks."""
ALONE_SECONDS = 5.0
"""How long parts are waited for once the trainer is gone: the lease must be free before a restarted one gives up."""

_never = threading.Event()
"""Takes the place of an event that is set already: waiting for that one would not wait."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This rank has no part in a snapshot; takes the place of an order in the writer's queue."""

    snapshot: str
    why: str

    def release(self) -> None:
        """There is no slot to let go of."""


class InFlight(Container[str]):
    """The snapshots of a session that other ranks may be writing now: all from the first one that is not settled.

    Thread safe. With another session its ids differ: what ranks of dead sessions have left is not among them.
    """

    def __init__(self, session: str, first_seq: int) -> None:
        self._session = session
        self._first_seq = first_seq

    def __contains__(self, snapshot: object) -> bool:
        parsed = names.parse_id(snapshot) if isinstance(snapshot, str) else None
        if parsed is None or parsed.seq < self._first_seq:
            return False
        return parsed.id == names.session_id(self._session, parsed.seq, parsed.step)

    def settle(self, snapshot: str) -> None:
        """This snapshot and all before it are committed, or never will be."""
        parsed = names.parse_id(snapshot)
        assert parsed is not None
        self._first_seq = max(self._first_seq, parsed.seq + 1)


class Gathering:
    """The coordinator's way to finish: waits for the parts of all ranks and commits them together.

    Where nodes have roots of their own each of these has a coordinator, and the ranks are those that see it.

    Args:
        ranks: its configuration.
        in_flight: told what is settled.
        progress: of the lane that it runs in; waiting for others is no hang of the storage.
        still_ours: raises `LeaseHeldError` if the lease is lost; asked right before the commit.
        alone: set when the trainer is gone. Whoever restarts it waits for the lease then, and can complete the snapshot
            as well: it is left as it is after `alone_seconds`.
    """

    def __init__(
        self,
        ranks: RankConfig,
        in_flight: InFlight,
        progress: Progress,
        still_ours: Callable[[], object],
        alone: threading.Event,
        alone_seconds: float = ALONE_SECONDS,
    ) -> None:
        self._alone_seconds = alone_seconds
        self._ranks = ranks
        self._in_flight = in_flight
        self._progress = progress
        self._still_ours = still_ours
        self._alone = alone

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Raises `WaitTimeoutError` if a part does not come, `SnapshotFailedError` if the parts make no snapshot."""
        mine = parts.part_of(manifest, staged.cut_layout.layout, self._ranks)
        parts.put(repository.storage, mine)
        whole = parts.merge([mine, *self._gather(repository, staged.snapshot)])
        # Nobody but the holder of the lease removes anything: what is there now is there when it is committed.
        require_files(repository.storage, [file for file in whole.files if staged.snapshot not in file.name])
        self._still_ours()
        self._progress.check()
        repository.commit(whole)
        self._in_flight.settle(staged.snapshot)
        with suppress(CkptError):  # the next start removes what is left
            parts.remove(repository.storage, staged.snapshot, self._ranks.members)
        return whole

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        if self._alone.is_set():
            return  # the next start completes it, if the last part has come by then, or removes it
        # A commit may have landed although it reported an error. Without its records nobody can complete it later.
        repository.forget([staged.snapshot])
        parts.remove(repository.storage, staged.snapshot, self._ranks.members)
        repository.storage.delete(*new)
        self._in_flight.settle(staged.snapshot)

    def _gather(self, repository: Repository, snapshot: str) -> list[Part]:
        storage, found = repository.storage, dict[int, Part]()
        wanted = set(self._ranks.members) - {self._ranks.rank}
        deadline = time.monotonic() + self._ranks.wait_seconds
        alone_until: float | None = None
        pause = LOOKS.first_seconds
        while wanted:
            self._progress.moved()
            new = parts.read_all(storage, snapshot, wanted & parts.there(storage, snapshot).get(snapshot, set()))
            found |= new
            wanted -= new.keys()
            if not wanted or any(part.cancelled is not None for part in found.values()):
                break
            now = time.monotonic()
            if self._alone.is_set() and alone_until is None:
                alone_until = now + self._alone_seconds
            left = min(deadline, deadline if alone_until is None else alone_until) - now
            if left <= 0.0:
                raise WaitTimeoutError(
                    f"no part of {snapshot} came from {_listed(wanted)} in time ({self._ranks.wait_seconds:.0f} s)",
                    hint="see whether these ranks live, and whether they write to the same place",
                )
            self._progress.check()
            (_never if self._alone.is_set() else self._alone).wait(min(pause, left))
            pause = LOOKS.after(pause)
        return list(found.values())


class Contributing:
    """The way of all other ranks: leaves a part record for the coordinator. Nothing exists by it.

    Args:
        ranks: its configuration.
        says_failure: what fails is told to the coordinator, which waits for it. Else the part may come later.
    """

    def __init__(self, ranks: RankConfig, *, says_failure: bool = True) -> None:
        self._ranks = ranks
        self._says_failure = says_failure
        self._said = False

    def commit(self, staged: Staged, repository: Repository, manifest: Manifest) -> Manifest:
        """Raises `StorageError` if the record could not be written; it may be there nevertheless."""
        self._said = True
        parts.put(repository.storage, parts.part_of(manifest, staged.cut_layout.layout, self._ranks))
        return manifest

    def undo(self, staged: Staged, repository: Repository, new: Sequence[str]) -> None:
        # Once a record may be there the coordinator may have committed: then this data belongs to a snapshot.
        if self._said:
            return
        if self._says_failure:
            why = "it failed there"
            parts.put(repository.storage, parts.no_part(staged.snapshot, why, repository.run_id, self._ranks))
        repository.storage.delete(*new)


def _listed(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
