"""Trainings with Accelerate and with transformers' Trainer, step by step on the clock, with a choice of how to save."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from accelerate_ckpt import AdaptiveCheckpoint, TransformersCallback
from benchmarks.handmade import HandMade
from benchmarks.lightning_loop import seeded_data
from benchmarks.measure import children_seconds
from benchmarks.workloads import SEED, perceptron, state_bytes
from ckpt_engine import Checkpointer

INPUTS = 256
VOCABULARY, LENGTH = 512, 32
KEPT = 2


@dataclass(frozen=True, slots=True)
class Laps:
    """One training.

    Args:
        moments: when each step began, and when the last one ended.
        written: when all that it saved was written.
        saved: numbers of the steps after which it saved.
        writer_seconds: processor time of the writer from the first step to the end of the last.
    """

    moments: tuple[float, ...]
    written: float
    saved: tuple[int, ...]
    writer_seconds: float

    @property
    def training_seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.moments[-1] - self.moments[0]

    def seconds_between(self, first: int, last: int) -> float:
        """From the end of step `first` to the end of step `last`."""
        return self.moments[last] - self.moments[first]

    @property
    def seconds_until_written(self) -> float:
        """From the start of the first step until everything is written."""
        return self.written - self.moments[0]

    @property
    def stall_seconds(self) -> float:
        """What the typical save adds to its own step and the one after it, in which a lazy copy is waited for.

        Raises:
            RuntimeError: nothing was saved within the training.
        """
        laps = [b - a for a, b in itertools.pairwise(self.moments)]
        inner = [step for step in self.saved if step < len(laps)]
        if not inner:
            raise RuntimeError("no snapshot was taken within this training")
        touched = {index for step in self.saved for index in (step - 1, step)}
        typical = statistics.median(lap for index, lap in enumerate(laps) if index not in touched)
        return statistics.median(laps[step - 1] + laps[step] - 2 * typical for step in inner)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is trained.

    Args:
        every: steps between two saves.
    """

    parameters: int
    batch_size: int
    steps: int
    every: int


def accelerate_laps(folder: Path, sizes: Sizes, how: str) -> Laps:
    """A loop with Accelerate; `how` is "none", "save_state", "hand" (see `HandMade`) or "ours"."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=KEPT)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = perceptron(sizes.parameters, inputs=INPUTS)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    data = seeded_data(sizes.batch_size * sizes.steps, INPUTS)
    loader = DataLoader(data, sizes.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Learned by heart without smoothing: the gradients become subnormal numbers, and a step takes three times as long.
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    ckpt = AdaptiveCheckpoint(accelerator, **_options(folder, sizes)) if how == "ours" else None
    hand = _ByHand(folder / "hand") if how == "hand" else None
    moments, saved, before = [], [], children_seconds()
    for step, (inputs, labels) in enumerate(loader, 1):
        moments.append(time.perf_counter())
        accelerator.backward(loss_of(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        if how in ("save_state", "hand") and step % sizes.every == 0:
            accelerator.save_state() if hand is None else hand.save(model, optimizer, step)
            saved.append(step)
    moments.append(time.perf_counter())
    writer_seconds = children_seconds() - before
    if ckpt is not None:
        ckpt.close()
    if hand is not None:
        hand.close()
    steps = _steps(folder) if how == "ours" else tuple(saved)
    return Laps(tuple(moments), time.perf_counter(), tuple(steps), writer_seconds)


def accelerate_state_bytes(sizes: Sizes) -> int:
    """Bytes of weights and both moments of that loop."""
    return 3 * state_bytes(dict(perceptron(sizes.parameters, inputs=INPUTS).state_dict()))


def transformers_laps(folder: Path, sizes: Sizes, how: str) -> Laps:
    """A Trainer with a small GPT-2; `how` is "none", "trainer", "hand" (see `HandMade`) or "ours"."""
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(_gpt2(sizes))
    text = torch.randint(VOCABULARY, (sizes.batch_size * sizes.steps, LENGTH))
    stopwatch = Stopwatch(_ByHand(folder / "hand") if how == "hand" else None, sizes.every)
    ours = TransformersCallback(**_options(folder / "ours", sizes)) if how == "ours" else None
    arguments = TrainingArguments(
        str(folder),
        max_steps=sizes.steps,
        per_device_train_batch_size=sizes.batch_size,
        save_strategy="steps" if how == "trainer" else "no",
        save_steps=sizes.every,
        save_total_limit=KEPT,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in text],  # type: ignore[arg-type]
        callbacks=[stopwatch] if ours is None else [stopwatch, ours],
    )
    trainer.train(resume_from_checkpoint=None if ours is None else ours.resume_from(trainer))
    saved = stopwatch.saved if ours is None else _steps(folder / "ours")
    return Laps(tuple(stopwatch.moments), time.perf_counter(), tuple(saved), stopwatch.writer_seconds)


def transformers_state_bytes(sizes: Sizes) -> int:
    """Bytes of weights and both moments of that training; tied weights once."""
    return 3 * sum(p.numel() * p.element_size() for p in GPT2LMHeadModel(_gpt2(sizes)).parameters())


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Notes when each step begins and when training ends. MUST come before other callbacks.

    Args:
        hand: saves after each `every` steps.
    """

    def __init__(self, hand: _ByHand | None = None, every: int = 1) -> None:
        self._hand, self._every = hand, every
        self.moments: list[float] = []
        self.saved: list[int] = []
        self.writer_seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if not self.moments:
            self.writer_seconds = -children_seconds()
        self.moments.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._hand is not None and state.global_step % self._every == 0:
            self._hand.save(objects["model"], objects["optimizer"], state.global_step)
            self.saved.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.saved.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.moments.append(time.perf_counter())
        self.writer_seconds += children_seconds()
        if self._hand is not None:
            self._hand.close()


class _ByHand:
    """Weights and the state of the optimizer with a `HandMade`, made at the first save, which knows the size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: HandMade | None = None

    def save(self, model: nn.Module, optimizer: Any, step: int) -> None:
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}
        if self._made is None:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._made = HandMade(self._folder, state)
        self._made.save(state, step)

    def close(self) -> None:
        """Return when everything is written."""
        if self._made is not None:
            self._made.close()


def _gpt2(sizes: Sizes) -> GPT2Config:
    layers = 4
    width = max(8, round((sizes.parameters / (12 * layers)) ** 0.5 / 8) * 8)
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )


def _options(folder: Path, sizes: Sizes) -> dict[str, Any]:
    # All are kept, so that the saved steps can be listed afterwards.
    return {"tiers": str(folder), "every_n_steps": sizes.every, "at_end": False, "keep": {"last": sizes.steps}}


def _steps(folder: Path) -> Sequence[int]:
    return tuple(info.step for info in Checkpointer(folder).snapshots())
