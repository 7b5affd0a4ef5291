"""A pytest plugin beside `in_every_lightning_trainer`: our line in every transformers `Trainer` and `Accelerator`."""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import Trainer

from accelerate_ckpt import AdaptiveCheckpoint, TransformersCallback

EACH_STEP: dict[str, Any] = {"every_n_steps": 1, "keep": {"last": 1}, "writer": "thread"}
BEGUN: weakref.WeakKeyDictionary[Accelerator, AdaptiveCheckpoint | None] = weakref.WeakKeyDictionary()
"""Accelerators that are followed, and None for those of a `Trainer`."""


def pytest_configure(config: pytest.Config) -> None:
    """With the option of the other plugin, which says where snapshots go."""
    folder = config.getoption("ckpt_trainers")
    if folder:
        config.add_cleanup(replace(Trainer, "__init__", functools.partial(with_callback, folder)))
        config.add_cleanup(replace(Trainer, "create_accelerator_and_postprocess", with_its_own))
        config.add_cleanup(replace(Accelerator, "prepare", functools.partial(with_line, folder)))


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put what `make` makes of a method in its place; call to undo."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
    return functools.partial(setattr, owner, name, original)


def with_callback(folder: str, original: Any) -> Any:
    """A `Trainer.__init__` that adds our callback."""

    def init(trainer: Trainer, *args: Any, **options: Any) -> None:
        original(trainer, *args, **options)
        trainer.add_callback(TransformersCallback(tempfile.mkdtemp(dir=folder), **EACH_STEP))

    return init


def with_its_own(original: Any) -> Any:
    """A method of `Trainer` that makes its accelerator, which is left alone: our callback is there."""

    def create(trainer: Trainer) -> None:
        original(trainer)
        BEGUN[trainer.accelerator] = None

    return create


def with_line(folder: str, original: Any) -> Any:
    """A `prepare` that is followed by our line, once there is an optimizer; not within a transformers `Trainer`."""

    def prepare(accelerator: Accelerator, *args: Any, **options: Any) -> Any:
        prepared = original(accelerator, *args, **options)
        if accelerator._optimizers and accelerator._dataloaders and accelerator not in BEGUN:
            BEGUN[accelerator] = AdaptiveCheckpoint(accelerator, tempfile.mkdtemp(dir=folder), **EACH_STEP)
        return prepared

    return prepare
