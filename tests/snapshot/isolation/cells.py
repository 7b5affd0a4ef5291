"""Runs whose weights change outside of `optimizer.step`: kinds of changes, places in a step, and trainers.

A change is made by a hook of torch, so that each place is the same in every trainer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import accelerate_ckpt
import lightning_ckpt
from ckpt_engine import Checkpointer

BATCHES = 5
TRAINERS = ("plain", "fabric", "accelerate", "lightning", "transformers")


class Net(nn.Module):
    """Two layers and a buffer that moves in forward, as spectral norm has one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 64)
        self.head = nn.Linear(64, 1)
        self.register_buffer("u", torch.ones(64))

    def forward(self, x: Any = None, **more: Any) -> Any:
        loss = (self.head(torch.tanh(self.body(x) * self.u)) ** 2).mean()
        return {"loss": loss} if more else loss


class Change:
    """One kind of change of what a net and its optimizer hold. Called at most once a step."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self.net, self.optimizer, self.calls, self.on = net, optimizer, 0, False
        self._kind = kind
        self._average = [p.detach().clone().mul_(0.5) for p in net.parameters()]

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        if self.on:
            self.calls += 1
            getattr(self, self._kind.replace(" ", "_"))()

    @property
    def weights(self) -> list[torch.Tensor]:
        return list(self.net.parameters())

    def clamp(self) -> None:
        for p in self.weights:
            p.clamp_(-0.1 / self.calls, 0.1 / self.calls)

    def clamp_by_data(self) -> None:
        for p in self.weights:
            p.data.clamp_(-0.1 / self.calls, 0.1 / self.calls)

    def renormalise(self) -> None:
        for p in self.weights:
            p.copy_(p / p.norm() * (1 + self.calls))

    def numpy(self) -> None:
        self.net.body.weight.detach().numpy()[:] *= 1.5

    def by_address(self) -> None:
        ctypes.memset(self.net.body.weight.data_ptr() + 64, self.calls, 128)

    def new_data(self) -> None:
        self.net.body.weight.data = self.net.body.weight.data * 1.5

    def one_row(self) -> None:
        self.net.body.weight.data[3] += 1

    def one_word(self) -> None:
        self.net.body.weight.data.view(-1)[193] += 1

    def load_state_dict(self) -> None:
        self.net.load_state_dict({k: v * 1.25 for k, v in self.net.state_dict().items()})

    def swap(self) -> None:
        """An average stands in for the weights at every other call."""
        for p, other in zip(self.weights, self._average, strict=True):
            p.data, other.data = other.data.clone(), p.data.clone()

    def swap_in_place(self) -> None:
        for p, other in zip(self.weights, self._average, strict=True):
            before = p.clone()
            p.copy_(other)
            other.copy_(before)

    def buffer(self) -> None:
        self.net.u.mul_(1.01)

    def mask(self) -> None:
        self.net.body.weight.data.mul_((torch.arange(384).view(64, 6) + self.calls) % 2)

    def foreach(self) -> None:
        torch._foreach_mul_(self.weights, 0.75)

    def perturb(self) -> None:
        """Sharpness-aware: there and, at the next call, back."""
        torch._foreach_add_(self.weights, 0.5 if self.calls % 2 else -0.5)

    def moment(self) -> None:
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].mul_(0.5).add_(1)

    def schedule_free(self) -> None:
        """Weights of training and of evaluation change places."""
        for p, z in zip(self.weights, self._average, strict=True):
            p.lerp_(z, 0.9 if self.calls % 2 else -9.0)


KINDS = tuple(
    name.replace("_", " ") for name, value in vars(Change).items() if callable(value) and not name.startswith("_")
)
NEVER_TORN = frozenset({"buffer", "new data", "swap"})
"""Buffers are copied at once, and memory that a weight no longer has stays as it was."""
AHEAD = ("fetch", "before forward", "in forward", "in backward")
"""Places between the boundary and the fence."""
PLACES = (*AHEAD, "before step", "after step")


class Data(Dataset[Any]):
    """Each batch is fetched right behind a boundary."""

    def __init__(self) -> None:
        self.fetched: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, i: int) -> Any:
        if i % 2 == 0:
            self.fetched()
        return {"x": torch.full((6,), float(i + 1)), "y": torch.zeros(1)}


def place(change: Change, data: Data, where: str) -> None:
    """Let the change happen there in each step that trains, from the second one on: moments exist then."""
    net, optimizer = change.net, change.optimizer

    def begin(*_: Any) -> None:
        change.on = net.training and torch.is_grad_enabled()

    optimizer.register_step_post_hook(begin)
    if where == "fetch":
        data.fetched = change
    elif where == "before forward":
        net.register_forward_pre_hook(change)
    elif where == "in forward":
        net.body.register_forward_hook(change)
    elif where == "in backward":
        net.body.weight.register_post_accumulate_grad_hook(change)
    elif where == "before step":
        optimizer.register_step_pre_hook(change)
    else:
        optimizer.register_step_post_hook(change)


@dataclass
class Log(logging.Handler):
    """What was logged as an error."""

    def __post_init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    __hash__ = object.__hash__


def run(trainer: str, kind: str, where: str, root: Path, lazy: str) -> Log:
    """Train for some steps with a snapshot at each; what was logged."""
    torch.manual_seed(3)
    net, data, log = Net(), Data(), Log()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    change = Change(net, optimizer, kind)
    place(change, data, where)
    options: dict[str, Any] = {
        "tiers": str(root),
        "every_n_steps": 1,
        "keep": {"last": 100},
        "writer": "thread",
        "lazy": lazy,
        "on_error": "warn",
        "hidden": "off",
    }
    loggers = [logging.getLogger(name) for name in ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt")]
    for one in loggers:
        one.addHandler(log)
    try:
        _LOOPS[trainer](net, optimizer, data, options)
    finally:
        for one in loggers:
            one.removeHandler(log)
    assert change.calls, "nothing was changed"
    return log


def _plain(net: Net, optimizer: Any, data: Data, options: dict[str, Any]) -> None:
    with Checkpointer(options) as ckpt:
        model, loader = net, DataLoader(data, batch_size=2)
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.engine.wait(30.0)


def _fabric(net: Net, optimizer: Any, data: Data, options: dict[str, Any]) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    with Checkpointer(options) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            ckpt.engine.wait(30.0)


def _accelerate(net: Net, optimizer: Any, data: Data, options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=2))
    ckpt = accelerate_ckpt.AdaptiveCheckpoint(accelerator, options)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        ckpt._engine.wait(30.0)
    accelerator.end_training()


class _Module(pl.LightningModule):
    def __init__(self, net: Net, optimizer: Any) -> None:
        super().__init__()
        self.net, self._made = net, [optimizer]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return self._made[0]


class _Durable(pl.Callback):
    def __init__(self, ckpt: Any) -> None:
        self._ckpt = ckpt

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._ckpt._run.engine.wait(30.0)


def _lightning(net: Net, optimizer: Any, data: Data, options: dict[str, Any]) -> None:
    ckpt = lightning_ckpt.AdaptiveCheckpoint(options)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ckpt, _Durable(ckpt)],
    )
    trainer.fit(_Module(net, optimizer), DataLoader(data, batch_size=2))


def _transformers(net: Net, optimizer: Any, data: Data, options: dict[str, Any]) -> None:
    folder = Path(options["tiers"]).parent / "output"
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=["y"],
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    ours = accelerate_ckpt.TransformersCallback(options)
    Trainer(net, arguments, train_dataset=data, callbacks=[ours], optimizers=(optimizer, schedule)).train()


_LOOPS = dict(zip(TRAINERS, (_plain, _fabric, _accelerate, _lightning, _transformers), strict=True))
