"""Whether partners have kept up: with replication the next snapshot into memory waits for the one before."""

from __future__ import annotations

import time
from contextlib import suppress

from ckpt_engine.errors import RanksError
from ckpt_engine.ranks.session import Session
from ckpt_engine.store.layout import parse_id

PATIENCE_SECONDS = 30.0
"""How long a partner that is gone keeps snapshots from being taken; it is told by then."""
_MISSED = "missed"


class Mirroring:
    """What rank 0 knows of the partners of all ranks; other ranks, and runs without replication, know nothing.

    So each snapshot in memory is with the partners before the next one is taken, and all ranks mirror the same ones.
    Nothing is waited for: training goes on without snapshots in memory meanwhile. Training thread only.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session if session is not None and session.replicates and session.coordinates else None
        self._waits_for: int | None = None
        self._since = 0.0

    @property
    def keeps_up(self) -> bool:
        """Whether another snapshot may be taken into memory."""
        if self._waits_for is not None and (time.monotonic() - self._since > PATIENCE_SECONDS or self._is_missed()):
            self._waits_for = None
        return self._waits_for is None

    def _is_missed(self) -> bool:
        """Whether a rank has told that it did not take what is waited for."""
        missed = self._session.ranks.store.get(_MISSED) if self._session is not None else None
        return missed is not None and self._waits_for is not None and _number(missed) >= self._waits_for

    def took(self, snapshot: str | None) -> None:
        """That one is to be mirrored by all ranks."""
        if self._session is not None and snapshot is not None:
            self._waits_for, self._since = _number(snapshot), time.monotonic()

    def mirrored(self, snapshot: str) -> None:
        """All partners have it. Where they are slow a newer one takes the place of one that waits."""
        if self._waits_for is not None and _number(snapshot) >= self._waits_for:
            self._waits_for = None


def miss(session: Session, snapshot: str) -> None:
    """This rank has not taken a snapshot into memory that others may have: rank 0 need not wait for its keepers."""
    if session.replicates and not session.coordinates:
        with suppress(RanksError):  # rank 0 is gone: it waits for nobody
            session.ranks.store.set(_MISSED, snapshot)


def _number(snapshot: str) -> int:
    parsed = parse_id(snapshot)
    assert parsed is not None
    return parsed.seq
