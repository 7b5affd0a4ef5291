"""A snapshot that has the weights or moments of an older one is reported, in every trainer; a healthy run is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import AdaptiveCheckpoint as AccelerateCheckpoint
from accelerate_ckpt import TransformersCallback
from ckpt_engine import Checkpointer
from ckpt_engine.engine import Engine
from ckpt_engine.observe.events import Event, StaleSnapshot
from ckpt_engine.snapshot import pipeline
from lightning_ckpt import AdaptiveCheckpoint
from tests.accelerate.runs import make_accelerator
from tests.tracking.runs import Case

STEPS = 6
FRESH = 2
"""Snapshots before the fault."""
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIONS: dict[str, Any] = {"every_n_steps": 1, "writer": "thread", "keep": {"last": 99}, "lazy": "off"}


class Net(nn.Module):
    """Two layers with a constant buffer, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        """As transformers wants it."""
        return {"loss": (self.scale * self.last(self.first(x))).square().mean()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(STEPS * 2, 4))


def lightning(make: Make, root: Path) -> None:
    ckpt = AdaptiveCheckpoint(str(root), **OPTIONS)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            assert ckpt._run is not None
            settle(ckpt._run.engine)
            return self.net(batch[0])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.net)

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=[ckpt], **quiet).fit(
        Model(), DataLoader(data(), 2)
    )


def accelerate(make: Make, root: Path) -> None:
    accelerator, model = make_accelerator(Case()), Net()
    model, optimizer, loader = accelerator.prepare(model, make(model), DataLoader(data(), 2))
    ckpt = AccelerateCheckpoint(accelerator, str(root), **OPTIONS)
    for (x,) in loader:
        settle(ckpt._engine)
        accelerator.backward(model(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    accelerator._dataloaders.clear()


def transformers_trainer(make: Make, root: Path) -> None:
    ckpt, model = TransformersCallback(str(root), **OPTIONS), Net()

    class Settled(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            settle(ckpt.tracker._engine)  # type: ignore[union-attr]

    rows = [{"x": x, "labels": 0} for (x,) in data()]
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(
        str(root / "hf"), per_device_train_batch_size=2, num_train_epochs=1, dataloader_pin_memory=False, **quiet
    )
    optimizer = make(model)
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    transformers.Trainer(
        model, arguments, train_dataset=rows, optimizers=(optimizer, still), callbacks=[ckpt, Settled()]
    ).train()


def fabric(make: Make, root: Path) -> None:
    tool, model = Fabric(accelerator="cpu", devices=1), Net()
    wrapped, optimizer = tool.setup(model, make(model))
    loader = tool.setup_dataloaders(DataLoader(data(), 2))
    with Checkpointer(str(root), **OPTIONS).track(model=wrapped, optimizer=optimizer, loader=loader) as run:
        for (x,) in loader:
            settle(run._engine)
            tool.backward(wrapped(x)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def track(make: Make, root: Path) -> None:
    model = Net()
    optimizer, loader = make(model), DataLoader(data(), 2)
    with Checkpointer(str(root), **OPTIONS).track(model=model, optimizer=optimizer, loader=loader) as run:
        for (x,) in loader:
            settle(run._engine)
            model(x)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


def step_by_step(make: Make, root: Path) -> None:
    model = Net()
    optimizer = make(model)
    with Checkpointer(str(root), **OPTIONS).track(model=model, optimizer=optimizer) as run:
        for _ in range(STEPS):
            model(torch.randn(2, 4))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            settle(run._engine)


def save(make: Make, root: Path) -> None:
    model = Net()
    optimizer = make(model)
    with Checkpointer(str(root), **OPTIONS) as ckpt:
        for step in range(1, STEPS + 1):
            model(torch.randn(2, 4))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step).wait(60)


TRAINERS = [lightning, accelerate, transformers_trainer, fabric, track, step_by_step, save]


def settle(engine: Engine) -> None:
    """Each snapshot is durable before the next one is due."""
    engine.before_update()
    assert engine.wait(60)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[StaleSnapshot]:
    """What is reported as stale."""
    found: list[StaleSnapshot] = []
    emit = Engine._emit

    def listen(self: Engine, event: Event) -> None:
        if isinstance(event, StaleSnapshot):
            found.append(event)
        emit(self, event)

    monkeypatch.setattr(Engine, "_emit", listen)
    return found


@pytest.fixture
def hand_over_old(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Has the stager copy what the chosen entries had in the second snapshot, from the third one on."""

    def begin(chosen: Callable[[str], bool]) -> None:
        staging, taken, old = pipeline.Staging, [0], dict[str, torch.Tensor]()

        def staged(capture: Any, *args: Any, **more: Any) -> Any:
            taken[0] += 1
            arrays, addresses = list(capture.arrays), list(capture.addresses)
            for source in capture.plan.sources:
                if not chosen(source.name):
                    continue
                if taken[0] <= FRESH:
                    old[source.name] = arrays[source.array].detach().clone()
                arrays[source.array] = old[source.name]
                addresses[source.array] = old[source.name].data_ptr()
            return staging(dataclasses.replace(capture, arrays=arrays, addresses=addresses), *args, **more)

        monkeypatch.setattr(pipeline, "Staging", staged)

    return begin


def is_moment(name: str) -> bool:
    return any(kind in name for kind in ("exp_avg", "momentum_buffer"))


def is_weight(name: str) -> bool:
    return name.endswith((".weight", ".bias")) and not is_moment(name)


@pytest.mark.parametrize("train", TRAINERS)
@pytest.mark.parametrize(("what", "chosen"), [("weights", is_weight), ("moments", is_moment)])
def test_old_bytes_are_named(
    train: Callable[[Make, Path], None],
    what: str,
    chosen: Callable[[str], bool],
    tmp_path: Path,
    hand_over_old: Callable[[Callable[[str], bool]], None],
    heard: list[StaleSnapshot],
) -> None:
    """A stager that hands over old weights, or old moments beside fresh weights, is named at the first snapshot."""
    hand_over_old(chosen)
    train(adam, tmp_path)
    assert [one.what for one in heard] == [what]
    assert (heard[0].since_step, heard[0].step) == (FRESH, FRESH + 1)
    assert heard[0].since.split("-")[1] < heard[0].snapshot.split("-")[1] and heard[0].group.startswith("group 0 of ")
    assert len(heard[0].tensors) == 3 and all(map(chosen, heard[0].tensors))


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.first.requires_grad_(False)
    return torch.optim.AdamW([{"params": model.first.parameters()}, {"params": model.last.parameters()}], lr=1e-2)


def lora(model: nn.Module) -> torch.optim.Optimizer:
    """The second factor is zero at first, so that the first one gets no gradient, and there is a step at no rate."""
    model.requires_grad_(False)
    low, high = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(8, 2))
    model.first.register_parameter("low", low)
    model.first.register_parameter("high", high)
    model.first.register_forward_hook(lambda _, args, out: out + args[0] @ low.T @ high.T)
    optimizer = torch.optim.AdamW([{"params": [low]}, {"params": [high]}], lr=1e-2)
    return warmed_up(optimizer)


def warmed_up(optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.optim.Optimizer:
    """At a learning rate of nothing at first."""
    for group in optimizer.param_groups:
        group["later"], group["lr"] = group["lr"], 0.0

    def after(*_: Any) -> None:
        after.steps += 1  # type: ignore[attr-defined]
        for group in optimizer.param_groups:
            group["lr"] = group["later"] if after.steps >= steps else 0.0  # type: ignore[attr-defined]

    after.steps = 0  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(after)
    return optimizer


def at_no_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model.first.parameters(), "lr": 0.0}, {"params": model.last.parameters()}])


def partly_unused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model.unused.parameters()}, {"params": model.last.parameters()}], lr=1e-2)


def without_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.unused.parameters()}, {"params": model.last.parameters()}], lr=1e-2)


class Masked(torch.optim.SGD):
    """Has constants for its parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("mask", torch.ones_like(p))
        return super().step(closure)  # type: ignore[return-value, no-any-return]


class Seldom(torch.optim.AdamW):
    """Steps at each third call only, as with an overflow or an accumulation of its own."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 3:
            return None if closure is None else closure()
        return super().step(closure)


HEALTHY: dict[str, Make] = {
    "adam": adam,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "frozen": frozen,
    "lora": lora,
    "warm-up": lambda model: warmed_up(adam(model)),
    "no rate": at_no_rate,
    "unused group": partly_unused,
    "no momentum": without_momentum,
    "masked": lambda model: Masked(model.parameters(), lr=1e-2),
    "seldom": lambda model: Seldom(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("train", TRAINERS)
@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_run_gives_no_alarm(
    train: Callable[[Make, Path], None], make: Make, tmp_path: Path, heard: list[StaleSnapshot]
) -> None:
    """Whatever does not change for a reason: frozen, unused, at no rate, not stepped, constant."""
    train(make, tmp_path)
    assert heard == []
