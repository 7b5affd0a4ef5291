"""Which snapshot all nodes have, where each has a root of its own: until that is known none may remove it.

Each leader counts up a number in the ranks' store when its node has committed a snapshot. Where that has reached the
number of places all of them have it. Asked once per snapshot, when the next one is taken; nobody is waited for.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from ckpt_engine.errors import RanksError
from ckpt_engine.ranks.session import Session
from ckpt_engine.store.layout import parse_id

_ASKED = 8
"""The newest snapshots of this node that are asked for; all older ones failed somewhere."""
_KEPT = 64
"""Numbers in the store that rank 0 leaves: more than leaders can be behind it."""


class Common:
    """What a leader of one of several places knows; others, and runs with one place, know nothing.

    Training thread only.

    Args:
        session: of the ranks; None: this one is alone.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._newest: str | None = None
        self._unsure: deque[str] = deque(maxlen=_ASKED)
        self._counted: deque[str] = deque()

    def committed(self, snapshot: str | None) -> str | None:
        """This node has it; returns it. None: it has come to nothing."""
        session = self._session
        if session is None or not session.led_places or snapshot is None:
            return snapshot
        self._unsure.append(snapshot)
        with suppress(RanksError):  # the ranks are gone: then nothing is removed any more
            session.ranks.store.add(_key(snapshot))
            if session.coordinates:
                self._tidy(snapshot)
        return snapshot

    def newest(self, parent: str | None) -> str | None:
        """The newest snapshot that all nodes have, or that all ranks began with; None: not known, or of no use.

        Args:
            parent: what the run resumed from.
        """
        session = self._session
        if session is None or not session.led_places:
            return None
        with suppress(RanksError):
            for snapshot in reversed(self._unsure):
                if session.ranks.store.get(_key(snapshot)) == str(session.led_places):
                    self._newest = snapshot
                    while self._unsure.popleft() != snapshot:
                        pass
                    break
        return max(filter(None, (self._newest, parent)), key=_age, default=None)

    def _tidy(self, snapshot: str) -> None:
        assert self._session is not None
        self._counted.append(snapshot)
        while len(self._counted) > _KEPT:
            self._session.ranks.store.remove(_key(self._counted.popleft()))


def _key(snapshot: str) -> str:
    return f"committed/{snapshot}"


def _age(snapshot: str) -> int:
    parsed = parse_id(snapshot)
    return parsed.seq if parsed is not None else -1
