"""What a running writer has been told of slots, layouts and skeletons, and sending it what the next job refers to."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckpt_engine.persist.client import WriterClient
from ckpt_engine.persist.job import PersistJob
from ckpt_engine.snapshot.arena import Slot
from ckpt_engine.snapshot.plan import Plan


class Handover:
    """A running writer and what it has been told."""

    def __init__(self, client: WriterClient) -> None:
        self.client = client
        self._slots: set[int] = set()
        self._layout: int | None = None
        self._skeletons: dict[str, int] = {}
        self._lock = threading.Lock()

    def announce(self, slot: Slot, known: Iterable[Slot], plan: Plan) -> None:
        """Send what the next job refers to, unless the writer has it, and let it free what is no longer used.

        Every earlier job has been submitted by then: the fence comes before the next snapshot.
        """
        with self._lock:
            gone = self._slots - {s.index for s in known}
            self._slots -= gone
            if slot.index not in self._slots:
                self.client.attach_slot(slot.index, slot.fd, slot.nbytes)
                self._slots.add(slot.index)
            layouts = []
            if plan.layout.id != self._layout:
                self.client.define_layout(plan.layout)
                layouts = [self._layout] if self._layout is not None else []
                self._layout = plan.layout.id
            new = {ref.key: ref.id for ref in plan.skeletons}
            for ref in plan.skeletons:
                if self._skeletons.get(ref.key) != ref.id:
                    self.client.define_skeleton(ref.id, ref.tree)
            skeletons = [number for key, number in self._skeletons.items() if new.get(key) != number]
            self._skeletons = new
            if gone or layouts or skeletons:
                self.client.forget(slots=sorted(gone), layouts=layouts, skeletons=skeletons)

    def send(self, job: PersistJob, *, durable: bool) -> None:
        """Hand over a staged snapshot.

        Raises:
            WriterError: see `WriterClient.submit`.
        """
        with self._lock:
            if durable:
                self.client.submit(job)
            else:
                self.client.hold(job)
