"""Metrics of torchmetrics are bitwise after a resume in the middle of an epoch, or the report names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics as tm
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

from accelerate_ckpt import AdaptiveCheckpoint
from ckpt_engine import Checkpointer
from ckpt_engine.loop import components
from tests.support.digests import seed_everything

EPOCHS, BATCHES, CLASSES = 3, 5, 3


class Own(tm.Metric):
    """A metric of the user, with a count that is no state and a state that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=torch.zeros(0), dist_reduce_fx="cat", persistent=True)
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.batches = 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.batches += 1
        self.seen = torch.cat([self.seen, preds.mean()[None]])
        self.rows.append(preds.amax(1))

    def compute(self) -> Any:
        return self.seen.sum() + torch.cat(self.rows).sum() * self.batches


class Wrapped(nn.Module):
    """A module that holds metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"accuracy": accuracy(), "mean": tm.RunningMean(window=3)})

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.inner["accuracy"].update(preds, target)
        self.inner["mean"].update(preds.mean())

    def compute(self) -> Any:
        return {name: one.compute() for name, one in self.inner.items()}

    def reset(self) -> None:
        for one in self.inner.values():
            one.reset()


class Listed:
    """A plain object that holds metrics, and a state of its own that leaves them out."""

    def __init__(self) -> None:
        self.metrics = [accuracy(), tm.RunningMean(window=3)]

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.metrics[0].update(preds, target)
        self.metrics[1].update(preds.mean())

    def compute(self) -> Any:
        return [one.compute() for one in self.metrics]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OnMean(nn.Module):
    """Feeds the mean of the predictions to a metric of one number."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.metric.update(preds.mean())

    def compute(self) -> Any:
        return self.metric.compute()


def accuracy(**options: Any) -> Any:
    return tm.Accuracy(task="multiclass", num_classes=CLASSES, **options)


def tracker(metric: Any) -> Any:
    return MetricTracker(metric, maximize=True)


def collection() -> Any:
    return tm.MetricCollection(
        [tm.Precision(task="multiclass", num_classes=CLASSES), tm.Recall(task="multiclass", num_classes=CLASSES), Own()]
    )


def persistent(metric: Any) -> Any:
    metric.persistent(True)
    return metric


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": accuracy,
    "persistent": lambda: persistent(accuracy()),
    "lists": lambda: tm.AUROC(task="multiclass", num_classes=CLASSES),
    "persistent lists": lambda: persistent(tm.AUROC(task="multiclass", num_classes=CLASSES)),
    "own": Own,
    "collection": collection,
    "running mean": lambda: OnMean(tm.RunningMean(window=3)),
    "running": lambda: Running(accuracy(average="micro"), window=2),
    "min max": lambda: MinMaxMetric(accuracy()),
    "bootstrapper": lambda: BootStrapper(accuracy(average="micro"), num_bootstraps=3, raw=True),
    "classwise": lambda: ClasswiseWrapper(accuracy(average=None)),
    "multioutput": lambda: MultioutputWrapper(tm.MeanSquaredError(), num_outputs=CLASSES),
    "tracker": lambda: tracker(accuracy()),
    "tracker of persistent": lambda: tracker(persistent(accuracy())),
    "tracker of a wrapper": lambda: tracker(MinMaxMetric(accuracy())),
    "inside a module": Wrapped,
    "in a plain object": Listed,
}


QUICK = ("running mean", "collection", "tracker of persistent", "in a plain object")
CASES = [
    pytest.param(name, trainer, marks=() if name in QUICK and trainer == "plain" else pytest.mark.slow)
    for name in METRICS
    for trainer in ("plain", "accelerate")
]


class KilledError(Exception):
    """The process dies here."""


def feed(metric: Any, preds: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(metric, nn.Identity):
        return
    if isinstance(metric, MultioutputWrapper):
        metric.update(preds, nn.functional.one_hot(target, CLASSES).float())
    else:
        metric.update(preds, target)


def data() -> Any:
    draws = torch.Generator().manual_seed(4)
    x = torch.randn(BATCHES * 4, 6, generator=draws)
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % CLASSES), batch_size=4, shuffle=True)


def begin_epoch(metric: Any, *, resets: bool) -> None:
    if isinstance(metric, MetricTracker):
        metric.increment()
    elif resets and not isinstance(metric, Listed | OnMean):
        metric.reset()


def values(found: Any) -> Any:
    """Computed values as text."""
    if isinstance(found, dict):
        return {name: values(one) for name, one in found.items()}
    if isinstance(found, list | tuple):
        return [values(one) for one in found]
    return torch.as_tensor(found).double().reshape(-1).tolist()


def run(
    folder: Path, make: Callable[[], Any], seed: int, kill: int | None, trainer: str, *, resets: bool = False
) -> list[Any]:
    """One process: the metric's value after each step, by step."""
    seed_everything(seed)
    model, metric, loader = nn.Linear(6, CLASSES), make(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"every_n_steps": 1, "writer": "thread"}
    rows: list[Any] = []
    if trainer == "accelerate":
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(metric)
        ckpt: Any = AdaptiveCheckpoint(accelerator, str(folder), **options)
        engine, backward = ckpt, accelerator.backward
    else:
        engine = Checkpointer(str(folder), **options)
        ckpt, backward = (
            engine.track(model=model, optimizer=optimizer, loader=loader, metric=metric),
            torch.Tensor.backward,
        )
    try:
        for _ in range(ckpt.epoch, EPOCHS):
            begin_epoch(metric, resets=resets)
            for x, y in loader:
                if len(rows) == kill:
                    raise KilledError
                out = model(x)
                loss = nn.functional.cross_entropy(out, y)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                feed(metric, out.detach().softmax(1), y)
                rows.append([values(out), None if isinstance(metric, nn.Identity) else values(metric.compute())])
    except KilledError:
        pass
    finally:
        engine.close()
    return rows


@pytest.mark.cells(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "trainer"), CASES)
def test_a_metric_goes_on_where_it_was(name: str, trainer: str, tmp_path: Path) -> None:
    """Three processes, each killed in the middle of an epoch, with other seeds: all values as in one."""
    whole = run(tmp_path / "whole", METRICS[name], 1, None, trainer)
    for seed, kill in ((1, 3), (7, 4), (9, None)):
        rows = run(tmp_path / "parts", METRICS[name], seed, kill, trainer)
        first = next(index for index, (out, _) in enumerate(whole) if out == rows[0][0])
        assert (first > 0) == (seed > 1)
        assert rows == whole[first : first + len(rows)]
    report = json.loads((tmp_path / "parts" / "resume-report.json").read_text())
    assert report["not_restored"] == []


def test_a_script_may_reset_its_metric_when_an_epoch_begins(tmp_path: Path) -> None:
    """A resumed script does so too, although its epoch began in another process."""
    whole = run(tmp_path / "whole", accuracy, 1, None, "plain", resets=True)
    run(tmp_path / "parts", accuracy, 1, BATCHES + 3, "plain", resets=True)
    rows = run(tmp_path / "parts", accuracy, 7, None, "plain", resets=True)
    assert rows == whole[-len(rows) :]
    assert len(rows) < len(whole)


def test_a_metric_that_the_snapshot_lacks_is_named(tmp_path: Path) -> None:
    """Its `state_dict` is empty, so there is nothing to restore: the report must not claim it."""
    run(tmp_path, lambda: nn.Identity(), 1, 3, "plain")
    run(tmp_path, accuracy, 1, 1, "plain")
    report = json.loads((tmp_path / "resume-report.json").read_text())
    assert [one["name"] for one in report["not_restored"]] == ["metric object 'metric'"]
    assert "metric" not in [one["name"] for one in report["restored"]]


def test_the_private_names_of_the_library_exist() -> None:
    """An upgrade that renames one is seen here."""
    assert all(name in vars(tm.SumMetric()) for name in components.PRIVATE_NAMES)
