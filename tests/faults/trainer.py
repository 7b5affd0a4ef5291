"""The training of a run of the campaign: real, small, exactly repeatable, and telling everything it knows."""

from __future__ import annotations

import os
import resource
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.events import Event, to_json
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.writer import launch
from tests.faults.disk import install

WIDTH = 96
BATCH = 128
DEVICE_SECONDS = 0.02
"""What a step waits for its accelerator, as most trainings do; so that a step is long and costs little."""
SAVE_EVERY_STEPS = 4
CLOSE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Order:
    """What to train.

    Args:
        tiers: as in a configuration.
        keep: retention of the nearest tier.
        state_bytes: size of what is saved, roughly.
        control: folder of the disk's plan.
    """

    tiers: Sequence[Mapping[str, Any]]
    keep: Mapping[str, Any]
    state_bytes: int
    control: Path


class Model:
    """A network, its optimizer, and memory that changes a little with each step; a pure function of the step."""

    def __init__(self, state_bytes: int) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.ballast = torch.zeros(max(1, state_bytes // 4))
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ballast": {"all": self.ballast},
            "step": self.step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ballast.copy_(state["ballast"]["all"])
        self.step = state["step"]

    def losses(self) -> torch.Tensor:
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(self.step))
        loss = torch.nn.functional.mse_loss(self.net(batch), batch.roll(1, 1))
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.step += 1
        self.ballast[self.step % len(self.ballast)] = self.step
        self.ballast[-1 - self.step % len(self.ballast)] = -self.step


def fingerprint(state: Mapping[str, Any]) -> str:
    """The bits of a state."""
    digest = xxhash.xxh3_128()
    _take(digest, state)
    return digest.hexdigest()


def _take(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"/{key}".encode())
            _take(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _take(digest, one)
    else:
        digest.update(repr(value).encode())


class Reports:
    """Sends what happens. A pipe, so that what was said before a kill is heard."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: str, /, **row: Any) -> None:
        self._pipe.send((what, row))

    def emit(self, event: Event) -> None:
        self.say("event", **to_json(event))


class Meter:
    """How long steps take, how much of it is the checkpointer's, and whether it waited there or was pushed aside."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._rows: list[tuple[float, float, float, int]] = []

    def __enter__(self) -> Meter:
        self._began = time.monotonic()
        self._inside = 0.0
        self._waits = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.append((self._began, time.monotonic() - self._began, self._inside, self._waits))
        if len(self._rows) >= 10:
            self.send()

    def send(self) -> None:
        self._reports.say("steps", rows=self._rows)
        self._rows = []

    def call(self, function: Any, *args: Any, **named: Any) -> Any:
        """Call something of the checkpointer."""
        began, waits = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        try:
            return function(*args, **named)
        finally:
            self._inside += time.monotonic() - began
            self._waits += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits


def train(order: Order, pipe: Connection) -> None:
    """The whole life of a training process: load, train until the campaign says stop, close."""
    reports = Reports(pipe)
    try:
        _train(order, pipe, reports)
    except CkptError as err:
        reports.say("refused", code=err.code, message=str(err), kind=type(err).__name__)
    except Exception:  # noqa: BLE001 - whatever it is, it is reported
        reports.say("broken", text=traceback.format_exc())


def _train(order: Order, pipe: Connection, reports: Reports) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ["TEST_FAULTS"] = str(order.control)
    launch.ENTRY = Path(__file__).with_name("writer_main.py")
    install(order.control)
    model = Model(order.state_bytes)
    ckpt = Checkpointer(tiers=list(order.tiers), keep=order.keep, on_error="warn")
    ckpt.engine.events = reports
    state = ckpt.load()
    if state is None:
        reports.say("fresh")
    else:
        assert ckpt.loaded is not None
        info = ckpt.loaded.info
        reports.say(
            "loaded", step=info.step, seq=info.seq, snapshot=info.id, bits=fingerprint(state), place=ckpt.loaded.place
        )
        model.restore(state)
    ckpt.engine.start()
    reports.say("started")
    _loop(model, ckpt, pipe, reports)
    ckpt.close(CLOSE_SECONDS)
    reports.say("closed")


def _loop(model: Model, ckpt: Checkpointer, pipe: Connection, reports: Reports) -> None:
    meter = Meter(reports)
    handles: list[SaveHandle] = []
    while not (pipe.poll() and pipe.recv() == "stop"):
        due = model.step % SAVE_EVERY_STEPS == 0 and ckpt.engine.ready()
        if due:
            reports.say("saving", step=model.step, bits=fingerprint(model.state()))
        with meter:
            if due:
                handles.append(meter.call(ckpt.save, model.state(), step=model.step))
            model.losses()
            meter.call(ckpt.before_update)
            model.update()
            time.sleep(DEVICE_SECONDS)
            meter.call(ckpt.engine.poll)
        for handle in [one for one in handles if one.done()]:
            handles.remove(handle)
            if handle.snapshot is not None:
                reports.say("durable", step=handle.step, snapshot=handle.snapshot)
    meter.send()
