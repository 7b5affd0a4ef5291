"""Several ranks of one run that train, and resume, on an order: `python -m benchmarks.training_team` is one of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.crew import PATIENCE_SECONDS, Answer, Crew, join_group, serve, take_stdout
from benchmarks.disk import evict, warm
from benchmarks.measure import timed
from benchmarks.memory_saver import LINGER_SECONDS, MemorySaver
from benchmarks.plain_loop import NoSaver, PlainLoop, Saver
from benchmarks.workloads import gpt2_state, state_bytes
from ckpt_engine import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks

DOOMED = "die"


class TrainingTeam(Crew):
    """Ranks that train one model together, and load another state; a context manager.

    Args:
        size: how many.
        folder: where snapshots go that would become durable.
        parameters: of the model.
        step_seconds: how long a step should take.
        nbytes: of the state to load, about.
    """

    def __init__(self, size: int, folder: Path, parameters: int, step_seconds: float, nbytes: int) -> None:
        self._folder = folder
        self._nbytes = nbytes
        arguments = [str(folder), str(nbytes), str(parameters), str(step_seconds)]
        super().__init__(size, "benchmarks.training_team", arguments)
        self.nbytes = int(self.all("ready")[0]["nbytes"])

    def train(self, saver: str, iterations: int) -> float:
        """Seconds of the slowest rank.

        Args:
            saver: `eager` or `lazy`, a snapshot in memory after each step; or `none`.
        """
        return max(one["seconds"] for one in self.all("train", saver=saver, iterations=iterations))

    def restart(self, name: str) -> Answer:
        """Kill as many trainers with a state in memory, and load it as they would when started again; the slowest rank.

        Returns:
            Seconds: `load` and `start` from memory; `fresh`, a start in a new folder; and `cold` and `warm`, to load
            the same state from disk.
        """
        root = self._folder / name
        with Crew(self.size, "benchmarks.training_team", [str(root), str(self._nbytes), DOOMED]) as doomed:
            doomed.tell(DOOMED)
            statuses = doomed.statuses()
        if set(statuses) != {-signal.SIGKILL}:
            raise RuntimeError(f"the trainers to be killed ended with statuses {statuses}")
        found = dict(_slowest(self.all("resume", root=str(root))))
        found["fresh"] = _slowest(self.all("begin", root=str(root.with_name(f"{name}-fresh"))))["start"]
        files = list((root / "data").glob("*.safetensors"))
        for kind, prepare in (("cold", evict), ("warm", warm)):
            for file in files:
                prepare(file)
            found[kind] = _slowest(self.all("load", root=str(root)))["load"]
        return found


def _slowest(answers: list[Answer]) -> Answer:
    return {key: max(one[key] for one in answers) for key in answers[0]}


class _Rank:
    """One rank's side."""

    def __init__(self, folder: Path, nbytes: int, parameters: int, step_seconds: float) -> None:
        self._live = gpt2_state(nbytes)
        self.loop = PlainLoop(parameters, step_seconds)
        batch = torch.tensor([self.loop.batch_size])
        dist.broadcast(batch, 0)
        self.loop.batch_size = int(batch)
        self.loop.model = DistributedDataParallel(self.loop.model)  # type: ignore[assignment]
        self.memory = {
            kind: MemorySaver(folder / kind, lazy=kind == "lazy", ranks=ProcessGroupRanks())
            for kind in ("eager", "lazy")
        }
        for saver in self.memory.values():
            saver.warm_up(self.loop)

    def handle(self, order: Mapping[str, Any]) -> Answer:
        match order["order"]:
            case "ready":
                return {"nbytes": state_bytes(self._live)}
            case "train":
                saver: Saver = self.memory.get(order["saver"], NoSaver())
                dist.barrier()
                return {"seconds": self.loop.train(order["iterations"], saver, 1)}
            case "resume":
                return self._resume(order["root"])
            case "begin":
                with _checkpointer(order["root"], memory=True) as ckpt:
                    return {"start": timed(ckpt.engine.start)}
            case _:
                with _checkpointer(order["root"]) as ckpt:
                    return {"load": timed(lambda: ckpt.load(into=self._live))}

    def _resume(self, root: str) -> Answer:
        with _checkpointer(root, memory=True) as ckpt:
            seconds = timed(lambda: ckpt.load(into=self._live))
            if ckpt.loaded is None or not ckpt.loaded.from_memory:
                raise RuntimeError("the state did not come from memory")
            return {"load": seconds, "start": timed(ckpt.engine.start)}


def _checkpointer(root: str, *, memory: bool = False) -> Checkpointer:
    """Every rank makes one, at the same time."""
    dist.barrier()
    tiers = ["memory", root] if memory else [root]
    return Checkpointer(tiers=tiers, ranks=ProcessGroupRanks(), **({"linger": LINGER_SECONDS} if memory else {}))


def _die_with_a_state(root: str, nbytes: int) -> None:
    """Keep a state in memory, and get killed as soon as all have it."""
    join_group()
    ckpt = _checkpointer(root, memory=True)
    ckpt.save(gpt2_state(nbytes), step=1, durable=False).wait(PATIENCE_SECONDS)
    dist.barrier()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)


def _main(folder: str, nbytes: str, *more: str) -> None:
    answers = take_stdout()
    if more == (DOOMED,):
        _die_with_a_state(folder, int(nbytes))
    join_group()
    rank = _Rank(Path(folder), int(nbytes), int(more[0]), float(more[1]))
    serve(answers, rank.handle)
    for saver in rank.memory.values():
        saver.checkpointer.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
