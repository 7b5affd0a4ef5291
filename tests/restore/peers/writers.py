"""Writers of several machines in one process, over real sockets, and orders as their trainers would send them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ckpt_engine.copy.job import RankConfig, to_json
from ckpt_engine.copy.transfer import RunText
from ckpt_engine.ranks.world import neighbours
from ckpt_engine.store.names import session_id
from ckpt_engine.writer.memory_snapshots import MessageDecoder, StagedJob
from ckpt_engine.writer.messages import Kind
from ckpt_engine.writer.peers import Peers
from tests.writer.staged import WAIT_SECONDS, Stage

RUN = RunText("0" * 32, b"{}")
SECRET = "session"


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Writer:
    """The peers of a rank, and orders as its trainer would send them.

    Args:
        machines: of a parity group; 2: every rank has a partner.
        nbytes: about the size of its share.
    """

    def __init__(self, rank: int, size: int, machines: int = 2, nbytes: int = 64 << 10) -> None:
        self.said: list[dict[str, Any]] = []
        self.changes = False
        self.asked = 0
        self.ranks = RankConfig(rank, size, SECRET, None, 1.0, f"node{rank}", True)
        self.machines = machines
        self.peers = Peers(self.ranks, lambda: RUN, self._intact, self.said.append)
        self.stage = Stage(nbytes)
        self.intake = MessageDecoder()
        self.orders: list[StagedJob] = []
        self.intake.take(*self.stage.message())

    def _intact(self, order: StagedJob) -> bool:
        intact = not self.changes
        self.asked += 1  # last: who waits for it changes what is answered
        return intact

    def offer(self, step: int) -> str:
        """A snapshot of `step` is in memory; its id."""
        snapshot = session_id(SECRET, step, step)
        job = dataclasses.replace(self.stage.job(step), snapshot=snapshot, rank=self.ranks.rank)
        order = self.intake.take({"kind": Kind.HOLD, "job": to_json(job)})
        assert order is not None
        self.orders.append(order)
        self.peers.offer(order)
        return snapshot

    @property
    def kept(self) -> list[str]:
        """The snapshots of which it has what the others send."""
        return self.peers.parity.ids()

    def join(self) -> None:
        """Wait until its sender, which ends, has freed the slot and its connections."""
        if self.peers.ident is not None:
            self.peers.join(WAIT_SECONDS)
            assert not self.peers.is_alive()

    @property
    def mirrored(self) -> list[str]:
        return [one["snapshot"] for one in self.said if one["kind"] == Kind.MIRRORED]

    @property
    def notices(self) -> list[str]:
        return [one["event"]["message"] for one in self.said if one["kind"] == Kind.EVENT]

    def close(self) -> None:
        self.peers.close()
        self.join()
        self.orders.clear()
        self.intake.close()


def meet(writers: list[Writer], *, moved: int | None = None) -> None:
    """Each on a machine of its own learns of the others; `moved`: this one alone, which took the place of another."""
    addresses = [["127.0.0.1", one.peers.server.port] for one in writers]
    nodes = [one.ranks.node for one in writers]
    for rank, one in enumerate(writers):
        if moved in (None, rank):
            near = dataclasses.asdict(neighbours(rank, nodes, one.machines))
            one.peers.meet({"addresses": addresses, **near, "moved": moved is not None})
