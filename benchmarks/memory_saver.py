"""A saver that keeps the snapshot of every step in memory, and makes none durable."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine import wait_ready
from benchmarks.plain_loop import PlainLoop
from benchmarks.workloads import State, everything_lazy
from ckpt_engine import Checkpointer
from ckpt_engine.ranks.world import Ranks

LINGER_SECONDS = 60.0
_SLOTS = 5
"""More than any arena has."""


class MemorySaver:
    """The engine with a memory tier.

    Args:
        folder: where a snapshot would become durable.
        lazy: copied while training goes on.
        ranks: of how many this is one; None: it is alone.
    """

    def __init__(self, folder: Path, *, lazy: bool, ranks: Ranks | None = None) -> None:
        self.checkpointer = Checkpointer(tiers=["memory", str(folder)], ranks=ranks)
        self._lazy = everything_lazy if lazy else None
        self._step = 0

    def before_update(self) -> None:
        self.checkpointer.before_update()

    def save(self, state: State, step: int) -> None:
        self._step += 1
        handle = self.checkpointer.save(state, step=self._step, lazy=self._lazy, durable=False)
        if handle.skipped is not None:
            raise RuntimeError(f"the snapshot of step {step} was skipped: {handle.skipped}")

    def finish(self) -> None:
        """Nothing is written."""

    def warm_up(self, loop: PlainLoop) -> None:
        """Fill every slot once."""
        for _ in range(_SLOTS):
            self.checkpointer.prepare(loop.state(0), lazy=self._lazy)
            wait_ready(self.checkpointer, lambda: None)
            self.save(loop.state(0), 0)
            self.before_update()
