"""Trains with Lightning in processes that can be killed: `python -m tests.lightning.train_script` serves jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ckpt_engine.store import names
from ckpt_engine.store.storage.local import LocalStorage
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning import loader_cases
from tests.lightning.cases import CASES
from tests.lightning.runs import Recorder, final_digest, make_trainer, seed_everything, train
from tests.support.trainers import TraceFile, serve, wait_for_the_arena

PATIENCE_SECONDS = 200.0


class Pace(Callback):
    """Makes batches take some time, so that there are moments to be killed at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_before_backward(self, *args: Any) -> None:
        time.sleep(self.seconds)


class Patience(Callback):
    """Begins no batch before there is room for the first snapshot, and the writer has time: it has low priority."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self._ckpt = ckpt
        self._waited = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        run = self._ckpt._run
        if self._waited == os.getpid() or run is None or not run.engine._pipeline.slots.nbytes():
            return
        self._waited = os.getpid()
        wait_for_the_arena(run.engine)
        run.engine.before_update()  # where no thread has time to copy, this does
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not run.engine.ready():
            if time.monotonic() > deadline:
                raise TimeoutError("no snapshot may be taken")
            time.sleep(0.001)


def slow_down(seconds: float) -> None:
    """Every data file takes so long to write; for a writer that is a thread."""
    put = LocalStorage.put

    def slow_put(self: LocalStorage, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        if name.startswith(names.DATA):
            time.sleep(seconds)
        put(self, name, blocks, exclusive=exclusive)

    LocalStorage.put = slow_put  # type: ignore[method-assign]


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    if seconds := job.get("write_seconds"):
        slow_down(seconds)
    case = {**CASES, **loader_cases.CASES}[job["case"]]
    case = replace(case, trainer={**case.trainer, **job.get("trainer", {})})
    seed_everything(job["seed"])
    trace = TraceFile(job["trace"])
    model = case.model(case, trace)
    options = {"every_n_steps": 1, "keep": {"last": 3}, **job.get("options", {})}
    ckpt = AdaptiveCheckpoint({"tiers": job["root"]} | options)
    patience = [Patience(ckpt)] if job.get("patient") else []
    trainer = make_trainer(case, [*case.callbacks(), Pace(job["pace"]), *patience, ckpt], Recorder(trace))
    train(trainer, model, case, "auto")
    trace.append(("digest", json.dumps(final_digest(trainer, model), sort_keys=True)))


if __name__ == "__main__":
    serve(run)
