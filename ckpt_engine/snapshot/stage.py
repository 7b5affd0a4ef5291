"""Stages one snapshot into an arena slot.

Host memory is copied before `begin` returns: whatever changes it afterwards, the slot has the bytes of the instant.
Its copies are plain memory moves shared out over our own threads. torch's parallel copy joins all its threads after
every single tensor, and with hundreds of tensors each join can wait for a scheduler slice as soon as something else
uses a core.

Device tensors are queued in streams of their own (`cuda`). Lazy ones are copied while the next forward and backward run
(CheckFreq's two-phase snapshot, FAST'21 section 4.1); `fence` holds back what would change them, and `proof` finds what
changed all the same.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpt_engine.errors import StateError
from ckpt_engine.snapshot.copying import (
    FENCE_TIMEOUT_SECONDS,
    CopyTasks,
    SlotMemory,
    join,
    run_task,
    tasks_of,
)
from ckpt_engine.snapshot.cuda import DeviceCopies, Flight, Load
from ckpt_engine.state.flatten import LazyPredicate
from ckpt_engine.state.layout import CapturedState, Planner

_HELP_BYTES = 4 << 20
_MAX_HELPERS = 3


class Staging:
    """The copy of one captured state into arena views.

    `begin` returns when training may continue: every host tensor is copied, and work that is queued on a device from
    then on waits there until its eager tensors are read. `on_staged` is called exactly once, by whichever thread finds
    everything copied, with the error that stopped a copy or None. It must not raise. Where `begin` raises and no device
    copies, it is not called.

    Args:
        capture: what to copy.
        views: destinations, one per `capture.plan.sources`.
        slot: what the views are in.
    """

    def __init__(
        self,
        capture: CapturedState,
        views: Sequence[torch.Tensor],
        on_staged: Callable[[BaseException | None], None],
        *,
        slot: SlotMemory,
    ) -> None:
        self._on_staged = on_staged
        self._slot = slot
        self._reported = threading.Lock()
        self._settled = threading.Event()
        self._capture: CapturedState | None = capture
        self._views = views
        self.host = CopyTasks(())
        self._flight: Flight | None = None
        self._fenced = False

    def begin(self, copier: Copier) -> None:
        """Copy what is in host memory with the copier's help, and queue the rest. Training thread only.

        Raises:
            StateError: a copy failed.
        """
        try:
            self._begin(copier)
        except BaseException as err:
            self.host.stop(err)
            self.host.complete.wait(FENCE_TIMEOUT_SECONDS)  # the slot is filled again after this event
            if self._flight is None:
                self._reported.acquire(blocking=False)  # the caller has the error
                self._settled.set()
            self._settle()
            raise

    def _begin(self, copier: Copier) -> None:
        assert self._capture is not None, "it begins once"
        capture, self._capture = self._capture, None
        plan, sources = capture.plan, capture.plan.sources
        if plan.aboard:
            self._flight = self._new_flight(copier.devices, capture)
        apart = [(self._views[i], sources[i].tensor(capture.arrays)) for i in plan.apart]
        addresses = np.array(capture.addresses, np.uint64)
        runs = [run_task(run, self._slot, capture, addresses) for run in plan.runs]
        self._fenced = self._flight is None
        if self._flight is not None:
            copier.devices.start(plan, self._flight)
        nbytes = sum([view.nbytes for view, _ in apart]) + sum([int(run.nbytes.sum()) for run in plan.runs])
        self.host = CopyTasks([*tasks_of(apart, self._slot), *runs])
        if nbytes >= _HELP_BYTES:
            copier.submit(self)
        self.host.finish()
        self._raise()
        self._settle()

    def fence(self) -> float:
        """Return when the lazy tensors may change; seconds waited. Training thread only.

        What is queued from now on in the stream that is current waits until they have been read, and the host does not.
        Call it again where another stream is current.

        Raises:
            WaitTimeoutError: the device did not reach the copies.
            StateError: a copy failed.
        """
        began = time.perf_counter()
        self._fenced = True
        if self._flight is not None:
            self._flight.fence()
        self._raise()
        return time.perf_counter() - began

    def wait(self, timeout: float) -> bool:
        """After the fence: wait until every byte is in the arena; False if `timeout` seconds were not enough."""
        return self._settled.wait(timeout)

    @property
    def complete(self) -> bool:
        """Whether every byte is in the arena and `on_staged` has been called."""
        return self._settled.is_set()

    @property
    def over(self) -> bool:
        """Whether it is complete, and the fence was kept."""
        return self._fenced and self.complete

    def _new_flight(self, devices: DeviceCopies, capture: CapturedState) -> Flight:
        """The flight of the device tensors, which has not started."""
        plan = capture.plan
        own = [plan.sources[index] for index in plan.aboard]
        tensors = [source.tensors(capture.arrays) for source in own]
        load = Load(
            [self._views[index] for index in plan.aboard],
            list(itertools.chain.from_iterable(tensors)),
            list(map(len, tensors)),
            [source.lazy for source in own],
            [source.path for source in own],
        )
        return Flight(devices.runtime, load, self._settle)

    def _settle(self) -> None:
        flight = self._flight
        if not self.host.complete.is_set() or (flight is not None and not flight.complete.is_set()):
            return
        if self._reported.acquire(blocking=False):
            try:
                self._on_staged(self._error() or (None if flight is None else flight.torn))
            finally:
                self._settled.set()

    def _error(self) -> BaseException | None:
        return self.host.error or (None if self._flight is None else self._flight.error)

    def _raise(self) -> None:
        if (error := self._error()) is not None:
            raise StateError(f"staging failed: {error}") from error


class Copier:
    """The background threads that help to copy; one per Checkpointer, started when first needed.

    While training waits it copies itself, and a thread for every other core helps. `devices` copies what is on devices.
    """

    def __init__(self, helpers: int | None = None, devices: DeviceCopies | None = None) -> None:
        self.devices = devices or DeviceCopies()
        cores = len(os.sched_getaffinity(0))
        self._count = max(1, min(_MAX_HELPERS, cores - 1)) if helpers is None else helpers
        self._work: queue.SimpleQueue[Staging | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, staging: Staging) -> None:
        """Start helping; returns at once."""
        for index in range(len(self._threads), self._count):
            thread = threading.Thread(target=self._run, name=f"ckpt-stage-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)
        for _ in self._threads:
            self._work.put(staging)

    def close(self, timeout: float) -> None:
        """Stop after what is being copied.

        Raises:
            WaitTimeoutError: a thread did not stop.
        """
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + timeout
        self.devices.close(timeout)
        for thread in self._threads:
            join(thread, deadline - time.monotonic(), f"a staging thread did not stop within {timeout:.0f} s")

    def _run(self) -> None:
        while (staging := self._work.get()) is not None:
            while staging.host.run_some():
                pass
            del staging  # the tensors of a snapshot are not kept alive by threads that wait for the next one


@dataclass(eq=False)
class Stager:
    """What captures a state and the copy that is under way, of which training must not change the sources.

    Training thread only.

    Args:
        planner: of the states.
        is_eager: everything is copied before training continues; also where a lazy copy was torn, from then on.

    Attributes:
        copier: helps to copy.
        staging: the copy that devices make while training continues; None: there is none.
    """

    planner: Planner
    is_eager: bool
    copier: Copier = field(default_factory=Copier, init=False)
    staging: Staging | None = field(default=None, init=False)

    def capture(self, state: Any, lazy: LazyPredicate | None) -> CapturedState:
        """This instant of a state. `lazy`: which of its tensors are copied while training continues."""
        return self.planner.capture(state, None if self.is_eager else lazy)

    def fence(self) -> float:
        """Return when the weights may change; seconds waited."""
        staging = self.staging
        if staging is None:
            return 0.0
        try:
            waited = staging.fence()
        except Exception:
            self.staging = None
            raise  # after a Ctrl-C it is still there: the next update has to wait as well
        if staging.complete:  # else devices still copy: the next update may be queued in another stream
            self.staging = None
        return waited

    def finish(self, timeout: float) -> bool:
        """After the fence: wait until the copy is with the writer; False if it takes too long."""
        if self.staging is not None and not self.staging.wait(timeout):
            return False
        self.staging = None
        return True
