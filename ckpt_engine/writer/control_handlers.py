"""What a writer answers on its control socket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_engine.copy.job import RankConfig
from ckpt_engine.errors import CkptError
from ckpt_engine.writer import control
from ckpt_engine.writer.channel import Body
from ckpt_engine.writer.control import Reply
from ckpt_engine.writer.memory_snapshots import MemorySnapshots

if TYPE_CHECKING:
    from ckpt_engine.writer.peers import Peers

_WHO_LETTERS = 200


class ControlHandlers:
    """Answers requests. `answer` belongs to the control thread, everything else may be called from any.

    Args:
        memory: the snapshots in memory.
        forward: tells the trainer what somebody asked it for, and who; whether that was possible.
        trainer_lives: asks the system, in case its end has not been noticed yet.
        flush: makes what is in memory durable although the trainer lives; its step, or None.
        bye: called when the restarted training needs this writer no more; gives up the name.
        ranks: whose writer this is; None: there is one rank.
        peers: what it keeps for ranks of other machines.
    """

    def __init__(
        self,
        memory: MemorySnapshots,
        forward: Callable[[str, str], bool],
        trainer_lives: Callable[[], bool],
        flush: Callable[[], int | None],
        bye: Callable[[], object],
        ranks: RankConfig | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._ranks = ranks
        self._peers = peers
        self._memory = memory
        self._forward = forward
        self._trainer_lives = trainer_lives
        self._flush = flush
        self._bye = bye
        self._attended = self._serves = True
        self._said_bye = threading.Event()

    @property
    def said_bye(self) -> bool:
        """Whether the writer is not needed any more."""
        return self._said_bye.is_set()

    def leave(self, *, serves: bool) -> None:
        """The trainer is gone, and everything it sent was taken in.

        Args:
            serves: what is in memory is for the restarted training; else that was closed, and nothing is served.
        """
        self._serves = serves
        self._attended = False

    def answer(self, request: Body) -> Reply | None:
        """See `control.Answer`."""
        match request.get("what"):
            case control.SNAPSHOT:
                return self._snapshot(request.get("snapshot"), request.get("rank"))
            case control.PARITY:
                return self._parity(str(request.get("snapshot")))
            case control.HELD:
                return self._list()
            case control.BYE:
                return self._take_leave(request.get("snapshot"))
            case control.SAVE | control.STOP as what:
                who = str(request.get("who", "somebody"))[:_WHO_LETTERS]
                return Reply({"trainer": self._attended and self._trainer_lives() and self._forward(what, who)})
            case control.FLUSH:
                return Reply(self._flushed())
            case control.STATUS:
                return Reply(self._status())
            case what:
                return Reply({"error": f"the writer does not know the request {what!r}"})

    def _closed(self) -> str | None:
        """Why nothing is served; "": that is not known yet, because what the trainer sent last is still to come."""
        if self._attended:
            return "its trainer is alive" if self._trainer_lives() else ""
        return None if self._serves else "the run was closed"

    def _list(self) -> Reply | None:
        closed = self._closed()
        if closed is not None:
            return Reply({"held": [], "why": closed}) if closed else None
        ids = self._memory.ids()
        if ids is None:
            return None
        body: Body = {"held": ids}
        if self._ranks is not None:
            body["node"] = self._ranks.node
        if self._ranks is not None and self._peers is not None:
            guests = {str(rank): ids for rank, ids in self._peers.guests.ids().items()}
            body |= {
                "guests": guests,
                "host": self._peers.host,
                "port": self._peers.port,
                "secret": self._ranks.session,
            }
            body |= {"group": list(self._peers.parity.group), "parity": self._peers.parity.ids()}
        return Reply(body)

    def _snapshot(self, wanted: object, rank: object) -> Reply | None:
        closed = self._closed()
        if closed is not None:
            return Reply({"snapshot": None, "why": closed}) if closed else None
        if self._ranks is not None and rank not in (None, self._ranks.rank):
            return self._guest(str(wanted), rank)
        try:
            offer = self._memory.offer(None if wanted is None else str(wanted))
        except (CkptError, OSError, ValueError) as err:
            return Reply({"snapshot": None, "why": str(err)})
        if offer is None:
            return None
        if isinstance(offer, str):
            return Reply({"snapshot": None, "why": offer})
        body = {
            "snapshot": offer.snapshot,
            "step": offer.step,
            "manifest": offer.manifest.decode(),
            "run": offer.run.run,
            "record": offer.run.text.decode(),
            "file": offer.file.name,
            "nbytes": offer.file.nbytes,
            "durable": offer.durable,
            "beat": self._beat(),
        }
        return Reply(body, (offer.fd,))

    def _guest(self, wanted: str, rank: object) -> Reply:
        share = self._peers.guests.get(rank, wanted) if self._peers is not None and isinstance(rank, int) else None
        if share is None:
            return Reply({"snapshot": None, "why": f"the share of rank {rank} is not kept here"})
        described = {**share.described(), "manifest": share.part, "beat": None, "durable": False}
        del described["part"]
        return Reply(described, (share.fd,))

    def _parity(self, wanted: str) -> Reply | None:
        closed = self._closed()
        if closed is not None:
            return Reply({"snapshot": None, "why": closed}) if closed else None
        found = self._peers.parity.get(wanted) if self._peers is not None else None
        if found is None:
            return Reply({"snapshot": None, "why": f"the parity of {wanted} is not kept here"})
        shares = [share.described() for share in found.shares]
        return Reply({"snapshot": wanted, "shares": shares, "nbytes": found.nbytes}, (found.fd,))

    def _flushed(self) -> Body:
        if not (self._attended and self._trainer_lives()):
            return {"step": None, "why": "its trainer is gone: what it left becomes durable anyway"}
        step = self._flush()
        return {"step": step} if step is not None else {"step": None, "why": "no snapshot is in memory"}

    def _take_leave(self, snapshot: object) -> Reply | None:
        if self._attended:
            return Reply({"ok": False}) if self._trainer_lives() else None
        newest = self._memory.newest
        if snapshot is not None and newest is not None and newest.snapshot != snapshot:
            return Reply({"ok": False})  # somebody else's snapshot: it was attached to another writer
        self._said_bye.set()
        self._memory.let_go()
        self._bye()
        return Reply({"ok": True})

    def _status(self) -> Body:
        newest = self._memory.newest
        return {
            "pid": os.getpid(),
            "trainer": self._attended and self._trainer_lives(),
            "held": None if newest is None else {"step": newest.job.step, "durable": newest.durable},
            "held_created": None if newest is None else newest.job.created,
            "beat": self._beat(),
            "spent": None if (spent := self._memory.spent()) is None else asdict(spent),
            "pace": dict(self._memory.pace),
        }

    def _beat(self) -> Body | None:
        beat = self._memory.beat
        return None if beat is None else {"step": beat.step, "instant_monotonic": beat.instant_monotonic}
