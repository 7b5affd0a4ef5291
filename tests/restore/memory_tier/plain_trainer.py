"""A plain PyTorch loop with a memory tier, in processes that can be killed: reads jobs from its standard input.

A fork appends one line per thing that happens to its trace file.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.writer import launch  # noqa: F401 - otherwise imported when needed, in each fork
from tests.support.trainers import serve, wait_for_the_arena

SEED = 7
BATCH = 4
READY_SECONDS = 60.0
SLOW_SECONDS = 1.0
"""Of a step after `slow_after` ones: a trainer that is to be killed is not over when somebody gets to that late."""


class Training:
    """A small network with dropout and Adam, trained on noise: weights, moments and the random stream all matter."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.width = width
        self.steps = 0

    def forward_backward(self) -> float:
        x = torch.randn(BATCH, self.width)
        loss = self.model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.steps = state["step"]

    def digest(self) -> str:
        """Every bit that a resumed run has to have in common with one that was never killed."""
        sha = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            sha.update(name.encode() + value.numpy().tobytes())
        for number, moments in sorted(self.optimizer.state_dict()["state"].items()):
            for name, value in sorted(moments.items()):
                sha.update(f"{number}{name}".encode() + value.numpy().tobytes())
        sha.update(torch.get_rng_state().numpy().tobytes())
        return sha.hexdigest()


class Trace:
    """What happened, on disk up to its last line whatever happens to the process."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, what: str, step: int, value: str = "") -> None:
        os.write(self._descriptor, f"{what} {step} {value}\n".encode())


def lazily(path: tuple[object, ...]) -> bool:
    """Weights and moments change in the update only; the random stream at once."""
    return path[0] in ("model", "optimizer") and path[-1] != "step"


def run(job: dict[str, Any]) -> None:
    """One training process."""
    trace = Trace(job["trace"])
    training = Training(job["width"])
    tiers = [{"url": "memory", "every_n_steps": 1}, job["root"]] if job["memory"] else job["root"]
    ckpt = Checkpointer(tiers=tiers, linger=job["linger"], keep={"last": 2})
    found = ckpt.load()
    if found is not None:
        training.restore(found)
    loaded = ckpt.loaded
    place = loaded.place if loaded else "nowhere"
    trace.tell("resumed", training.steps, f"{place} {loaded.lost_steps if loaded else None}")
    predicate = lazily if job["lazy"] else None
    ckpt.prepare(training.state(), lazy=predicate)
    # Nothing is trained before somebody is there to keep it, and has room for it.
    ckpt.wait()
    wait_for_the_arena(ckpt.engine)
    deadline = time.monotonic() + READY_SECONDS
    while not ckpt.engine.ready():
        assert time.monotonic() < deadline, "no snapshot may be taken"
        time.sleep(0.001)
    handles: list[SaveHandle | None] = []
    slow_from = training.steps + job.get("slow_after", job["steps"])
    while training.steps < job["steps"]:
        ckpt.engine.begin_step(training.steps + 1)
        trace.tell("begin", training.steps + 1)
        loss = training.forward_backward()
        time.sleep(job["pace"] if training.steps < slow_from else SLOW_SECONDS)
        ckpt.before_update()
        training.update()
        trace.tell("end", training.steps, loss.hex())
        handles = [*handles[-1:], take(ckpt, training, job, predicate, trace)]
        if (before := handles[0]) is not None and before.done() and before.error is None and not before.durable:
            trace.tell("kept", before.step)
    trace.tell("digest", training.steps, training.digest())
    if job.get("hang"):
        time.sleep(job["hang"])
    ckpt.close()
    trace.tell("closed", training.steps)


def take(
    ckpt: Checkpointer, training: Training, job: dict[str, Any], predicate: Any, trace: Trace
) -> SaveHandle | None:
    """A snapshot in memory after every step, a durable one after every seventh."""
    step = training.steps
    durable = step % job["durable_every"] == 0 and ckpt.engine.ready()
    if not durable and not (job["memory"] and ckpt.engine.ready(durable=False)):
        trace.tell("skipped", step)
        return None
    reason = "manual" if durable else "memory"
    return ckpt.save(training.state(), step=step, reason=reason, durable=durable, lazy=predicate)


def warm_up() -> None:
    """Import what a job needs. One thread: a fork has no others. No `backward`: torch 2.14 then has none in forks."""
    torch.set_num_threads(1)
    training = Training(4)
    training.update()
    training.digest()
    Checkpointer("/nowhere").close()


if __name__ == "__main__":
    warm_up()
    serve(run)
