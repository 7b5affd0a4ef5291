"""Several ranks of one run that save on an order: `python -m benchmarks.team` is one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.crew import PATIENCE_SECONDS, Answer, Crew, serve, take_stdout
from benchmarks.engine import save_timed, wait_ready
from benchmarks.workloads import change_everything, gpt2_state, state_bytes
from ckpt_engine import Checkpointer


class Team(Crew):
    """The ranks of one run, each with the whole state; a context manager.

    Args:
        size: how many.
        root: where their snapshots go.
        nbytes: of the state, about.
    """

    def __init__(self, size: int, root: Path | str, nbytes: int) -> None:
        super().__init__(size, "benchmarks.team", [str(root), str(nbytes)])
        self.root = Path(root)
        self._step = 0
        self.nbytes = int(self.all("ready")[0]["nbytes"])

    def in_turn(self) -> list[Answer]:
        """One snapshot: each rank takes and writes its part while all others do nothing; rank 0 is the last.

        Returns:
            For each rank `stall`, seconds until `save` returned, and `save`, seconds until its part was durable; of
            rank 0 that is the commit, as the parts of the others are there.
        """
        self._next()
        found = [self.one(rank, "save", step=self._step) for rank in reversed(range(self.size))]
        return found[::-1]

    def together(self) -> list[Answer]:
        """As `in_turn`, where all ranks begin at once."""
        self._next()
        return self.all("save", step=self._step)

    def written_bytes(self) -> list[int]:
        """What each rank has written of the last snapshot."""
        newest = max(path.name.partition("-r")[0] for path in (self.root / "data").glob("*.safetensors"))
        return [path.stat().st_size for path in sorted((self.root / "data").glob(f"{newest}-r*"))]

    def _next(self) -> None:
        self._step += 1
        self.all("change")


def _checkpointer(root: str) -> Checkpointer:
    if int(os.environ["WORLD_SIZE"]) == 1:
        return Checkpointer(root, keep={"last": 1})
    import torch.distributed as dist

    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    dist.init_process_group("gloo")
    return Checkpointer(root, ranks=ProcessGroupRanks(), keep={"last": 1})


def _serve(root: str, nbytes: int) -> None:
    answers = take_stdout()
    torch.set_num_threads(1)
    state = gpt2_state(nbytes)
    with _checkpointer(root) as checkpointer:
        checkpointer.prepare(state)

        def handle(order: Mapping[str, Any]) -> Answer:
            if order["order"] == "ready":
                return {"nbytes": state_bytes(state)}
            if order["order"] == "change":
                change_everything(state)  # else one process alone would write only what is new
                return {}
            return _save(checkpointer, state, order["step"])

        serve(answers, handle)


def _save(checkpointer: Checkpointer, state: Any, step: int) -> dict[str, float]:
    wait_ready(checkpointer, lambda: time.sleep(0.001))
    began = time.perf_counter()
    stall_seconds, handle = save_timed(checkpointer, state, step)
    handle.wait(PATIENCE_SECONDS)
    return {"stall": stall_seconds, "save": time.perf_counter() - began}


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
