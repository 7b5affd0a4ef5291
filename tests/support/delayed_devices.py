"""A device of host memory where training works at once and copies are delayed until training waits for them.

Whatever changes a tensor between the snapshot instant and the fence changes it before it is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ckpt_engine import Checkpointer
from ckpt_engine.snapshot import pipeline
from ckpt_engine.snapshot.arena import Slots
from ckpt_engine.snapshot.cuda import DeviceCopies
from ckpt_engine.snapshot.pipeline import Pipeline
from ckpt_engine.snapshot.stage import Copier, Stager
from ckpt_engine.state import entries
from ckpt_engine.state.layout import Planner
from tests.snapshot.streams import DEVICES, WAIT_SECONDS, Event, FakeDevices, Stream


class DelayedDevices(FakeDevices):
    """All tensors are on its first device. Copies run where training waits for them, and end behind the fence."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, Stream] = {}
        self._starting = self._released = False

    def home(self, tensor: torch.Tensor) -> torch.device | None:
        return DEVICES[0]

    def mark(self, stream: Stream) -> Event:
        event = super().mark(stream)
        with self._lock:
            self._of[id(event)] = stream
            if stream in self.main.values():
                self._run_until(event)
        return event

    def hold(self, stream: Stream, event: Event) -> None:
        if stream not in self.main.values():
            super().hold(stream, event)
            return
        with self._lock:
            self._run_until(event)
            if not self._starting:
                self._released = True
                self._moved.notify_all()

    def wait(self, event: Event) -> None:
        with self._lock:
            if not self._moved.wait_for(lambda: self._released, WAIT_SECONDS):
                raise AssertionError("training never waited for the copies")
            self._run_until(event)

    def _run_until(self, event: Event) -> None:
        work = self._of[id(event)].work
        while not event.happened:
            first = work[0]
            if isinstance(first, Event):
                self._run_until(first)
            else:
                first()
            work.popleft()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """The copies of a snapshot are queued: what training waits for within is read, the rest is delayed."""
        with self._lock:
            self._starting, self._released = True, False
        try:
            yield
        finally:
            self._starting = False


class _DelayedCopies(DeviceCopies):
    def start(self, plan: object, flight: Any) -> None:
        with self.runtime.starting():  # type: ignore[attr-defined]
            super().start(plan, flight)


@dataclass
class Instants:
    """What each snapshot of a run should be: the state as it was when `save` was called.

    Args:
        by_step: the newest one of each step.
    """

    by_step: dict[int, Any] = field(default_factory=dict)

    def torn(self, root: Path) -> list[str]:
        """Where the durable snapshots of the run differ from their instants."""
        found = list[str]()
        with Checkpointer(str(root), writer="thread") as ckpt:
            infos = ckpt.snapshots()
            assert infos, "nothing is durable"
            for info in infos:
                loaded, expected = ckpt.load(info.step), self.by_step[info.step]
                rows = dict(pytree.tree_flatten_with_path(loaded)[0])
                for path, value in pytree.tree_flatten_with_path(expected)[0]:
                    if isinstance(value, torch.Tensor) and not _same(value, rows.get(path)):
                        found.append(f"step {info.step}: {pytree.keystr(path)}")
        return found


def _same(a: torch.Tensor, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


def record_instants(monkeypatch: pytest.MonkeyPatch) -> Instants:
    """Keep a copy of each state that is saved."""
    instants, save = Instants(), Pipeline._save

    def recording(self: Pipeline, state: Any, wanted: Any, snapshot: str | None) -> Any:
        before = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, state)
        handle = save(self, state, wanted, snapshot)
        if handle.skipped is None:
            instants.by_step[wanted.step] = copy.copy(before)
        return handle

    monkeypatch.setattr(Pipeline, "_save", recording)
    return instants


def delay_copies(monkeypatch: pytest.MonkeyPatch) -> DelayedDevices:
    """All tensors are on a device whose copies are delayed, in every engine that is made from now on."""
    devices = DelayedDevices()
    monkeypatch.setattr(entries, "device_of", devices.home)
    monkeypatch.setattr(pipeline, "Slots", lambda count: Slots(count, devices))

    def delayed(planner: Planner, is_eager: bool) -> Stager:
        made = Stager(planner, is_eager)
        made.copier = Copier(None, _DelayedCopies(devices))
        return made

    monkeypatch.setattr(pipeline, "Stager", delayed)
    return devices
