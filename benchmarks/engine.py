"""Drive the engine in benchmarks: a snapshot that was not taken must never count as a fast one."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.workloads import State
from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.state.flatten import LazyPredicate

READY_SECONDS = 120.0


def save_timed(
    checkpointer: Checkpointer, state: State, step: int, *, lazy: LazyPredicate | None = None
) -> tuple[float, SaveHandle]:
    """Save; seconds until `save` returned, and the handle.

    Raises:
        RuntimeError: the snapshot was skipped.
    """
    began = time.perf_counter()
    handle = checkpointer.save(state, step=step, lazy=lazy)
    seconds = time.perf_counter() - began
    if handle.skipped is not None:
        raise RuntimeError(f"the snapshot of step {step} was skipped: {handle.skipped}")
    return seconds, handle


def wait_ready(checkpointer: Checkpointer, work: Callable[[], object]) -> None:
    """Do `work` until the next snapshot would be taken.

    Raises:
        TimeoutError
    """
    deadline = time.monotonic() + READY_SECONDS
    while not checkpointer.engine.ready():
        work()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no snapshot could be taken for {READY_SECONDS:.0f} s")
