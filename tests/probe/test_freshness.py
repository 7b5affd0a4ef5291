"""A snapshot that has the weights or moments of an older one is reported, in every trainer; a healthy run is not."""

from __future__ import annotations

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
from tests.loop.runs import Case
from tests.probe.old_bytes import is_moment, is_weight, staging_of_old
from tests.support.sweeps import crossed

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
    still = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
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


TRAINERS = [lightning, save, accelerate, transformers_trainer, fabric, track, step_by_step]
"""The first follows the objects of a training, the second has states only; the others follow objects, too."""


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
    return lambda chosen: monkeypatch.setattr(pipeline, "Staging", staging_of_old(chosen, FRESH))


@pytest.mark.cells(4)
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


@pytest.mark.cells(7)
@pytest.mark.parametrize(("train", "name"), crossed(TRAINERS, [*HEALTHY], whole=2))
def test_a_healthy_run_gives_no_alarm(
    train: Callable[[Make, Path], None], name: str, tmp_path: Path, heard: list[StaleSnapshot]
) -> None:
    """Whatever does not change for a reason: frozen, unused, at no rate, not stepped, constant."""
    train(HEALTHY[name], tmp_path)
    assert heard == []


def gan(model: Net, root: Path, whole: bool) -> None:
    """Two optimizers step in turn."""
    both = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.first, model.last)]
    _loop(model, {"a": both[0], "b": both[1]}, root, lambda turn: both[turn // 2 % 2].step(), whole=whole)


def accumulation(model: Net, root: Path, whole: bool) -> None:
    """A snapshot of each batch, a step at each third one."""
    optimizer = torch.optim.Adam(model.last.parameters(), lr=1e-2)
    _loop(model, {"a": optimizer}, root, lambda turn: optimizer.step() if turn % 3 == 2 else None, whole=whole)


def overflow(model: Net, root: Path, whole: bool, *, fused: bool = True) -> None:
    """A scaler leaves out some of the steps; of a fused optimizer they are called all the same."""
    optimizer = torch.optim.Adam(model.last.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(turn: int) -> None:
        scaler.scale(torch.zeros(()))
        for parameter in model.last.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(float("inf") if turn in (0, 2, 3) else 1.0)
        scaler.step(optimizer)
        scaler.update()

    _loop(model, {"a": optimizer}, root, step, whole=whole)


def not_fused(model: Net, root: Path, whole: bool) -> None:
    overflow(model, root, whole, fused=False)


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, and has slow weights that change at each third step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups, self.calls = base, base.param_groups, 0

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.calls % 3 == 0:
                slow.lerp_(p.detach(), 0.5)


def nested(model: Net, root: Path, whole: bool) -> None:
    outer = Lookahead(torch.optim.Adam(model.last.parameters(), lr=1e-2))
    _loop(model, {"a": outer}, root, lambda _: outer.step(), whole=whole)


def _loop(model: Net, named: dict[str, Any], root: Path, step: Callable[[int], object], *, whole: bool) -> None:
    """Tracked, or saved as a whole by hand."""
    with Checkpointer(str(root), **OPTIONS) as ckpt:
        run = None if whole else ckpt.track(model=model, **named)
        for turn in range(STEPS + 2):
            for optimizer in named.values():
                optimizer.zero_grad()
            model(torch.randn(2, 4))["loss"].backward()
            step(turn)
            if run is not None:
                run.step()
                settle(ckpt.engine)
            else:
                state = {name: one.state_dict() for name, one in named.items()}
                ckpt.save({"model": model.state_dict(), **state}, step=turn + 1).wait(60)


@pytest.mark.cells(3)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("loop", [gan, accumulation, overflow, not_fused, nested])
def test_an_optimizer_that_has_not_stepped_gives_no_alarm(
    loop: Callable[[Net, Path, bool], None], whole: bool, tmp_path: Path, heard: list[StaleSnapshot]
) -> None:
    """What did not change between two snapshots was not to."""
    loop(Net(), tmp_path, whole)
    assert heard == []


@pytest.mark.cells(3)
@pytest.mark.parametrize("kind", ["sgd", "fused", "data", "tiny", "whole"])
@pytest.mark.parametrize("train", [track, save])
def test_each_kind_of_optimizer_is_followed(
    train: Callable[[Make, Path], None],
    kind: str,
    tmp_path: Path,
    hand_over_old: Callable[[Callable[[str], bool]], None],
    heard: list[StaleSnapshot],
) -> None:
    """Without moments, with fused kernels, with changes that torch does not count, with updates that rounding loses,
    and where a whole slot is old."""
    makes: dict[str, Make] = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        "data": lambda model: Data(model.parameters(), lr=1e-2),
        "tiny": lambda model: torch.optim.SGD(model.parameters(), lr=1e-30),
        "whole": adam,
    }
    if kind != "tiny":
        hand_over_old((lambda _: True) if kind == "whole" else is_weight)
    train(makes[kind], tmp_path)
    assert [one.what for one in heard] == (["weights", "moments"] if kind == "whole" else ["weights"])


IDLE = "nothing is trained: the learning rate of every group is 0"


def by_a_scheduler(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    return optimizer


NO_RATE: dict[str, tuple[Make, bool]] = {
    "adam": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.0), True),
    "sgd": (lambda model: torch.optim.SGD(model.parameters(), lr=0.0), True),
    "groups": (lambda model: torch.optim.Adam([{"params": [p]} for p in model.last.parameters()], lr=0.0), True),  # type: ignore[union-attr]
    "tensor": (lambda model: torch.optim.Adam(model.parameters(), lr=torch.zeros(()), foreach=False), True),
    "another group trains": (at_no_rate, False),
    "warm-up by a scheduler": (by_a_scheduler, False),
    "warm-up by hand": (lambda model: warmed_up(adam(model), 3), False),
}


@pytest.mark.cells(5)
@pytest.mark.parametrize(("train", "name"), crossed(TRAINERS, [*NO_RATE], whole=2))
def test_a_run_in_which_every_learning_rate_stays_0_is_reported(
    train: Callable[[Make, Path], None],
    name: str,
    tmp_path: Path,
    heard: list[StaleSnapshot],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, at the fourth snapshot. A warm-up that begins at 0, and a group of several, give no alarm."""
    make, said = NO_RATE[name]
    train(make, tmp_path)
    assert heard == []
    assert [record.message.split(": ")[0] for record in caplog.records if IDLE in record.message] == ["step 4"] * said


class Data(torch.optim.SGD):
    """Writes past the count of changes."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-1e-2)
        return loss


def test_a_writer_process_reports_it_and_once(
    tmp_path: Path, hand_over_old: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a thread: one line, with what to do next."""
    monkeypatch.setitem(OPTIONS, "writer", "process")
    hand_over_old(is_weight)
    save(adam, tmp_path)
    (line,) = [record.message for record in caplog.records if "the optimizer has stepped" in record.message]
    assert f"step {FRESH + 1}: the snapshot has the weights of step {FRESH} for group 0 of AdamW" in line
    assert f"`ckpt diff '{tmp_path}#0" in line and "resume from step 2 or earlier" in line
