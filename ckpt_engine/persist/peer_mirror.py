"""Sends what a rank's writer holds to the writer of its partner on another machine, the newest snapshot first.

The trainer fills a slot anew while a slow link still takes it in. So the share is copied before, and what was copied
counts only if the slot cannot have changed meanwhile. Nobody waits for a partner: one that is gone is told, and tried
again with the next snapshot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ckpt_engine.errors import CkptError
from ckpt_engine.persist import parts
from ckpt_engine.persist.intake import Order
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.peer import Line, Share, connect, memory_file
from ckpt_engine.persist.pieces import Digesting
from ckpt_engine.store.throttle import Throttle
from ckpt_engine.store.transfer import RunText

_IDLE_SECONDS = 60.0
_END_SECONDS = 1.0


class Mirror:
    """One rank's sender; a thread of its own from `meet` on.

    Args:
        ranks: whose shares are sent.
        run: of the writer; None: it has not opened the run yet.
        intact: whether the slot of an order still has its bytes, and had them until now.
        done: told each snapshot that the partner has whole.
        notice: takes a line for people, and whether it is a warning.
        throttle: paces what is sent; None: as fast as the link takes it.
    """

    def __init__(
        self,
        ranks: RankConfig,
        run: Callable[[], RunText | None],
        intact: Callable[[Order], bool],
        done: Callable[[str], object],
        notice: Callable[[str, bool], object],
        throttle: Throttle | None,
    ) -> None:
        self._ranks = ranks
        self._run_text = run
        self._intact = intact
        self._done = done
        self._notice = notice
        self._throttle = throttle
        self._changed = threading.Condition()
        self._next: Order | None = None
        self._partner: tuple[str, int] | None = None
        self._line: Line | None = None
        self._line_to: tuple[str, int] | None = None
        self._closed = self._away = False
        self._pause = threading.Event()
        self._fd, self._nbytes = -1, 0
        self._thread = threading.Thread(target=self._run, name="ckpt-mirror", daemon=True)

    def meet(self, host: str, port: int) -> None:
        """Send to the writer there from now on."""
        with self._changed:
            first, self._partner = self._partner is None, (host, port)
            self._changed.notify()
        if first:
            self._thread.start()

    def offer(self, order: Order) -> None:
        """Send this one next, instead of what waits."""
        order.retain()
        with self._changed:
            before, self._next = self._next, order
            self._changed.notify()
        if before is not None:
            before.release()

    def close(self) -> None:
        """Send nothing more. Idempotent; waits a little for what is being sent."""
        with self._changed:
            self._closed = True
            order, self._next = self._next, None
            self._changed.notify()
        if order is not None:
            order.release()
        self._pause.set()
        if self._partner is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (order := self._take()) is not None:
            try:
                self._send(order)
            except (OSError, CkptError, ValueError) as err:
                self._hang_up()
                if not self._away:
                    host, port = self._partner or ("", 0)
                    told = f"the partner of rank {self._ranks.rank} at {host}:{port} does not take its share: {err}"
                    self._notice(f"{told}; it is in the memory of this machine only", True)
                self._away = True
            finally:
                order.release()
        self._hang_up()
        if self._fd >= 0:
            os.close(self._fd)

    def _take(self) -> Order | None:
        with self._changed:
            while self._next is None and not self._closed:
                self._changed.wait(_IDLE_SECONDS)
            order, self._next = self._next, None
            return order

    def _send(self, order: Order) -> None:
        run = self._run_text()
        staged = order.staged(order.snapshot or "")
        nbytes = staged.data.nbytes
        if run is None:
            return
        if nbytes > self._nbytes:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._nbytes = memory_file(nbytes), nbytes
        copy = memoryview(map_shared(self._fd, nbytes, writable=True)).cast("B")
        with staged.slot.image(nbytes) as image:
            copy[:] = image
        if not self._intact(order):
            return  # a newer one is on its way
        digests = Digesting(copy, staged.cut_layout).result()
        manifest = staged.manifest(run.run, staged.whole(digests))
        part = parts.encode(parts.part_of(manifest, staged.cut_layout.layout, self._ranks))
        record = run.text.decode()
        share = Share(self._ranks.rank, staged.snapshot, part.decode(), record, staged.data.name, -1, nbytes)
        if self._line is not None and self._line_to != self._partner:
            self._hang_up()
        if self._line is None:
            assert self._partner is not None
            self._line_to = self._partner
            self._line = connect(*self._line_to, self._ranks.session)
        self._line.send({"what": "keep", **share.described()})
        self._line.send_file(copy, self._pace)
        reply = self._line.receive()
        if not reply.get("ok"):
            self._notice(f"the partner of rank {self._ranks.rank} did not keep its share: {reply.get('why')}", True)
            return
        if self._away:
            self._away = False
            self._notice(f"the partner of rank {self._ranks.rank} is back", False)
        self._done(staged.snapshot)

    def _pace(self, nbytes: int) -> None:
        if self._throttle is not None and (seconds := self._throttle(nbytes)):
            self._pause.wait(seconds)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
