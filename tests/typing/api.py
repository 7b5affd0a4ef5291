"""The public API as type checkers see it; checked by mypy in `make lint`, never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, assert_type

import lightning as L
from accelerate import Accelerator

import accelerate_ckpt
from ckpt_engine import Checkpointer, CkptError, Config, SaveHandle, SnapshotInfo
from lightning_ckpt import AdaptiveCheckpoint

state: dict[str, Any] = {}

with Checkpointer("/data/run", overhead="1%", keep={"last": 3}) as ckpt:
    assert_type(ckpt, Checkpointer)
    assert_type(ckpt.config, Config)
    assert_type(ckpt.load(), Any | None)
    handle = ckpt.save(state, step=1, metrics={"loss": 0.5})
    assert_type(handle, SaveHandle)
    assert_type(handle.wait(timeout=10), str)
    assert_type(handle.done(), bool)
    assert_type(ckpt.before_update(), float)
    assert_type(ckpt.snapshots(), list[SnapshotInfo])
    assert_type(ckpt.wait(), bool)


class State(TypedDict):
    """What a user saves."""

    step: int


restored: State | None = Checkpointer("/data/run").load(into=State(step=1))
assert_type(Checkpointer("/data/run").load(into=[1, 2]), list[int] | None)

Checkpointer(Path("ckpt.yaml"))
Checkpointer({"tiers": "/data/run"})
Checkpointer("/data/run", resume={"from": "/data/other#150", "strict": False})
error: type[Exception] = CkptError
L.Trainer(callbacks=[AdaptiveCheckpoint("/data/run", overhead=0.01, max_lost_work="10 min")])

tracked = accelerate_ckpt.AdaptiveCheckpoint(Accelerator(), "/data/run", overhead=0.01)
assert_type(tracked.epoch, int)
assert_type(tracked.global_step, int)
assert_type(tracked.resumed_batches, int)
assert_type(tracked.metrics, dict[str, float])
accelerate_ckpt.TransformersCallback("ckpt.yaml", overhead="1%")
with Checkpointer("/data/run").track(model=state, optimizer=state) as loop:
    assert_type(loop.epoch, int)

# What is misspelt is found: each of these has an error, and mypy says where an `ignore` is needed no more.
Checkpointer("/data/run", overhed="1%")  # type: ignore[call-arg]
Checkpointer("/data/run", guard="nans")  # type: ignore[arg-type]
Checkpointer("/data/run", keep={"lst": 3})  # type: ignore[arg-type]
Checkpointer("/data/run", keep={"best": {"monitor": "loss", "mode": "least"}})  # type: ignore[arg-type]
Checkpointer(tiers=["/data/run", {"url": "s3://bucket/run", "evry": "10 min"}])  # type: ignore[list-item]
AdaptiveCheckpoint("/data/run", overhed="1%")  # type: ignore[call-arg]
AdaptiveCheckpoint("/data/run", log={"bar": "long"})  # type: ignore[arg-type]
accelerate_ckpt.AdaptiveCheckpoint(Accelerator(), "/data/run", on_eror="warn")  # type: ignore[call-arg]
accelerate_ckpt.TransformersCallback("/data/run", preemption={"grase": "2 min"})  # type: ignore[arg-type]
