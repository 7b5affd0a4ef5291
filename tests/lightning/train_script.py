"""Trains in processes that can be killed: `python -m tests.lightning.train_script` reads jobs from its standard input.

Each job is one line of JSON. It runs in a fork of this process, so that the imports are paid once. It appends one line
per trace entry to its trace file while it trains, and a last line with the digest of where it ended. Answers on
standard output, one JSON line each: the child's process id when it starts, its exit status when it is gone. A child is
a process group of its own, as a job is under a scheduler.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ckpt_engine.store import layout
from ckpt_engine.store.storage.local import LocalStorage
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import CASES
from tests.lightning.runs import Entry, Recorder, final_digest, make_trainer, seed_everything, train

PATIENCE_SECONDS = 60.0


class TraceFile(list[Entry]):
    """A trace that is on disk up to its last entry, whatever happens to the process."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, entry: Entry) -> None:
        super().append(entry)
        os.write(self._descriptor, f"{entry!r}\n".encode())


class Pace(Callback):
    """Makes batches take some time, so that there are moments to be killed at."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_before_backward(self, *args: Any) -> None:
        time.sleep(self.seconds)


class Patience(Callback):
    """Begins no batch before the arena has room for the first snapshot: on a busy machine that takes several."""

    def __init__(self, ckpt: AdaptiveCheckpoint) -> None:
        self._ckpt = ckpt
        self._waited = False

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        run = self._ckpt._run
        if self._waited or run is None or not run.checkpointer.arena_bytes():
            return
        self._waited = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (run.checkpointer.ready() and run.checkpointer._pipeline._slots._warm_up is None):
            if time.monotonic() > deadline:
                raise TimeoutError("the arena does not become ready")
            time.sleep(0.001)


def slow_down(seconds: float) -> None:
    """Every data file takes so long to write; for a writer that is a thread."""
    put = LocalStorage.put

    def slow_put(self: LocalStorage, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        if name.startswith(layout.DATA):
            time.sleep(seconds)
        put(self, name, blocks, exclusive=exclusive)

    LocalStorage.put = slow_put  # type: ignore[method-assign]


def run(job: dict[str, Any]) -> None:
    """One training process."""
    torch.set_num_threads(1)
    if seconds := job.get("write_seconds"):
        slow_down(seconds)
    case = CASES[job["case"]]
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


def main() -> None:
    """Serve jobs until standard input ends."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs beside itself
            try:
                output = os.open(Path(job["trace"]).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                logging.basicConfig(level=logging.INFO)
                run(job)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0
                traceback.print_exc()
            except BaseException:  # noqa: BLE001 - the fork must never return into the server's loop
                traceback.print_exc()
            finally:
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps({"pid": child}), flush=True)
        _, wait_status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(wait_status)}), flush=True)


if __name__ == "__main__":
    main()
