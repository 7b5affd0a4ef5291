"""A plain PyTorch training loop with steps of a chosen length that keep every core busy, and savers to run in it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from benchmarks.engine import save_timed
from benchmarks.measure import timed
from benchmarks.peers import Peer
from benchmarks.workloads import SEED, State, everything_lazy, perceptron, state_bytes
from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.save_request import SaveHandle

INPUTS = 256
MIN_BATCH, MAX_BATCH = 16, 4096
WAIT_SECONDS = 600.0


class Saver(Protocol):
    """What the loop calls. After `finish`, every state given to `save` is durable."""

    def before_update(self) -> None: ...

    def save(self, state: State, step: int) -> None: ...

    def finish(self) -> None: ...


class NoSaver:
    """Training without snapshots."""

    def before_update(self) -> None:
        """Nothing to wait for."""

    def save(self, state: State, step: int) -> None:
        """Nothing is saved."""

    def finish(self) -> None:
        """Nothing is in flight."""


class EngineSaver:
    """The engine; waits for the oldest snapshot where it would skip one, so that each one becomes durable."""

    def __init__(self, folder: Path, *, lazy: bool) -> None:
        self.checkpointer = Checkpointer(folder)
        self._lazy = everything_lazy if lazy else None
        self._handles: list[SaveHandle] = []

    def before_update(self) -> None:
        self.checkpointer.before_update()

    def save(self, state: State, step: int) -> None:
        if not self.checkpointer.engine.ready():
            next(handle for handle in self._handles if not handle.done()).wait(WAIT_SECONDS)
        self._handles.append(save_timed(self.checkpointer, state, step, lazy=self._lazy)[1])

    def finish(self) -> None:
        for handle in self._handles:
            handle.wait(WAIT_SECONDS)
        self._handles.clear()


class PeerSaver:
    """A peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def before_update(self) -> None:
        self.peer.before_update()

    def save(self, state: State, step: int) -> None:
        self.peer.save(state, step)

    def finish(self) -> None:
        self.peer.finish()


class PlainLoop:
    """A perceptron trained with Adam on seeded noise, other noise at every step.

    A batch that is learned by heart leaves subnormal gradients, and a step takes three times as long.

    Args:
        parameters: about this many; the state has three times as many fp32 numbers.
        step_seconds: how long a step should take; the batch size is chosen for it.
        batch_size: or this one.
    """

    def __init__(self, parameters: int, step_seconds: float, batch_size: int | None = None) -> None:
        self.model = perceptron(parameters, inputs=INPUTS)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        self._loss = nn.CrossEntropyLoss()
        self._noise = torch.Generator().manual_seed(SEED)
        self.batch_size = batch_size or self._batch_of(step_seconds)

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.state(0))

    def state(self, step: int) -> State:
        """The state as a user would gather it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}

    def train(self, iterations: int, saver: Saver, every: int) -> float:
        """Train with a snapshot after every `every`-th step; wall seconds until all of them are durable."""
        began = time.perf_counter()
        for step in range(1, iterations + 1):
            self.step(saver)
            if step % every == 0:
                saver.save(self.state(step), step)
        saver.before_update()
        saver.finish()
        return time.perf_counter() - began

    def step(self, saver: Saver | None = None) -> None:
        """One step; a saver is asked before the update."""
        inputs = torch.randn(self.batch_size, INPUTS, generator=self._noise)
        labels = torch.randint(10, (self.batch_size,), generator=self._noise)
        self._loss(self.model(inputs), labels).backward()
        if saver is not None:
            saver.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batch_of(self, step_seconds: float) -> int:
        low, high = MIN_BATCH, MAX_BATCH
        while high > 1.1 * low:
            self.batch_size = round(math.sqrt(low * high))
            self.step()
            # The least of several: what others do to the machine only ever adds.
            if min(timed(self.step) for _ in range(3)) < step_seconds:
                low = self.batch_size
            else:
                high = self.batch_size
        return low
