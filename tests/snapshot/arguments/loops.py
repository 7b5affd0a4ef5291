"""Four living loops of a few steps, and a hook in each step: a plain one, Accelerate, Lightning and transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import AdaptiveCheckpoint as Accelerated
from accelerate_ckpt import TransformersCallback
from ckpt_engine import Checkpointer
from lightning_ckpt import AdaptiveCheckpoint
from tests.accelerate.runs import make_accelerator
from tests.loop.runs import Case
from tests.support.digests import digest, seed_everything

STEPS = 4
Digest = dict[str, str]


@dataclass
class Hooks:
    """What a test does in a loop.

    Args:
        step: called in each step, before the optimizer's, with its number from 1 on and what the loop offers.
        after: called after each step of transformers, as `step`.
        parts: more objects of the run, by name.
        callbacks: more of Lightning's.
    """

    step: Callable[[int, Any], None] = lambda number, loop: None
    after: Callable[[int, Any], None] = lambda number, loop: None
    parts: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[pl.Callback] = ()


Train = Callable[[Any, Hooks], Digest]
"""Trains with this source of options, or with None without ours; the digest of what was trained."""


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator))


def _fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), DataLoader(_data(), batch_size=4, shuffle=True)


def plain(options: Any, hooks: Hooks) -> Digest:
    """`track`."""
    model, optimizer, loader = _fresh()
    ckpt = None if options is None else Checkpointer(options)
    run = None if ckpt is None else ckpt.track(model=model, optimizer=optimizer, loader=loader, **hooks.parts)
    _epochs(run, loader, hooks, lambda x, y: (model(x) - y).square().mean().backward(), [optimizer])
    if ckpt is not None:
        ckpt.close()
    return digest(weights=model.state_dict(), optimizer=optimizer.state_dict())


def accelerate(options: Any, hooks: Hooks) -> Digest:
    """Accelerate's loop."""
    accelerator = make_accelerator(Case())
    model, optimizer, loader = accelerator.prepare(*_fresh())
    for part in hooks.parts.values():
        accelerator.register_for_checkpointing(part)
    run = None if options is None else Accelerated(accelerator, options)
    _epochs(run, loader, hooks, lambda x, y: accelerator.backward((model(x) - y).square().mean()), [optimizer])
    accelerator.end_training()
    accelerator._dataloaders.clear()
    return digest(weights=model.state_dict(), optimizer=optimizer.state_dict())


def _epochs(run: Any, loader: Iterable[Any], hooks: Hooks, backward: Any, optimizers: list[Any]) -> None:
    number = 0 if run is None else run.global_step
    for _ in range(0 if run is None else run.epoch, STEPS // 2):
        for x, y in loader:
            number += 1
            backward(x, y)
            if run is not None:
                hooks.step(number, run)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


class Module(pl.LightningModule):
    """A model that lets a test into its steps."""

    def __init__(self, hooks: Hooks, *, ours: bool) -> None:
        super().__init__()
        self.net, self._adam, self._loader = _fresh()
        self._hooks = hooks if ours else Hooks()
        for name, part in hooks.parts.items():
            self.add_module(name, part)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self._hooks.step(self.global_step + 1, self)
        loss: torch.Tensor = (self.net(x) - y).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self._adam

    def train_dataloader(self) -> Any:
        return self._loader


def lightning(options: Any, hooks: Hooks) -> Digest:
    """A fit."""
    module = Module(hooks, ours=options is not None)
    ours = [] if options is None else [AdaptiveCheckpoint(options)]
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice that is not about us
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=STEPS // 2,
            callbacks=[*hooks.callbacks, *ours],
            **quiet,
        )
        trainer.fit(module, ckpt_path="auto" if ours and ours[0].config.resume is None else None)
    return digest(weights=module.net.state_dict(), optimizer=module._adam.state_dict())


class Regression(nn.Module):
    """The model as transformers calls it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Step(transformers.TrainerCallback):  # type: ignore[misc]
    """Lets a test into the trainer's steps."""

    def __init__(self, hooks: Hooks, ours: TransformersCallback | None) -> None:
        self._hooks, self._ours = hooks, ours

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._ours is not None:
            self._hooks.step(state.global_step + 1, (self._ours, state))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._ours is not None:
            self._hooks.after(state.global_step, (self._ours, state))


def hugging(options: Any, hooks: Hooks) -> Digest:
    """A `Trainer` of transformers."""
    transformers.logging.set_verbosity_error()
    net, optimizer, _ = _fresh()
    ours = None if options is None else TransformersCallback(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice that is not about us
        trainer = transformers.Trainer(
            model=Regression(net),
            optimizers=(optimizer, None),
            args=transformers.TrainingArguments(
                "unused",
                use_cpu=True,
                num_train_epochs=STEPS // 2,
                per_device_train_batch_size=4,
                report_to=[],
                disable_tqdm=True,
                log_level="error",
                save_strategy="no",
                logging_strategy="no",
                dataloader_pin_memory=False,
                seed=0,
            ),
            train_dataset=[{"x": x, "labels": y} for x, y in _data()],
            callbacks=[*([] if ours is None else [ours]), Step(hooks, ours)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=None if ours is None else ours.resume_from(trainer))
    return digest(weights=net.state_dict(), optimizer=trainer.optimizer.state_dict())


LOOPS: dict[str, Train] = {"plain": plain, "accelerate": accelerate, "lightning": lightning, "transformers": hugging}
