"""Sends what a rank's writer holds to the writers that keep it on other machines, the newest snapshot first.

One keeper gets the share whole; of a parity group each gets a chunk. The trainer fills a slot anew while a slow link
still takes it in. So the share is copied before, and what was copied counts only if the slot cannot have changed
meanwhile. Nobody waits for a keeper: one that is gone is told, and tried again with the next snapshot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_engine.errors import CkptError
from ckpt_engine.persist import parts
from ckpt_engine.persist.intake import Order
from ckpt_engine.persist.job import RankConfig
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.parity import chunk
from ckpt_engine.persist.peer import Line, Share, connect, memory_file
from ckpt_engine.persist.pieces import Digesting
from ckpt_engine.store.digest import digest
from ckpt_engine.store.throttle import Throttle
from ckpt_engine.store.transfer import RunText

_IDLE_SECONDS = 60.0
_END_SECONDS = 1.0


@dataclass(slots=True)
class _Keeper:
    """Who keeps the share, or chunk `number` of it. `away`: it failed the last time, and that was told."""

    rank: int
    number: int
    address: tuple[str, int]
    line: Line | None = None
    line_to: tuple[str, int] | None = None
    away: bool = False

    def hang_up(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.close()


class Mirror:
    """One rank's sender; a thread of its own from `meet` on.

    Args:
        ranks: whose shares are sent.
        run: of the writer; None: it has not opened the run yet.
        intact: whether the slot of an order still has its bytes, and had them until now.
        done: told each snapshot that all keepers have whole.
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
        self._keepers: dict[int, _Keeper] = {}
        self._closed = self._failed = False
        self._pause = threading.Event()
        self._fd, self._nbytes = -1, 0
        self._thread = threading.Thread(target=self._run, name="ckpt-mirror", daemon=True)

    def meet(self, keepers: Mapping[int, tuple[str, int]]) -> None:
        """Send to these ranks' writers from now on; once. In a parity group each gets the chunk of its place."""
        with self._changed:
            self._keepers = {rank: _Keeper(rank, n, address) for n, (rank, address) in enumerate(keepers.items())}
        self._thread.start()

    def move(self, rank: int, host: str, port: int) -> None:
        """The writer of a rank is there now; it may be one that keeps nothing."""
        with self._changed:
            if rank in self._keepers:
                self._keepers[rank].address = (host, port)

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
        if self._keepers:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (order := self._take()) is not None:
            try:
                self._send(order)
            except (OSError, CkptError, ValueError) as err:
                if not self._failed:
                    told = f"the share of rank {self._ranks.rank} cannot be sent to other machines: {err}"
                    self._notice(f"{told}; it is in the memory of this machine only", True)
                self._failed = True
            else:
                self._failed = False
            finally:
                order.release()
        for keeper in self._keepers.values():
            keeper.hang_up()
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
        kept = [self._attempt(keeper, share, copy) for keeper in self._keepers.values()]
        if all(kept):
            self._done(staged.snapshot)

    def _attempt(self, keeper: _Keeper, share: Share, copy: memoryview) -> bool:
        """Whether a keeper has its part of the share now."""
        with self._changed:
            host, port = keeper.address
        who = f"rank {keeper.rank} at {host}:{port}"
        try:
            why = self._deliver(keeper, (host, port), share, copy)
        except (OSError, CkptError, ValueError) as err:
            keeper.hang_up()
            if not keeper.away:
                told = f"{who} does not take the share of rank {share.rank}: {err}"
                self._notice(f"{told}; it is in the memory of this machine only", True)
            keeper.away = True
            return False
        if why is not None:
            keeper.hang_up()
            self._notice(f"{who} did not keep the share of rank {share.rank}: {why}", True)
            return False
        if keeper.away:
            keeper.away = False
            self._notice(f"{who} is back", False)
        return True

    def _deliver(self, keeper: _Keeper, address: tuple[str, int], share: Share, copy: memoryview) -> str | None:
        """None, or why it is not kept; raises if the keeper is gone."""
        if keeper.line_to != address:
            keeper.hang_up()
        if keeper.line is None:
            keeper.line_to = address
            keeper.line = connect(*address, self._ranks.session)
        if self._ranks.parity:
            data = copy[chunk(share.nbytes, self._ranks.parity, keeper.number)]
            keeper.line.send({"what": "add", **share.described(), "digest": digest(data)})
        else:
            data = copy
            keeper.line.send({"what": "keep", **share.described()})
        keeper.line.send_file(data, self._pace)
        reply = keeper.line.receive()
        return None if reply.get("ok") else str(reply.get("why"))

    def _pace(self, nbytes: int) -> None:
        if self._throttle is not None and (seconds := self._throttle(nbytes)):
            self._pause.wait(seconds)
