"""Which line of history the snapshots of this process belong to, and whether another job has overtaken it."""

from __future__ import annotations

import hashlib
import os

from ckpt_engine.errors import OvertakenError
from ckpt_engine.persist.client import WriterClient
from ckpt_engine.persist.job import History
from ckpt_engine.ranks.session import Session
from ckpt_engine.store.lines import branch_id
from ckpt_engine.store.manifest import Line, SnapshotInfo

CLOSE_SECONDS = 60.0
_ATTEMPT_DIGITS = 16


class Lineage:
    """Of one process. Training thread only, but for `checked`.

    Args:
        session: of several ranks, which have one line together.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._attempt = "" if session is not None else _random()
        self._begun = 0
        self._before: tuple[tuple[str, int], ...] = ()
        self._resumed: SnapshotInfo | None = None
        self._seen: int | None = None
        self._how = "call load() before the first save()"
        self._unsaid: History | None = None
        self._found: History | None = None

    @property
    def parent(self) -> str | None:
        """The snapshot that this process goes on from."""
        return None if self._resumed is None else self._resumed.id

    def line(self) -> Line:
        """That of the next snapshot."""
        if not self._attempt and self._session is not None and self._session.is_open:
            text = f"{self._session.name} {self._begun}"
            self._attempt = hashlib.sha256(text.encode()).hexdigest()[:_ATTEMPT_DIGITS]
        return Line(self._attempt, self._before)

    def looked(self, newest_seq: int = 0) -> None:
        """The snapshots were looked at, up to the one of this number."""
        self._seen = newest_seq

    def go_on(self, resumed: SnapshotInfo, before: tuple[tuple[str, int], ...]) -> None:
        """What is trained from here on comes after `resumed`; `before`: see `restore.line`."""
        own = resumed.line.attempt == self._attempt and bool(before)
        self._resumed = resumed
        if own:
            return
        self._begin()
        self._before = before

    def _begin(self) -> None:
        """What follows is of another attempt than what was before."""
        self._begun += 1
        self._attempt = "" if self._session is not None else _random()

    def checked(self, client: WriterClient, url: str) -> WriterClient:
        """A writer that has just taken the lease, unless others have written since this process has looked.

        Raises:
            OvertakenError: they have; the lease is given back.
        """
        history = client.history
        if history is None or (self._session is not None and not self._session.coordinates):
            return client
        if self._seen is not None and history.seq > self._seen and not self._is_ours(history):
            client.close(CLOSE_SECONDS)
            had = "there was nothing" if self._resumed is None else f"it had step {self._resumed.step:,}"
            raise OvertakenError(
                f"another job made snapshots up to step {history.step:,} ({history.newest}) at {url} after this one "
                f"looked there: {had}. Nothing was written, and nothing is lost",
                hint="start the script again, or call load() again: it goes on from the newest snapshot",
            )
        if self._seen is None and (not self._attempt or history.attempt != self._attempt):
            self._unsaid = history  # else a writer was lost, and this is what it has made
        self._found = history
        self._seen = max(self._seen or 0, history.seq)
        return client

    def fresh(self, how: str) -> None:
        """Training starts fresh, whatever is there; `how`: what the user does to go on from that."""
        self._how = how
        if self._resumed is not None:
            self._resumed, self._before, self._unsaid = None, (), self._found
            self._begin()

    def news(self, url: str) -> str | None:
        """Once, if training starts fresh at a place with a history: what becomes of that, for people."""
        history, self._unsaid = self._unsaid, None
        if history is None or self._resumed is not None:
            return None
        remove = ""
        if history.attempt is not None:
            remove = f" until `ckpt prune {url} --branch {branch_id(Line(history.attempt))}` removes them"
        many = f"{history.snapshots:,} snapshot{'s' if history.snapshots > 1 else ''}"
        return (
            f"{url} has {many} of earlier training, up to step {history.step:,}, and this run starts fresh beside "
            f"them: they stay{remove} (`ckpt ls {url}` shows all). To go on from them: {self._how}"
        )

    def _is_ours(self, history: History) -> bool:
        """Whether this process, or the writer of what it goes on from, has made the newest one."""
        if history.attempt is not None and history.attempt == self._attempt:
            return True
        resumed = self._resumed
        if resumed is None or (resumed.step, resumed.created) != (history.step, history.created):
            return False
        # The writer of a dead trainer has made durable what was loaded from its memory, under another number.
        self._before = ((resumed.line.attempt, history.seq), *self._before[1:])
        return True


def _random() -> str:
    return os.urandom(_ATTEMPT_DIGITS // 2).hex()
