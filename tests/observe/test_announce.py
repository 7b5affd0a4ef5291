"""An announced line is always shown: on standard error without any logging set up, and once in a log with it."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import announce, is_heard
from ckpt_engine.store.storage.local import LocalStorage
from tests.support import interpreters

REPOSITORY = Path(__file__).parents[2]


def lonely(name: str) -> logging.Logger:
    """A logger as of a program that has set up nothing."""
    logger = logging.Logger(name)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    return logger


def test_without_handlers_it_goes_where_python_shows_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """To standard error, and the short form of it."""
    announce(lonely("a"), "a long\nreport", line="a report")
    assert capsys.readouterr() == ("", "a report\n")


def test_who_hears_it_hears_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The long form, through logging."""
    logger, records = lonely("a"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    announce(logger, "a long\nreport", line="a report")
    assert [record.getMessage() for record in records] == ["a long\nreport"]
    assert capsys.readouterr() == ("", "")


def test_who_has_set_up_logging_and_wants_no_news_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A handler for warnings is a decision."""
    logger = lonely("a")
    logger.addHandler(logging.StreamHandler())
    announce(logger, "hello")
    assert not is_heard(logger)
    assert capsys.readouterr() == ("", "")


SCRIPTS = {
    "plain": """
with Checkpointer(root, every_n_steps=2) as ckpt:
    run = ckpt.track(model=net, optimizer=optimizer, loader=data)
    for epoch in range(run.epoch, epochs):
        for (x,) in data:
            net(x).sum().backward()
            optimizer.step()
""",
    "accelerate": """
from accelerate import Accelerator
from accelerate_ckpt import AdaptiveCheckpoint
accelerator = Accelerator(cpu=True)
net, optimizer, data = accelerator.prepare(net, optimizer, data)
ckpt = AdaptiveCheckpoint(accelerator, root, every_n_steps=2)
for epoch in range(ckpt.epoch, epochs):
    for (x,) in data:
        accelerator.backward(net(x).sum())
        optimizer.step()
ckpt.close()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments
from accelerate_ckpt import TransformersCallback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return {"loss": self.net(x).sum()}
arguments = TrainingArguments(root + "-out", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
    per_device_train_batch_size=2, num_train_epochs=epochs)
Trainer(Model(), arguments, train_dataset=[{"x": torch.zeros(2)} for _ in range(8)],
    callbacks=[TransformersCallback(root, every_n_steps=2, resume="auto")]).train()
""",
    "lightning": """
import lightning.pytorch as pl
from lightning_ckpt import AdaptiveCheckpoint
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _):
        return self.net(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
pl.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[AdaptiveCheckpoint(root, every_n_steps=2)]).fit(Module(), data, ckpt_path="auto")
""",
}
HEAD = """
import os
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from ckpt_engine import Checkpointer
root, epochs = sys.argv[1], int(sys.argv[2])
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "configured"),
    [
        pytest.param(loop, configured, marks=() if loop == "plain" else pytest.mark.slow)
        for loop in SCRIPTS
        for configured in (False, True)
    ],
)
def test_a_script_that_sets_up_no_logging_says_where_it_starts(loop: str, configured: bool, tmp_path: Path) -> None:
    """Once: first that it starts fresh, then what it has resumed from, and how often it takes snapshots; and at the
    end what it has saved.
    """
    head = "import logging; logging.basicConfig(level=logging.INFO)\n" if configured else ""

    def run(epochs: int) -> str:
        done = interpreters.run(
            [sys.executable, "-W", "ignore", "-c", head + HEAD + SCRIPTS[loop], str(tmp_path / "run"), str(epochs)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            preload=interpreters.preload_of(loop),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    first, second = run(1), run(2)
    often = "snapshots every 2 steps and at the end"
    assert first.count(f"starting fresh; {often}") == 1, first
    assert second.count(often) == 1, second
    assert configured or max(text.count(str(tmp_path)) for text in (first, second)) <= 4, "a short run is noisy"
    # A busy machine skips some, and says so.
    summary = r"\d snapshots?,.* 0 failed; overhead .*; longest stall .*; step (\d) is durable on"
    assert re.findall(summary, first + second) == ["4", "8"], first + second
    assert "nothing was left to train; step 8 is durable on" in run(2)
    assert second.count("resumed at step 4") == 1, second
    assert "starting fresh" not in second and "resumed at" not in first


@pytest.mark.parametrize(
    ("options", "fraction", "said"),
    [
        ({"every_n_steps": 1}, 0.11, "overhead 11 % (every_n_steps is set: no budget applies); longest"),
        ({"every_n_steps": 1}, 0.005, "overhead 0.5 %; longest"),
        ({"every_seconds": 60.0}, 0.11, "overhead 11 %; longest"),
    ],
)
def test_an_overhead_above_the_budget_says_why(
    options: dict[str, Any],
    fraction: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fixed number of steps has no budget, which the last line of a run names where it would be exceeded."""
    caplog.set_level(logging.INFO)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(3, 2))
    monkeypatch.setattr("ckpt_engine.frequency.cadence.Cadence.overhead_fraction", fraction)
    with Checkpointer(tmp_path, writer="thread", **options) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    assert said in caplog.text


def test_a_loop_of_which_no_snapshot_can_be_taken_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop of any length says that, and not that nothing was left to train."""
    caplog.set_level(logging.INFO)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    assert "3 optimizer steps without a boundary: no snapshot can be taken" in caplog.text
    assert "no snapshot was taken; no snapshot is durable on" in caplog.text
    assert "nothing was left" not in caplog.text


def test_the_end_says_how_many_snapshots_were_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six that are due the first one is being written until the loop ends, and the last one is taken then."""
    caplog.set_level(logging.INFO)
    put, written = LocalStorage.put, threading.Event()

    def slow(storage: LocalStorage, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        assert not name.startswith("data/") or written.wait(60)
        put(storage, name, blocks, exclusive=exclusive)

    monkeypatch.setattr(LocalStorage, "put", slow)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, writer="thread", every_n_steps=1, slots=1) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for _ in range(run.global_step, 6):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            run.step()
        written.set()
    said = "2 snapshots, 4 skipped because earlier ones were still being written, 0 failed; "
    assert said in caplog.text, caplog.text


@pytest.mark.parametrize(("monitor", "said"), [("val_los", 1), ("val_loss", 0)])
def test_a_metric_that_no_snapshot_has_is_named(
    monitor: str, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the best snapshots are never kept, and nothing says why."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = {"best": {"monitor": monitor, "mode": "min", "k": 1}}
    with Checkpointer(tmp_path, writer="thread", every_n_steps=2, keep=keep) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        for _ in range(run.global_step, 4):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            run.metrics["val_loss"] = 1.0
            run.step()
    text = "keep.best ranks by 'val_los', which no snapshot of this process has; they have val_loss"
    assert caplog.text.count(text) == said, caplog.text
