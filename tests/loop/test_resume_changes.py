"""A resume with changes is the same change made by hand in a script that is not interrupted, and is made once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric

from accelerate_ckpt import AdaptiveCheckpoint
from ckpt_engine import Checkpointer
from tests.accelerate.runs import durable as durable_accelerate
from tests.accelerate.runs import make_accelerator
from tests.lightning.runs import Case as LightningCase
from tests.lightning.runs import Journal, every_batch, make_trainer, train
from tests.loop.changes import (
    SEED,
    End,
    FirstParts,
    Objects,
    Setup,
    Trainer,
    assert_branch,
    assert_continues,
    begun_again,
    by_hand,
    made_by,
    rebatched,
    states,
    with_new_head,
    with_streams_of,
)
from tests.loop.runs import Case, durable, every_boundary, seed_everything
from tests.support.sweeps import crossed


class Plain:
    """A loop of plain PyTorch."""

    def make(self, setup: Setup) -> Objects:
        return Objects.of(setup)

    def train(self, setup: Setup, options: Mapping[str, Any], seed: int) -> End:
        seed_everything(seed)
        mine, ckpt = self.make(setup), Checkpointer(options)
        run = ckpt.track(model=mine.model, optimizer=mine.optimizer, scheduler=mine.scheduler, loader=mine.loader)
        for epoch in range(run.epoch, setup.epochs):
            for batch, (x, y, ids) in enumerate(mine.loader, run.resumed_batches):
                durable(ckpt)
                mine.step(epoch, x, y, ids, batch)
        found = mine.ends()
        ckpt.close()
        return found

    def fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches


class WithFabric(Plain):
    """The same under Lightning Fabric."""

    def make(self, setup: Setup) -> Objects:
        tool, mine = Fabric(accelerator="cpu", devices=1), Objects.of(setup)
        mine.model, mine.optimizer = tool.setup(mine.model, mine.optimizer)
        mine.loader, mine.backward = tool.setup_dataloaders(mine.loader), tool.backward
        return mine


class WithAccelerate:
    """The same under Accelerate."""

    def make(self, setup: Setup) -> Objects:
        return self._prepared(setup)[0]

    def _prepared(self, setup: Setup) -> tuple[Objects, Any]:
        accelerator, mine = make_accelerator(Case(accumulate=setup.accumulate)), Objects.of(setup)
        mine.model, mine.optimizer, mine.loader, mine.scheduler = accelerator.prepare(
            mine.model, mine.optimizer, mine.loader, mine.scheduler
        )
        mine.backward = accelerator.backward
        mine.tool = accelerator
        return mine, accelerator

    def train(self, setup: Setup, options: Mapping[str, Any], seed: int) -> End:
        seed_everything(seed)
        mine, accelerator = self._prepared(setup)
        ckpt = AdaptiveCheckpoint(accelerator, options)
        for epoch in range(ckpt.epoch, setup.epochs):
            for batch, (x, y, ids) in enumerate(mine.loader, ckpt.resumed_batches):
                durable_accelerate(ckpt)
                mine.step(epoch, x, y, ids, batch)
        found = mine.ends()
        accelerator.end_training()
        return found

    def fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Each one with the next already fetched."""
        for one, _ in itertools.pairwise(itertools.chain(batches, [None])):
            yield one


class Module(pl.LightningModule):
    """The objects as Lightning wants them; its `state_dict` has the names of the network."""

    def __init__(self, mine: Objects) -> None:
        super().__init__()
        for name, child in mine.model.named_children():
            self.add_module(name, child)
        self.journal = Journal(mine.trace)
        self.made = [mine.optimizer], [{"scheduler": mine.scheduler, "interval": "step"}]

    def forward(self, x: Any) -> Any:
        body = next(iter(self.children()))
        return self.head(body(x))

    def training_step(self, batch: Any, _: int) -> Any:
        x, y, ids = batch
        loss = ((self(x) - y) ** 2).mean()
        self._seen = (self.current_epoch, tuple(ids.tolist()), loss.detach().item().hex())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        rates = tuple(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        self.journal.append((*self._seen, rates))

    def configure_optimizers(self) -> Any:
        return self.made


class WithLightning(Plain):
    """The same under Lightning."""

    def train(self, setup: Setup, options: Mapping[str, Any], seed: int) -> End:
        seed_everything(seed)
        mine = self.make(setup)
        callbacks = every_batch(Path(options["tiers"]), **{"resume": "auto", **options})
        more = {"max_epochs": setup.epochs, "accumulate_grad_batches": setup.accumulate}
        trainer = make_trainer(LightningCase(), callbacks, False, **more)
        train(trainer, Module(mine), LightningCase(loader=lambda: mine.loader), None)
        return mine.ends()


TRAINERS: dict[str, Trainer] = {
    "plain": Plain(),
    "fabric": WithFabric(),
    "accelerate": WithAccelerate(),
    "lightning": WithLightning(),
}
"""What a value of an option changes is decided below them: where a test has several, the quick suite has all of them
for the plain loop, and the first for each other trainer."""


@pytest.fixture(params=TRAINERS)
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return TRAINERS[request.param]


@pytest.mark.cells(1)
def test_weights_only_begin_at_step_0(trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """Nothing but the weights is the old run's."""
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    new = Setup(rate=3e-3, schedule="step")
    told = assert_branch(trainer, new, folder, {"only": ["model"]}, begun_again(trainer, new, Setup(), SEED, "model"))
    assert told.step == 0
    assert {one.name for one in told.changes} >= {"optimizer", "scheduler"}


@pytest.mark.cells(2)
@pytest.mark.parametrize(("trainer", "schedule"), crossed(tuple(TRAINERS), ["warmup", "step"]), indirect=["trainer"])
def test_weights_and_moments_with_a_new_schedule(
    schedule: str, trainer: Trainer, first_parts: FirstParts, tmp_path: Path
) -> None:
    """The new schedule begins with its own rate."""
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    new = Setup(schedule=schedule)
    expected = begun_again(trainer, new, Setup(), SEED, "model", "optimizer")
    assert_branch(trainer, new, folder, {"only": ["model", "optimizer"]}, expected)


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("trainer", "section"),
    crossed(tuple(TRAINERS), [{"strict": False}, {"skip": ["model.head.*"]}]),
    ids=str,
    indirect=["trainer"],
)
def test_another_head(section: Any, trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """The run continues in its place with a head that is new, and so are its moments."""
    outputs = 3 if "strict" in section else 1
    new = Setup(outputs=outputs)
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    told = assert_branch(trainer, new, folder, section, by_hand(trainer, Setup(), with_new_head(trainer, new)))
    assert [one.name for one in told.changes] == ["model.head.weight", "model.head.bias"]


@pytest.mark.cells(1)
def test_fresh_random_streams(trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """The data stays in its place, and what is drawn is this process's."""
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    streams = by_hand(trainer, Setup(), with_streams_of(trainer, Setup()))
    # The batch of the change was drawn before it by hand.
    told = assert_branch(trainer, Setup(), folder, {"skip": ["rng"]}, streams)
    assert [one.name for one in told.changes] == ["rng"]
    assert "random streams" not in {one.name for one in told.restored}


@pytest.mark.cells(1)
def test_an_overridden_value(trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """A learning rate and a list, once."""

    def change(old: Objects) -> Objects:
        for group in old.optimizer.param_groups:
            group["lr"], group["betas"] = 3e-4, (0.8, 0.99)
        return old

    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    values = {"optimizer.param_groups.*.lr": 3e-4, "optimizer.param_groups.*.betas": [0.8, 0.99]}
    told = assert_branch(trainer, Setup(), folder, {"override": values}, by_hand(trainer, Setup(), change))
    assert [(one.how, one.name) for one in told.changes] == [
        ("set", "optimizer.param_groups.0.lr"),
        ("set", "optimizer.param_groups.0.betas"),
    ]


@pytest.mark.cells(1)
def test_renamed_weights(trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """The moments go with them."""
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    told = assert_branch(
        trainer, Setup(body="trunk"), folder, {"map": {"model.body.*": "model.trunk.*"}}, _renamed(trainer)
    )
    assert ("renamed", "model.body.0.weight", "is model.trunk.0.weight") in [
        (one.how, one.name, one.detail) for one in told.changes
    ]


def _renamed(trainer: Trainer) -> Any:
    def change(old: Objects) -> Objects:
        made, _ = made_by(trainer, Setup(body="trunk"), SEED)
        found = states(old)
        made.model.load_state_dict({name.replace("body", "trunk"): one for name, one in found["model"].items()})
        made.optimizer.load_state_dict(found["optimizer"])
        made.scheduler.load_state_dict(found["scheduler"])
        made.trace, made.loader = old.trace, old.loader
        return made

    return by_hand(trainer, Setup(), change)


@pytest.mark.cells(1)
def test_more_epochs(trainer: Trainer, tmp_path: Path) -> None:
    """A run that ended continues, without a section."""
    trainer.train(Setup(), every_boundary(tmp_path / "run"), 0)
    longer, batches = Setup(epochs=3), len(by_hand(trainer, Setup())[0])
    assert_continues(trainer, longer, tmp_path / "run", {}, by_hand(trainer, longer), batches)


@pytest.mark.cells(2)
@pytest.mark.parametrize(("trainer", "batch"), crossed(tuple(TRAINERS), [3, 8]), indirect=["trainer"])
def test_another_batch_size(batch: int, trainer: Trainer, first_parts: FirstParts, tmp_path: Path) -> None:
    """The rest of the epoch comes in batches of the new size."""
    folder = first_parts.copy(trainer, Setup(), tmp_path / "1")
    expected = rebatched(trainer, Setup(), Setup(batch=batch))
    told = assert_continues(trainer, Setup(batch=batch), folder, {"data": "continue"}, expected)
    assert "data: continue: batch_size was 4" in told.not_restored[0].why


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("trainer", "batches"), crossed(tuple(TRAINERS), [(2, 3), (1, 2), (2, 1)]), ids=str, indirect=["trainer"]
)
def test_another_accumulation(
    batches: tuple[int, int], trainer: Trainer, first_parts: FirstParts, tmp_path: Path
) -> None:
    """Snapshots are taken between two steps: no gradients are lost."""
    before, now = batches
    old = Setup(accumulate=before)
    folder = first_parts.copy(trainer, old, tmp_path / "1")
    expected = by_hand(trainer, old, lambda mine: mine.accumulating(now))
    assert_continues(trainer, Setup(accumulate=now), folder, {}, expected)
