"""Copies and pickles of what a run has taken over are plain: they have nothing of ours, and have not begun."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.loop.progress import UnstartedCheckpoint
from tests.loop.runs import BATCH, Augmented, Stream


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: Mapping[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": _saved,
}
LOADERS: Mapping[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=BATCH, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "workers": lambda: DataLoader(Augmented(), batch_size=BATCH, num_workers=1),
}


class Holder(torch.nn.Linear):
    """A model that knows its run, as programs written around a class have it."""

    run: Any = None
    checkpointer: Any = None


def middle_of_a_run(root: Path, loader: Any, lazy: str) -> Iterator[dict[str, Any]]:
    """What is tracked, in the second step."""
    model = Holder(6, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Checkpointer(root, every_n_steps=1, writer="thread", lazy=lazy) as checkpointer:
        run = checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        model.run, model.checkpointer = run, checkpointer
        for step, (x, _, _) in enumerate(loader):
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()
            if step == 2:
                held = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler, "dataset": loader.dataset}
                yield {"optimizer": optimizer, "scheduler": scheduler, "loader": loader, "model": model, **held}


@pytest.mark.cells(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("loader", "lazy"), [("shuffled", "off"), ("shuffled", "on"), ("stream", "off")])
def test_copies_of_what_is_tracked_are_plain(way: str, loader: str, lazy: str, tmp_path: Path) -> None:
    """Each is of the class that the user has, holds nothing of ours, and works."""
    original = LOADERS[loader]()
    for tracked in middle_of_a_run(tmp_path, original, lazy):
        copied = {name: WAYS[way](one) for name, one in tracked.items()}
        model = copied.pop("model")
        for name, one in copied.items():
            assert b"ckpt_engine" not in pickle.dumps(one), name
        assert type(copied["loader"]) is DataLoader
        assert len([*copied["loader"]]) == 6
        copied["optimizer"].step()
        assert isinstance(model.run, UnstartedCheckpoint)
        assert (model.run.global_step, model.run.epoch) == (tracked["model"].run.global_step, 0)
        model.run.step()
        assert model.checkpointer.config == tracked["model"].checkpointer.config
        assert copy.copy(tracked["model"].run).global_step == model.run.global_step


def test_copies_while_workers_load(tmp_path: Path) -> None:
    """The iterator that runs is no part of a copy."""
    for tracked in middle_of_a_run(tmp_path, LOADERS["workers"](), "off"):
        assert len([*copy.deepcopy(tracked["loader"])]) == 6
