"""What the writer of a rank does with the writers of other machines.

It mirrors its share there, the newest snapshot first, keeps what they send, and serves it.

Each keeper gets a chunk; a single one gets the share whole. The trainer fills a slot again while a slow link
still takes it in. So the share is copied before, and what was copied counts only if the slot cannot have changed
meanwhile. A keeper is not waited for: one that is gone is reported, and tried again with the next snapshot.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_engine.copy.host_memory import shared_bytes
from ckpt_engine.copy.job import RankConfig
from ckpt_engine.copy.transfer import RunText
from ckpt_engine.copy.write_snapshot import digesting
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Notice
from ckpt_engine.observe.reporter import Reporter
from ckpt_engine.store.container import digest
from ckpt_engine.store.storage.base import Throttle
from ckpt_engine.store.storage.disk import closing_fd
from ckpt_engine.writer import channel, part_records
from ckpt_engine.writer.memory_snapshots import StagedJob
from ckpt_engine.writer.messages import Answer, Body, nothing
from ckpt_engine.writer.mirrored_shares import MirroredShares
from ckpt_engine.writer.parity import ParitySets, chunk
from ckpt_engine.writer.peer_link import PeerLink
from ckpt_engine.writer.peer_service import SECONDS, PeerConnection, PeerShare, Server, connect

_IDLE_SECONDS = 60.0
_END_SECONDS = 1.0


@dataclass(slots=True)
class _Keeper(PeerLink):
    """Who keeps the share, or chunk `number` of it."""

    rank: int = 0
    number: int = 0


class Peers(threading.Thread):
    """From the start of the writer to the end of its process; the thread sends the shares. Any thread.

    Args:
        ranks: whose writer it is; with `mirrors`.
        run: of the writer; None: it has not opened the run yet.
        intact: whether the slot of an order still has its bytes, and had them until now.
        emit: takes messages to the trainer.

    Raises:
        OSError: no port is to be had.

    Attributes:
        parity: what is kept for others.
        server: where other writers reach this one.
        answer: what the control socket would answer, once there is one.
    """

    def __init__(
        self,
        ranks: RankConfig,
        run: Callable[[], RunText | None],
        intact: Callable[[StagedJob], bool],
        emit: Callable[[Body], object],
    ) -> None:
        super().__init__(name="ckpt-mirror", daemon=True)
        self._ranks = ranks
        self._run_text = run
        self._intact = intact
        self._report = Reporter(lambda event: emit(channel.event(event)))
        self.parity = ParitySets()
        self.answer: Answer = lambda _: nothing("the writer has just begun")
        self._news = threading.Condition()
        self._mirrored = MirroredShares(ranks, emit, PeerLink(ranks.session, ("", 0)))
        rate = ranks.mirror_bytes_per_second
        self._throttle = Throttle(rate) if rate is not None else None
        self._changed = threading.Condition()
        self._next: StagedJob | None = None
        self._keepers: dict[int, _Keeper] = {}
        self._room = memoryview(bytearray())
        """Memory for a copy of a share."""
        # All ranks tell rank 0's writer what was kept.
        where = ranks.address or "127.0.0.1"
        self.server = Server(where, ranks.session, self._serve, ranks.size if ranks.rank == 0 else 0)

    def meet(self, body: Body) -> None:
        """The ranks have said where everybody is.

        Args:
            body: `addresses`, host and port of each rank's writer; the ranks that are its `keepers` and `senders`, see
                `ranks.world`; and whether this writer has `moved`: it has taken the place of one that died.
        """
        addresses = [(str(host), int(port)) for host, port in body["addresses"]]
        keepers, senders = [int(rank) for rank in body["keepers"]], [int(rank) for rank in body["senders"]]
        self.parity.expect([self._ranks.rank, *senders])
        self._mirrored.lead.address = addresses[0]
        with self._changed:
            self._keepers = {
                rank: _Keeper(self._ranks.session, addresses[rank], rank=rank, number=number)
                for number, rank in enumerate(keepers)
            }
        self.start()
        if body["moved"]:
            # Those that send their shares here, and all who say to rank 0 that theirs were kept.
            others = senders if self._ranks.rank else range(1, self._ranks.size)
            me = {
                "what": "moved",
                "rank": self._ranks.rank,
                "port": self.server.port,
                "host": addresses[self._ranks.rank][0],
            }
            there = [addresses[one] for one in others]
            threading.Thread(target=self._tell, args=(there, me), name="ckpt-moved", daemon=True).start()

    def offer(self, order: StagedJob) -> None:
        """The newest order is to be mirrored next, instead of what waits."""
        with self._changed:
            self._next = order
            self._changed.notify()

    def poke(self) -> None:
        """What `answer` says may have changed."""
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Send nothing more, and serve nothing. Idempotent; waits a little for what is being sent."""
        self.server.close()
        with self._changed:
            self._next = None
            self._changed.notify()
        if self._keepers:
            self.join(_END_SECONDS)
        self._mirrored.lead.hang_up()
        self.parity.close()

    def _serve(self, request: dict[str, Any], line: PeerConnection) -> None:
        match request.get("what"):
            case "add":
                try:
                    self.parity.receive(request, line)
                except CkptError as err:
                    line.send({"why": err.message})
                    raise  # what is left of the file is on the line
                line.send({"ok": True})
            case "snapshot" | "parity":
                self._give(request, line)
            case "mirrored":
                self._mirrored.count(str(request["snapshot"]), int(request["rank"]))
                line.send({"ok": True})
            case "moved":
                self._moved(int(request["rank"]), str(request["host"]), int(request["port"]))
                line.send({"ok": True})
            case what:
                line.send({"why": f"the writer does not know the request {what!r}"})

    def _tell(self, addresses: Sequence[tuple[str, int]], body: Body) -> None:
        for host, port in addresses:
            # One that has moved itself hears of it at the next start.
            with suppress(OSError, CkptError), closing(connect(host, port, self._ranks.session)) as line:
                line.send(body)
                line.receive()

    def _moved(self, rank: int, host: str, port: int) -> None:
        """The writer of a rank is there now; it may be one that keeps nothing."""
        with self._changed:
            if rank in self._keepers:
                self._keepers[rank].address = (host, port)
        if rank == 0:
            self._mirrored.lead.address = (host, port)

    def _give(self, wanted: dict[str, Any], line: PeerConnection) -> None:
        with self._news:
            reply = self._news.wait_for(lambda: self.answer(wanted), SECONDS / 2)
        if reply is None or not reply.fds:
            line.send({"why": "it is not known yet" if reply is None else reply.body.get("why")})
            return
        with closing_fd(reply.fds[0]) as fd:
            line.send(reply.body)
            line.send_file(shared_bytes(fd, int(reply.body["nbytes"]), writable=False))

    def run(self) -> None:
        """The thread."""
        while (order := self._take()) is not None:
            try:
                self._send(order)
            except (OSError, CkptError, ValueError) as err:
                text = f"the share of rank {self._ranks.rank} cannot be sent to other machines: {err}"
                self._report.failed("share", f"{text}; it is in the memory of this machine only")
            else:
                self._report.worked("share")
            del order  # and the memory of its slot, while the next one is waited for
        for keeper in self._keepers.values():
            keeper.hang_up()
        self._room = memoryview(bytearray())

    def _take(self) -> StagedJob | None:
        with self._changed:
            while self._next is None and not self.server.closed.is_set():
                self._changed.wait(_IDLE_SECONDS)
            order, self._next = self._next, None
            return order

    def _send(self, order: StagedJob) -> None:
        run = self._run_text()
        staged = order.staged(order.snapshot or "")
        nbytes = staged.nbytes
        if run is None:
            return
        if nbytes > self._room.nbytes:
            self._room = memoryview(bytearray())  # the smaller one goes before
            self._room = memoryview(mmap.mmap(-1, nbytes))
        copy = self._room[:nbytes]
        with staged.slot.image(nbytes) as image:
            copy[:] = image
        if not self._intact(order):
            return  # a newer one is on its way
        manifest = staged.manifest(run.run, digesting(copy, staged.cut_layout).result())
        part = part_records.encode(part_records.part_of(manifest, staged.cut_layout.layout, self._ranks))
        share = PeerShare(self._ranks.rank, staged.snapshot, part.decode(), run.text.decode(), staged.data.name, nbytes)
        kept = [self._attempt(keeper, share, copy) for keeper in self._keepers.values()]
        if all(kept):
            self._mirrored.note(staged.snapshot)

    def _attempt(self, keeper: _Keeper, share: PeerShare, copy: memoryview) -> bool:
        """Whether a keeper has its part of the share now."""
        host, port = keeper.address
        name = f"rank {keeper.rank}"
        who = f"{name} at {host}:{port}"
        try:
            why = self._deliver(keeper, share, copy)
        except (OSError, CkptError, ValueError) as err:
            keeper.hang_up()
            text = f"{who} does not take the share of rank {share.rank}: {err}"
            self._report.failed(name, f"{text}; it is in the memory of this machine only")
            return False
        if why is not None:
            keeper.hang_up()
            self._report.warn(f"{who} did not keep the share of rank {share.rank}: {why}")
            return False
        if self._report.worked(name):
            self._report.emit(Notice("INFO", f"{who} is back"))
        return True

    def _deliver(self, keeper: _Keeper, share: PeerShare, copy: memoryview) -> str | None:
        """None, or why it is not kept; raises if the keeper is gone."""
        line = keeper.line()
        data = copy[chunk(share.nbytes, len(self._keepers) + 1, keeper.number)]
        line.send({"what": "add", **asdict(share), "digest": digest(data)})
        line.send_file(data, self._pace)
        reply = line.receive()
        return None if reply.get("ok") else str(reply.get("why"))

    def _pace(self, nbytes: int) -> None:
        if self._throttle is not None and (seconds := self._throttle(nbytes)):
            self.server.closed.wait(seconds)
