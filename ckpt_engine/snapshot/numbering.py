"""Every rank counts the snapshots of all ranks alike, also those that it has no part in."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_engine.ranks.common import Common
from ckpt_engine.ranks.session import Session
from ckpt_engine.snapshot import mirroring
from ckpt_engine.snapshot.handle import SaveHandle
from ckpt_engine.snapshot.request import Request


class Numbering:
    """Gives ids to the snapshots of one rank. Training thread only.

    Args:
        session: of the ranks; None: this one is alone, and its writer numbers the snapshots.
        cancel: tells the others that this rank has no part in a snapshot, and why.
    """

    def __init__(self, session: Session | None, cancel: Callable[[str, str], None]) -> None:
        self._session = session
        self._cancel = cancel
        self.common = Common(session)

    @property
    def lacks_session(self) -> bool:
        """Whether the ranks have still to agree on their numbers: a writer has to start first."""
        return self._session is not None and not self._session.is_open

    @property
    def rank(self) -> int:
        return 0 if self._session is None else self._session.ranks.rank

    def take(self, wanted: Request, parent: str | None, save: Callable[[str | None], SaveHandle]) -> SaveHandle:
        """Let `save` take the snapshot of that id. Whatever fails in it: all ranks go on counting alike."""
        if self._session is None:
            return save(None)
        snapshot = self._session.number(wanted.step, parent)
        why = "it failed there"
        try:
            handle = save(snapshot)
            why = handle.skipped or ""
        finally:
            if why:
                self._tell(snapshot, why, durable=wanted.durable)
        return handle

    def miss(self, step: int, parent: str | None, why: str, *, durable: bool = True) -> None:
        """This rank takes no snapshot of `step` though all ranks do: it is counted, and nobody waits for this rank."""
        if self._session is not None and self._session.is_open:
            snapshot = self._session.number(step, parent)
            self._tell(snapshot, why, durable=durable)

    def _tell(self, snapshot: str, why: str, *, durable: bool) -> None:
        if durable:
            self._cancel(snapshot, why)
        elif self._session is not None:
            mirroring.miss(self._session, snapshot)
