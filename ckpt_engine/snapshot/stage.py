"""Stages one snapshot into an arena slot: eagerly before training goes on, or lazily behind a fence.

Lazy staging (CheckFreq's two-phase snapshot, FAST'21 section 4.1) copies what does not change before the next update
on a background thread while forward and backward run. `fence` waits for the rest and helps with it.

Device tensors are queued in streams of their own (`cuda`). The copies of host tensors are plain memory moves
shared out over our own threads. torch's parallel copy joins all its threads after
every single tensor, and with hundreds of tensors each join can wait for a scheduler slice as soon as something else
uses a core.

Whether copying behind training (lazily) is cheaper than copying before it goes on.

The fence at optimizer steps: lazily copied weights are whole before any optimizer of the process changes them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt_engine.errors import StateError, WaitTimeoutError
from ckpt_engine.snapshot.copying import (
    FENCE_TIMEOUT_SECONDS,
    Claims,
    Compare,
    CopyTasks,
    SlotMemory,
    chunks_of,
    run_task,
    tasks_of,
)
from ckpt_engine.snapshot.cuda import DeviceCopies, Flight, Load
from ckpt_engine.snapshot.ownership import leavers
from ckpt_engine.state.entries import EntrySource
from ckpt_engine.state.flatten import show_path
from ckpt_engine.state.layout import CapturedState

_HELP_BYTES = 4 << 20
_MAX_HELPERS = 3
_IDLE_SECONDS = 5.0


class Staging:
    """The copy of one captured state into arena views.

    `begin` returns when training may go on: every host tensor that is not lazy is copied, and work that is queued on a
    device from then on waits there for those of its tensors that are not lazy. The rest is copied by the copier's
    threads, and by the training thread in `fence`. `on_staged` is called exactly once, by whichever thread finds
    everything copied, with the error that stopped a copy or None. It must not raise.

    Args:
        capture: what to copy.
        views: destinations, one per `capture.plan.sources`.
        slot: what the views are in.
        check: keep an eager copy of the lazy part and compare at the fence (debug mode).
        claims: what the views hold already. A hinted claim that is wrong is an error for `on_staged`, and not raised.
    """

    def __init__(
        self,
        capture: CapturedState,
        views: Sequence[torch.Tensor],
        on_staged: Callable[[BaseException | None], None],
        *,
        slot: SlotMemory,
        check: bool = False,
        claims: Claims | None = None,
    ) -> None:
        self._on_staged = on_staged
        self._slot = slot
        self._told = threading.Lock()
        self._settled = threading.Event()
        self._capture: CapturedState | None = capture
        self._views = views
        self._keep_copy = check
        self._check: list[tuple[EntrySource, torch.Tensor, torch.Tensor]] = []
        self.eager = self.lazy = self.hinted = CopyTasks(())
        self._claims = claims or Claims()
        self._flight: Flight | None = None
        self._fenced = False

    def begin(self, copier: Copier) -> None:
        """Copy the eager part with the copier's help and leave the lazy part to it. Training thread only.

        Raises:
            StateError: a copy failed.
        """
        try:
            self._begin(copier)
        except BaseException as err:
            for part in (self.eager, self.lazy, self.hinted):
                part.stop(err)
                part.complete.wait(FENCE_TIMEOUT_SECONDS)  # the slot is filled again after this event
            self._settle()
            raise

    def _begin(self, copier: Copier) -> None:
        assert self._capture is not None, "it begins once"
        capture, self._capture = self._capture, None
        plan = capture.plan
        if self._keep_copy:
            lazies = [(source, view) for source, view in zip(plan.sources, self._views, strict=True) if source.lazy]
            self._check = [(s, view, s.tensor(capture.arrays).detach().clone()) for s, view in lazies]
        compared = self._claims.by_source
        tasks = [
            Compare(move, claim)
            for index, claim in compared.items()
            for move in chunks_of(self._views[index], plan.sources[index].tensor(capture.arrays), self._slot)
        ]
        sources = plan.sources
        left = [index for index in plan.apart if index not in compared]
        if plan.aboard:
            self._board(copier.devices, capture)
        pairs = [(self._views[index], sources[index].tensor(capture.arrays)) for index in left]
        lazy = [(view, t.detach()) for index, (view, t) in zip(left, pairs, strict=True) if sources[index].lazy]
        eager = [pair for index, pair in zip(left, pairs, strict=True) if not sources[index].lazy] if lazy else pairs
        for task in tasks:
            if task.claim.hinted and not task.seems_right():
                task.claim.hinted = False
        self.hinted = CopyTasks([task for task in tasks if task.claim.hinted])
        now, later = tasks_of(eager, self._slot), tasks_of(lazy, self._slot)
        addresses, run_bytes = np.array(capture.addresses, np.uint64), 0
        for run in plan.runs:
            (later if run.lazy else now).append(run_task(run, self._slot, capture, addresses))
            run_bytes += 0 if run.lazy else int(run.nbytes.sum())
        self.eager = CopyTasks([*now, *[task for task in tasks if not task.claim.hinted]])
        self.lazy = CopyTasks(later)
        self._fenced = self.lazy.complete.is_set() and self._flight is None
        if self._flight is not None:
            copier.devices.start(plan, self._flight)
        compared_bytes = sum([task.move.nbytes for task in tasks if not task.claim.hinted])
        worth_help = compared_bytes + run_bytes + sum([v.nbytes for v, _ in eager]) >= _HELP_BYTES
        if worth_help or not self.lazy.complete.is_set():
            copier.submit(self)
        self.eager.finish()
        if not self.hinted.complete.is_set():
            copier.submit(self)
        self._settle()
        self._raise()

    def help_lazily(self) -> None:
        """Copy the lazy part and compare what is hinted; the copier's thread."""
        while self.lazy.run_some():
            pass
        # Training waits for the eager part, and comparing takes memory bandwidth from it.
        while self.eager.complete.is_set() and self.hinted.run_some():
            pass
        self._settle()

    def finish_hints(self) -> None:
        """Return when the tensors that are hinted to be unchanged may change. Any thread.

        Raises:
            WaitTimeoutError: another thread did not finish its last chunk.
        """
        self.hinted.finish()
        self._settle()

    def fence(self) -> float:
        """Return when the lazy tensors may change; seconds waited. Training thread only.

        Host tensors are in the arena then. Device tensors may not be: what is queued from now on in the stream that is
        current waits until they have been read, and the host does not. Call it again where another stream is current.

        Raises:
            WaitTimeoutError: the background thread did not finish its last chunk.
            StateError: a copy failed, or (debug mode) lazily staged bytes changed before they were copied.
        """
        began = time.perf_counter()
        self._fenced = True
        self.lazy.finish()
        self.hinted.finish()
        if self._flight is not None:
            self._flight.fence()
        self._settle()
        if self._flight is None or self._check:
            self._require_settled()
        self._raise()
        waited = time.perf_counter() - began
        for source, view, expected in self._check:
            if not _same_bytes(view, expected.cpu()):
                raise StateError(
                    f"{show_path(source.path)} changed between the snapshot instant and the fence",
                    hint="it must not be declared lazy, or the fence comes too late",
                )
        self._check = []
        return waited

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

    def _board(self, devices: DeviceCopies, capture: CapturedState) -> None:
        """Prepare the flight of the device tensors."""
        plan = capture.plan
        own = [plan.sources[index] for index in plan.aboard]
        tensors = [source.tensors(capture.arrays) for source in own]
        load = Load(
            [self._views[index] for index in plan.aboard],
            list(itertools.chain.from_iterable(tensors)),
            list(map(len, tensors)),
            [source.lazy for source in own],
        )
        self._flight = Flight(devices.runtime, load, self._settle)

    def _settle(self) -> None:
        for part in self._parts():
            if not part.complete.is_set():
                return
        if self._told.acquire(blocking=False):
            try:
                self._on_staged(self._error())
            finally:
                self._settled.set()

    def _require_settled(self) -> None:
        if not self._settled.wait(FENCE_TIMEOUT_SECONDS):
            raise WaitTimeoutError("the staged snapshot was not handed over")

    def _parts(self) -> tuple[CopyTasks | Flight, ...]:
        own = (self.eager, self.lazy, self.hinted)
        return own if self._flight is None else (*own, self._flight)

    def _error(self) -> BaseException | None:
        return next((part.error for part in self._parts() if part.error is not None), None)

    def _raise(self) -> None:
        error = next((part.error for part in self._parts() if part is not self.hinted and part.error), None)
        if error is not None:
            raise StateError(f"staging failed: {error}") from error


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0:
        return True
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


class Copier:
    """The background threads that help to copy; one per Checkpointer, started when first needed.

    While training waits for an eager part it copies itself, and a thread for every other core helps. Lazy parts are
    copied by as many threads as there are cores: a step that uses all cores ends when the slowest of them does, so that
    one busy thread would delay it by the whole copy, and a thread on each core by a share. `devices` copies what is on
    devices.
    """

    def __init__(self, helpers: int | None = None, devices: DeviceCopies | None = None) -> None:
        self.devices = devices or DeviceCopies()
        cores = len(os.sched_getaffinity(0))
        self._eager = max(1, min(_MAX_HELPERS, cores - 1)) if helpers is None else helpers
        self._count = max(1, min(_MAX_HELPERS, cores)) if helpers is None else helpers
        self._current: Staging | None = None
        self._turn = 0
        self._not_begun = 0
        """Threads that have not looked at the current staging yet."""
        self._wake = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def submit(self, staging: Staging) -> None:
        """Start helping; returns at once."""
        with self._wake:
            if not self._threads:
                for index in range(self._count):
                    thread = threading.Thread(target=self._run, args=(index,), name=f"ckpt-stage-{index}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            self._current = staging
            self._turn += 1
            self._not_begun = self._count
            self._wake.notify_all()

    def close(self, timeout: float) -> None:
        """Stop after the chunk being copied.

        Raises:
            WaitTimeoutError: a thread did not stop.
        """
        with self._wake:
            self._closed = True
            self._current = None
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        self.devices.close(timeout)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitTimeoutError(f"a staging thread did not stop within {timeout:.0f} s")

    def _run(self, index: int) -> None:
        seen = 0
        while True:
            with self._wake:
                while self._turn == seen and not self._closed:
                    self._wake.wait(_IDLE_SECONDS)
                if self._closed:
                    return
                seen, staging = self._turn, self._current
                self._not_begun -= 1
                if self._not_begun == 0:
                    # The tensors of a snapshot are not kept alive by threads that wait for the next one.
                    self._current = None
            if staging is None:
                continue
            while index < self._eager and staging.eager.run_some():
                pass
            staging.help_lazily()
            del staging


def copies_lazily(setting: Literal["auto", "on", "off"], device: torch.device) -> bool:
    """Whether to stage lazily.

    A lazy copy takes time from forward and backward. If they use all cores, whatever waits for the slowest of them
    loses more than with an eager copy, which has all cores to itself (docs/benchmarks.md, "Every iteration").

    Args:
        setting: the option `lazy`.
        device: where training computes.
    """
    if setting == "auto":
        return device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))
    return setting == "on"


_log = logging.getLogger(__name__)

Fence = Callable[[], object]


class StepFence:
    """A process-wide hook on `torch.optim.Optimizer.step`, for steps that are not announced.

    Args:
        fence: waits for lazy copies; cheap where none is under way.

    With a closure the fence is put behind the closure, because torch's own optimizers run it before they change
    anything. An optimizer whose `step` is not torch's may change weights first, so there the fence comes before it.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._reported: set[type] = set()
        self._handle: RemovableHandle | None = None

    def install(self) -> None:
        """Start watching; harmless when installed already."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._before_step)
            leavers.add(self)

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def leave_fork(self) -> None:
        """See `Leaver`: a fork has copies of the weights, and nothing copies them."""
        self.remove()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._runs_closure_first(optimizer):
            self._fence()
            return None

        def fenced() -> Any:
            result = closure()
            self._fence()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": fenced}
        return (args[0], fenced, *args[2:]), kwargs

    def _runs_closure_first(self, optimizer: torch.optim.Optimizer) -> bool:
        kind = type(optimizer)
        if getattr(kind.step, "__module__", "").startswith("torch.optim"):
            return True
        if kind not in self._reported:
            self._reported.add(kind)
            _log.info(
                "%s.%s has its own step(): snapshots are copied before its closure runs, not during it",
                kind.__module__,
                kind.__qualname__,
            )
        return False
