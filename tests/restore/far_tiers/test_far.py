"""A training begins before a far tier has said anything, in every trainer; the line of the campaign is as it says."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from accelerate_ckpt import AdaptiveCheckpoint as AccelerateCheckpoint
from ckpt_engine import Checkpointer
from ckpt_engine.restore import ask_tiers, far_storage
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import secondary_tiers
from lightning_ckpt import AdaptiveCheckpoint as LightningCheckpoint
from tests.restore.far_tiers.line import DEAD, DENIES, HANGS, REFUSES, SLOW, WORKS, Line
from tests.servers.s3 import free_port

WAIT_SECONDS = 60.0
FOR_EVER = 1e6
ROUNDS = 2
Step = Callable[[], None]


class Silent(LocalStorage):
    """A far tier that answers nothing before `speaks` is set."""

    speaks = threading.Event()
    asked = threading.Event()

    def get(self, *args: Any, **options: Any) -> bytes:
        self._wait()
        return super().get(*args, **options)

    def put(self, *args: Any, **options: Any) -> None:
        self._wait()
        super().put(*args, **options)

    def list(self, prefix: str) -> Any:
        self._wait()
        return super().list(prefix)

    def _wait(self) -> None:
        self.asked.set()
        assert self.speaks.wait(WAIT_SECONDS)


def opened(instead: Mapping[str, LocalStorage], url: str, options: Mapping[str, object] | None = None) -> Storage:
    """As `open_storage`, with others instead of what would be there."""
    return instead.get(url) or open_storage(url, options or {})


class Counting(LocalStorage):
    """A far tier that counts what it is asked."""

    def __init__(self, path: Path, asked: list[str]) -> None:
        super().__init__(path)
        self._asked = asked

    def get(self, name: str, *args: Any, **options: Any) -> bytes:
        self._asked.append(name)
        return super().get(name, *args, **options)

    def list(self, prefix: str) -> Any:
        self._asked.append(prefix)
        return super().list(prefix)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A far tier that answers only when the test lets it; a wait for it lasts longer than a test may take."""
    path = tmp_path / "far"
    Silent.speaks, Silent.asked = threading.Event(), threading.Event()

    for module in (secondary_tiers, far_storage):
        monkeypatch.setattr(module, "open_storage", partial(opened, {str(path): Silent(path)}))
    monkeypatch.setattr(secondary_tiers, "SURVEY_SECONDS", FOR_EVER)
    monkeypatch.setattr(ask_tiers, "ANSWER_SECONDS", FOR_EVER)
    monkeypatch.setattr(ask_tiers, "LONGER_SECONDS", FOR_EVER)
    yield path
    Silent.speaks.set()


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(2, 1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def lightning(options: dict[str, Any], step: Step) -> None:
    class Steps(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            step()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callbacks = [LightningCheckpoint(options), Steps()]
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=callbacks, **quiet)
    trainer.fit(Module(), loader())


def accelerate(options: dict[str, Any], step: Step) -> None:
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader())
    ckpt = AccelerateCheckpoint(accelerator, options)
    for _ in range(ckpt.epoch, ckpt.epoch + 1):
        for (batch,) in batches:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            step()
    ckpt.close()


def plain(options: dict[str, Any], step: Step) -> None:
    model, batches = net(), loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(options) as ckpt:
        tracker = ckpt.track(model=model, optimizer=optimizer, loader=batches)
        for _ in range(tracker.epoch, tracker.epoch + 1):
            for (batch,) in batches:
                model(batch).sum().backward()
                optimizer.step()
                step()
        tracker.finish()


@pytest.mark.cells(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("train", [lightning, accelerate, plain])
def test_the_first_step_comes_before_the_far_tier_has_said_anything(
    train: Callable[[dict[str, Any], Step], None], far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that resumes uses the nearest tier once the far one's time is over; later the far one catches up."""
    near = tmp_path / "near"
    options = {"writer": "thread", "every_n_steps": 2, "keep": {"last": 9}}
    before = 0
    if train is not lightning:
        train({**options, "tiers": str(near)}, lambda: None)
        before = Repository(LocalStorage(near)).list()[-1].step
        monkeypatch.setattr(ask_tiers, "ANSWER_SECONDS", 0.0)
    silent: list[bool] = []

    def step() -> None:
        silent.append(not Silent.speaks.is_set())
        assert Silent.asked.wait(WAIT_SECONDS)
        Silent.speaks.set()

    train({**options, "tiers": [str(near), str(far)]}, step)
    assert silent == [True, False, False, False]
    assert Repository(LocalStorage(near)).list()[-1].step == before + 4
    assert Repository(LocalStorage(far)).list()[-1].step == before + 4


@pytest.mark.cells(1)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("train", [lightning, accelerate, plain])
def test_a_resume_asks_a_far_tier_once_what_it_has(
    train: Callable[[dict[str, Any], Step], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who chooses a snapshot and then loads it goes by the same answers: each one of a slow tier takes its time."""
    near, far, url = tmp_path / "near", LocalStorage(tmp_path / "far"), "s3://bucket/far"
    options = {"writer": "thread", "keep": {"last": 9}, "resume": "auto", "tiers": [str(near), url]}
    asked: list[str] = []
    for module, storage in ((secondary_tiers, far), (far_storage, Counting(far.root, asked))):
        monkeypatch.setattr(module, "open_storage", partial(opened, {url: storage}))
    train(options, lambda: None)
    asked.clear()
    train(options, lambda: None)
    assert sorted(asked) == [names.RECORD, names.MANIFESTS]


def test_what_vanishes_after_the_choice_is_passed_over_and_the_next_load_looks_again(tmp_path: Path) -> None:
    """Listings of further tiers are those of the choice for one load only."""
    near, far = tmp_path / "near", tmp_path / "far"
    options = {"tiers": [str(near), str(far)], "writer": "thread", "keep": {"last": 9}}
    with Checkpointer(options) as ckpt:
        for step in (1, 2):
            assert ckpt.save({"x": torch.tensor([step])}, step=step).wait(WAIT_SECONDS)
    shutil.rmtree(near)
    with Checkpointer(options) as ckpt:
        chosen = ckpt.engine.choose()
        assert chosen is not None and chosen.info.step == 2
        manifest = far / names.manifest_name(chosen.info.id)
        text = manifest.read_bytes()
        manifest.unlink()
        assert ckpt.load() == {"x": torch.tensor([1])}
        assert ckpt.loaded is not None
        assert [one.id for one in ckpt.loaded.rejected] == [chosen.info.id]
        manifest.write_bytes(text)
        assert ckpt.load() == {"x": torch.tensor([2])}


def test_a_slow_line_delays_each_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not delay each piece of an answer, of which a server may send the second one much later."""
    late: list[float] = []
    monkeypatch.setattr("tests.restore.far_tiers.line.SLOW_SECONDS", 0.0)
    monkeypatch.setattr("tests.restore.far_tiers.line.time", SimpleNamespace(sleep=late.append))
    server = socket.create_server(("127.0.0.1", 0))
    with Line(("127.0.0.1", server.getsockname()[1]), free_port()) as line:
        line.become(SLOW)
        with socket.create_connection(("127.0.0.1", line.port), WAIT_SECONDS) as one:
            there, _ = server.accept()
            with there:
                for _ in range(ROUNDS):
                    one.sendall(b"?")
                    assert there.recv(1) == b"?"
                    for piece in (b"1", b"2"):
                        there.sendall(piece)
                        assert one.recv(1) == piece
    server.close()
    assert late == [0.0] * ROUNDS


def test_a_line_is_as_it_says() -> None:
    """It works, hangs in silence, denies, refuses, and is dead: no connection is made."""
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        with suppress(OSError):
            while True:
                one, _ = server.accept()
                with one, suppress(OSError):
                    one.sendall(b"!" + one.recv(100))

    echoing = threading.Thread(target=echo)
    echoing.start()

    def ask(seconds: float = WAIT_SECONDS) -> bytes:
        with socket.create_connection(("127.0.0.1", line.port), seconds) as one:
            one.sendall(b"?")
            return one.recv(100)

    with Line(("127.0.0.1", server.getsockname()[1]), free_port()) as line:
        for _ in range(ROUNDS):
            line.become(WORKS)
            assert ask() == b"!?"
            line.become(DENIES)
            assert ask().startswith(b"HTTP/1.1 403")
            line.become(HANGS)
            with pytest.raises(TimeoutError):
                ask(0.2)
            assert line.asked.is_set()
            line.become(REFUSES)
            with pytest.raises(ConnectionRefusedError):
                ask()
            line.become(DEAD)
            with pytest.raises(TimeoutError):
                ask(0.2)
    server.shutdown(socket.SHUT_RDWR)
    echoing.join(WAIT_SECONDS)
    server.close()
