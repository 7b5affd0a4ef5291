"""What a rank's writer has to do with those of other machines: mirrors its share, keeps theirs, serves both."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Notice
from ckpt_engine.persist import control, protocol
from ckpt_engine.persist.control import Answer, Reply
from ckpt_engine.persist.intake import Order
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.parity_sets import ParitySets
from ckpt_engine.persist.peer import SECONDS, Line, Server, connect
from ckpt_engine.persist.peer_guests import Guests
from ckpt_engine.persist.peer_mirror import Mirror
from ckpt_engine.persist.wire import Body
from ckpt_engine.store.throttle import Throttle
from ckpt_engine.store.transfer import RunText

_REMEMBERED = 16


class Peers:
    """From the start of the writer to the end of its process. Any thread.

    Args:
        ranks: whose writer it is; with `replicate` or `parity`.
        run: see `Mirror`.
        intact: see `Mirror`.
        emit: takes messages to the trainer.

    Raises:
        OSError: no port is to be had.

    Attributes:
        guests, parity: what is kept for others.
        answer: what the control socket would answer, once there is one.
    """

    def __init__(
        self,
        ranks: RankConfig,
        run: Callable[[], RunText | None],
        intact: Callable[[Order], bool],
        emit: Callable[[Body], object],
    ) -> None:
        self._ranks = ranks
        self._emit = emit
        self.guests = Guests()
        self.parity = ParitySets()
        self.answer: Answer = lambda _: Reply({"snapshot": None, "why": "the writer has just begun"})
        self._news = threading.Condition()
        self._lead: tuple[str, int] | None = None
        self._line: Line | None = None
        self._mirrored: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        rate = ranks.mirror_bytes_per_second
        throttle = Throttle(rate) if rate is not None else None
        self._mirror = Mirror(ranks, run, intact, self._done, self._notice, throttle)
        # All ranks tell rank 0's writer what was kept.
        where = ranks.address or "127.0.0.1"
        self._server = Server(where, ranks.session, self._serve, ranks.size if ranks.rank == 0 else 0)

    @property
    def host(self) -> str:
        """Where other writers reach this one, at `port`."""
        return self._server.host

    @property
    def port(self) -> int:
        """See `host`."""
        return self._server.port

    def meet(self, body: Body) -> None:
        """The ranks have said where everybody is.

        Args:
            body: `addresses`, host and port of each rank's writer; the ranks that are its `keepers` and `senders`, see
                `ranks.partners`; and whether this writer has `moved`: it has taken the place of one that died.
        """
        addresses = [(str(host), int(port)) for host, port in body["addresses"]]
        keepers, senders = [int(rank) for rank in body["keepers"]], [int(rank) for rank in body["senders"]]
        if self._ranks.parity:
            self.parity.expect([self._ranks.rank, *keepers])
        else:
            self.guests.expect(senders)
        self._lead = addresses[0]
        self._mirror.meet({rank: addresses[rank] for rank in keepers})
        if body["moved"]:
            # Whoever sends its shares here, and all who tell rank 0 that theirs were kept.
            others = senders if self._ranks.rank else range(1, self._ranks.size)
            me = {"what": "moved", "rank": self._ranks.rank, "port": self.port, "host": addresses[self._ranks.rank][0]}
            told = [addresses[one] for one in others]
            threading.Thread(target=self._tell, args=(told, me), name="ckpt-moved", daemon=True).start()

    def offer(self, order: Order) -> None:
        """The newest order is to be mirrored."""
        self._mirror.offer(order)

    def poke(self) -> None:
        """What `answer` says may have changed."""
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Idempotent."""
        self._mirror.close()
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._server.close()
        self.guests.close()
        self.parity.close()

    def _serve(self, request: dict[str, Any], line: Line) -> None:
        match request.get("what"):
            case "keep" | "add" as what:
                try:
                    (self.guests if what == "keep" else self.parity).receive(request, line)
                except CkptError as err:
                    line.send({"why": err.message})
                    raise  # what is left of the file is on the line
                line.send({"ok": True})
            case "give":
                self._give({**request, "what": control.SNAPSHOT}, line)
            case "parity":
                self._give({**request, "what": control.PARITY}, line)
            case "mirrored":
                self._count(str(request["snapshot"]), int(request["rank"]))
                line.send({"ok": True})
            case "moved":
                self._moved(int(request["rank"]), str(request["host"]), int(request["port"]))
                line.send({"ok": True})
            case what:
                line.send({"why": f"the writer does not know the request {what!r}"})

    def _tell(self, addresses: Sequence[tuple[str, int]], body: Body) -> None:
        for host, port in addresses:
            with suppress(OSError, CkptError):  # one that has moved itself hears of it at the next start
                line = connect(host, port, self._ranks.session)
                try:
                    line.send(body)
                    line.receive()
                finally:
                    line.close()

    def _moved(self, rank: int, host: str, port: int) -> None:
        self._mirror.move(rank, host, port)
        if rank == 0:
            self._lead = (host, port)

    def _give(self, wanted: dict[str, Any], line: Line) -> None:
        deadline = time.monotonic() + SECONDS / 2
        with self._news:
            while (reply := self.answer(wanted)) is None and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
        if reply is None or not reply.fds:
            line.send({"why": "it is not known yet" if reply is None else reply.body.get("why")})
            return
        (fd,) = reply.fds
        try:
            line.send(reply.body)
            nbytes = int(reply.body["nbytes"])
            line.send_file(memoryview(map_shared(fd, max(1, nbytes), writable=False)).cast("B")[:nbytes])
        finally:
            os.close(fd)

    def _done(self, snapshot: str) -> None:
        """The keepers have it: rank 0's writer counts that."""
        if self._ranks.rank == 0:
            self._count(snapshot, 0)
            return
        for _ in range(2):  # rank 0 may have another writer since
            line = self._line  # `close` takes it away at any moment
            try:
                if line is None:
                    assert self._lead is not None
                    line = self._line = connect(*self._lead, self._ranks.session)
                line.send({"what": "mirrored", "rank": self._ranks.rank, "snapshot": snapshot})
                line.receive()
            except (OSError, CkptError):
                if line is not None:
                    line.close()
                self._line = None  # if it stays away, rank 0 does not wait for ever
            else:
                return

    def _count(self, snapshot: str, rank: int) -> None:
        with self._lock:
            ranks = self._mirrored.setdefault(snapshot, set())
            ranks.add(rank)
            whole = len(ranks) == self._ranks.size
            while len(self._mirrored) > _REMEMBERED:
                del self._mirrored[next(iter(self._mirrored))]
        if whole:
            self._emit({"kind": protocol.MIRRORED, "snapshot": snapshot})

    def _notice(self, text: str, warns: bool) -> None:
        self._emit(protocol.event(Notice("WARNING" if warns else "INFO", text)))
