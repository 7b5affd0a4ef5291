"""Loops that do more than iterate one loader: a resume from every boundary is exact there too."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.loop.tracker import Tracker
from tests.loop.runs import (
    BATCH,
    Augmented,
    Net,
    Outcome,
    digest,
    durable,
    every_boundary,
    only,
    report,
    resume_only,
    saved,
    seed_everything,
)


class Setting:
    """One process: its model, optimizer and loader, the tracker, and the trace."""

    def __init__(self, options: Mapping[str, Any] | None, *, seed: int = 0, samples: int = 22) -> None:
        seed_everything(seed)
        self.trace: list[Any] = []
        self.options = options
        self.model = Net()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.loader = DataLoader(Augmented(samples), batch_size=BATCH, shuffle=True)
        self.ckpt: Checkpointer | None = None
        self.tracker: Tracker | None = None

    def track(self, **more: Any) -> None:
        if self.options is not None:
            self.ckpt = Checkpointer(self.options)
            self.tracker = self.ckpt.track(model=self.model, optimizer=self.optimizer, loader=self.loader, **more)

    @property
    def epoch(self) -> int:
        return self.tracker.epoch if self.tracker is not None else 0

    @property
    def done(self) -> int:
        return self.tracker.resumed_batches if self.tracker is not None else 0

    @property
    def step(self) -> int:
        return self.tracker.global_step if self.tracker is not None else 0

    def train(self, x: Any, y: Any, *what: Any) -> None:
        durable(self.ckpt)
        self.optimizer.zero_grad()
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.trace.append((*what, loss.detach().item().hex()))

    def end(self) -> Outcome:
        found = digest(weights=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        if self.ckpt is not None:
            self.ckpt.close()
        return Outcome(self.trace, found)


Loop = Callable[..., Outcome]


def looks_at_a_batch_first(options: Any, seed: int = 0) -> Outcome:
    """Asks the loader for a batch to see its shape, and evaluates on the training data, before it trains."""
    run = Setting(options, seed=seed)
    run.track()
    next(iter(run.loader))
    for _ in run.loader:
        pass
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            run.train(x, y, epoch, tuple(ids.tolist()))
    return run.end()


def leaves_epochs_early(options: Any, seed: int = 0) -> Outcome:
    """Trains on four batches of each epoch."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 4):
        for batch, (x, y, ids) in enumerate(run.loader, run.done):
            run.train(x, y, epoch, batch, tuple(ids.tolist()))
            if batch == 3:
                break
    return run.end()


def takes_pairs_of_batches(options: Any, seed: int = 0) -> Outcome:
    """Iterates two loaders at once."""
    run = Setting(options, seed=seed)
    second = DataLoader(Augmented(30), batch_size=BATCH, shuffle=True)
    run.track(second=second)
    for epoch in range(run.epoch, 3):
        for (x, y, ids), (_, _, others) in zip(run.loader, second, strict=False):
            run.train(x, y, epoch, tuple(ids.tolist()), tuple(others.tolist()))
    return run.end()


def fetches_several_batches_ahead(options: Any, seed: int = 0) -> Outcome:
    """Asks for four batches at once, also where fewer are left, and trains on them afterwards."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 4):
        batches = iter(run.loader)
        while group := list(itertools.islice(batches, 4)):
            for x, y, ids in group:
                durable(run.ckpt)
                ((run.model(x) - y) ** 2).mean().backward()
                run.trace.append((epoch, tuple(ids.tolist())))
            run.optimizer.step()
            run.optimizer.zero_grad()
    return run.end()


def steps_without_a_loader(options: Any, seed: int = 0) -> Outcome:
    """Makes its data itself, and says when a step is done."""
    run = Setting(options, seed=seed)
    run.track()
    for step in range(run.step, 8):
        x = torch.randn(4, 6)
        run.train(x, x.sum(1, keepdim=True), step)
        if run.tracker is not None:
            run.tracker.step()
    return run.end()


def draws_from_an_endless_iterator(options: Any, seed: int = 0) -> Outcome:
    """Calls next() by itself, epoch after epoch."""
    run = Setting(options, seed=seed)
    run.track()
    iterator = iter(run.loader)
    for step in range(run.step, 16):
        try:
            x, y, ids = next(iterator)
        except StopIteration:
            iterator = iter(run.loader)
            x, y, ids = next(iterator)
        run.train(x, y, step, tuple(ids.tolist()))
    return run.end()


def trains_two_models_in_turn(options: Any, seed: int = 0) -> Outcome:
    """The second optimizer gathers gradients of two batches, so between them some wait."""
    run = Setting(options, seed=seed)
    critic = nn.Linear(1, 1)
    slow = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    run.track(critic=critic, slow=slow)
    for epoch in range(run.epoch, 3):
        for batch, (x, y, ids) in enumerate(run.loader, run.done):
            critic(run.model(x).detach()).mean().backward()
            run.train(x, y, epoch, batch, tuple(ids.tolist()), critic.weight.item().hex())
            if batch % 2 == 1:
                slow.step()
                slow.zero_grad()
    run.trace.append([p.item().hex() for p in critic.parameters()])
    return run.end()


def trains_one_model_through_another(options: Any, seed: int = 0) -> Outcome:
    """A GAN: what the generator's loss leaves in the discriminator goes into its next step."""
    run = Setting(options, seed=seed)
    critic = nn.Linear(1, 1)
    second = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.track(critic=critic, second=second)
    for epoch in range(run.epoch, 3):
        for number, (x, y, ids) in enumerate(run.loader, run.done):
            durable(run.ckpt)
            judged = critic(y).mean() - critic(run.model(x).detach()).mean()
            judged.backward()
            second.step()
            second.zero_grad()
            if number % 2:
                critic(run.model(x)).mean().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            run.trace.append((epoch, tuple(ids.tolist()), judged.detach().item().hex(), critic.weight.item().hex()))
    return run.end()


def steps_before_its_backward_pass(options: Any, seed: int = 0) -> Outcome:
    """One optimizer: what a batch leaves goes into the step at the beginning of the next one."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            run.optimizer.step()
            run.optimizer.zero_grad()
            loss = ((run.model(x) - y) ** 2).mean()
            loss.backward()
            run.trace.append((epoch, tuple(ids.tolist()), loss.detach().item().hex()))
    return run.end()


def steps_on_with_old_gradients(options: Any, seed: int = 0) -> Outcome:
    """What a step has used stays for the next two, as they come on top."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 3):
        for batch, (x, y, ids) in enumerate(run.loader, run.done):
            durable(run.ckpt)
            ((run.model(x) - y) ** 2).mean().backward()
            run.optimizer.step()
            if batch % 3 == 2:
                run.optimizer.zero_grad()
            run.trace.append((epoch, batch, tuple(ids.tolist())))
    return run.end()


def _clears_some(options: Any, seed: int, *, first: bool) -> Outcome:
    run = Setting(options, seed=seed)
    scale = nn.ParameterDict({"scale": nn.Parameter(torch.ones(1))})
    layers = [one for one in run.model.modules() if any(True for _ in one.parameters(recurse=False))]
    middle = [*layers[0].parameters(recurse=False), *scale.parameters(), *layers[-1].parameters(recurse=False)]
    run.optimizer = torch.optim.SGD(middle, lr=1e-2)
    run.track(scale=scale)
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            if first:
                run.model.zero_grad()
            ((run.model(x) * scale["scale"] - y) ** 2).mean().backward()
            run.optimizer.step()
            if not first:
                run.model.zero_grad()
            run.trace.append((epoch, tuple(ids.tolist()), scale["scale"].item().hex()))
    return run.end()


def clears_all_but_one_gradient(options: Any, seed: int = 0) -> Outcome:
    """A parameter that is neither the first nor the last one steps with the sum of its gradients."""
    return _clears_some(options, seed, first=False)


def clears_all_but_one_gradient_first(options: Any, seed: int = 0) -> Outcome:
    """The same, and the loop clears the others at its beginning."""
    return _clears_some(options, seed, first=True)


class Sharpness(torch.optim.Optimizer):
    """Steps twice a batch, the second time through the optimizer that it has inside; its radius is an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.inner, self.radius = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9), 0.05

    @torch.no_grad()
    def up(self) -> None:
        for one in self.param_groups[0]["params"]:
            self.state[one]["moved"] = one.grad * self.radius
            one.add_(self.state[one]["moved"])
        self.radius *= 0.9
        self.zero_grad()

    @torch.no_grad()
    def down(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.sub_(self.state[one]["moved"])
        self.inner.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def steps_through_an_inner_optimizer(options: Any, seed: int = 0, *, named: bool = True) -> Outcome:
    """The optimizer that is tracked makes no step itself; that of the inner one is a step of it."""
    run = Setting(options, seed=seed)
    run.optimizer = outer = Sharpness(run.model.parameters())
    run.track(**({"inner": outer.inner} if named else {}))
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            for move in (outer.up, outer.down):
                ((run.model(x) - y) ** 2).mean().backward()
                move()
            run.trace.append((epoch, tuple(ids.tolist())))
    return run.end()


class Ranged(nn.Module):
    """Keeps the tensors that it loads, and changes their size in place, as observers of quantization do."""

    low: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = torch.minimum(self.low, x.detach().min())
        self.low.detach_().resize_(low.shape).copy_(low)
        return x - self.low

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self.low = state_dict[f"{prefix}low"]


def loads_by_keeping(options: Any, seed: int = 0) -> Outcome:
    """A module takes what it loads as it is."""
    run = Setting(options, seed=seed)
    run.model = nn.Sequential(Ranged(), nn.Linear(6, 1))  # type: ignore[assignment]
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=1e-2)
    run.track()
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            run.train(x, y, epoch, tuple(ids.tolist()))
    return run.end()


def accumulates_beyond_the_epoch(options: Any, seed: int = 0) -> Outcome:
    """The last two batches of an epoch wait for the next one's."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 5):
        for batch, (x, y, ids) in enumerate(run.loader, run.done):
            durable(run.ckpt)
            ((run.model(x) - y) ** 2).mean().backward()
            run.trace.append((epoch, batch, tuple(ids.tolist())))
            if (epoch * 6 + batch) % 4 == 3:
                run.optimizer.step()
                run.optimizer.zero_grad()
    return run.end()


def scales_gradients(options: Any, seed: int = 0) -> Outcome:
    """A GradScaler that skips steps where gradients overflow."""
    run = Setting(options, seed=seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    run.track(scaler=scaler)
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            run.optimizer.zero_grad()
            loss = ((run.model(x) - y) ** 2).mean()
            overflows = float("inf") if int(ids[0]) % 5 == 0 else 1.0
            scaler.scale(loss * overflows).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.trace.append((epoch, tuple(ids.tolist()), loss.detach().item().hex(), scaler.get_scale()))
    return run.end()


def freezes_and_unfreezes(options: Any, seed: int = 0) -> Outcome:
    """What is frozen from the second epoch on is set once, at that epoch's start."""
    run = Setting(options, seed=seed)
    run.track()
    for epoch in range(run.epoch, 3):
        if epoch == 1 and not run.done:
            run.model.head[0].requires_grad_(False)
        for x, y, ids in run.loader:
            run.train(x, y, epoch, tuple(ids.tolist()))
    return run.end()


def curves(options: Any, seed: int = 0) -> Outcome:
    """L-BFGS calls the loss several times per step, and keeps lists of tensors."""
    run = Setting(options, seed=seed)
    run.optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=3)
    run.track()
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            run.trace.append((epoch, tuple(ids.tolist())))

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                run.optimizer.zero_grad()
                loss: torch.Tensor = ((run.model(x) - y) ** 2).mean()
                loss.backward()
                run.trace.append(loss.detach().item().hex())
                return loss

            run.optimizer.step(closure)
    return run.end()


def fabric(options: Any, seed: int = 0) -> Outcome:
    """Everything was set up by Lightning Fabric."""
    from lightning.fabric import Fabric

    run = Setting(options, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on small loaders
        tool = Fabric(accelerator="cpu", devices=1)
        model, run.optimizer = tool.setup(run.model, run.optimizer)
        run.loader = tool.setup_dataloaders(run.loader)
    run.model = model
    run.track()
    for epoch in range(run.epoch, 3):
        for x, y, ids in run.loader:
            durable(run.ckpt)
            run.optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            tool.backward(loss)
            run.optimizer.step()
            run.trace.append((epoch, tuple(ids.tolist()), loss.detach().item().hex()))
    return run.end()


LOOPS = (
    leaves_epochs_early,
    fetches_several_batches_ahead,
    takes_pairs_of_batches,
    steps_without_a_loader,
    draws_from_an_endless_iterator,
    trains_two_models_in_turn,
    trains_one_model_through_another,
    steps_before_its_backward_pass,
    steps_on_with_old_gradients,
    clears_all_but_one_gradient,
    clears_all_but_one_gradient_first,
    steps_through_an_inner_optimizer,
    loads_by_keeping,
    accumulates_beyond_the_epoch,
    scales_gradients,
    freezes_and_unfreezes,
    curves,
    fabric,
)


SHORT = (fetches_several_batches_ahead, steps_without_a_loader, accumulates_beyond_the_epoch)
"""Loops of a few steps, with a snapshot of each."""


@pytest.mark.cells(5)
@pytest.mark.parametrize("loop", [*LOOPS, looks_at_a_batch_first], ids=lambda loop: loop.__name__)
def test_the_loop_resumes_exactly(loop: Loop, tmp_path: Path) -> None:
    """The tracked run is the untracked one; its middle and last boundary resume it, and the first of a short one."""
    reference = loop(None)
    watched = loop(every_boundary(tmp_path / "run", every_n_steps=1 if loop in SHORT else 4))
    assert watched == reference
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    assert len(snapshots) >= 3
    chosen = (*snapshots[: loop in SHORT], snapshots[len(snapshots) // 2], snapshots[-1])
    for number, snapshot in enumerate(chosen):
        folder = only(tmp_path / "run", snapshot, tmp_path / str(number))
        resumed = loop(resume_only(folder), seed=77 + number)
        assert resumed.trace == reference.trace[len(reference.trace) - len(resumed.trace) :], snapshot
        assert len(resumed.trace) < len(reference.trace), snapshot
        assert resumed.digest == reference.digest, snapshot
        assert resumed.trace or snapshot is snapshots[-1]


def test_a_resumed_loop_knows_that_it_steps_on_with_old_gradients(tmp_path: Path) -> None:
    """The first snapshot of a resumed process has them: it does not find out a second time."""
    reference = steps_on_with_old_gradients(None)
    steps_on_with_old_gradients(every_boundary(tmp_path / "run"))
    [third] = [one for one in saved(tmp_path / "run") if one.step == 3]
    again = only(tmp_path / "run", third, tmp_path / "again")
    steps_on_with_old_gradients(every_boundary(again))
    [fourth] = [one for one in saved(again) if one.step == 4]
    resumed = steps_on_with_old_gradients(resume_only(only(again, fourth, tmp_path / "last")), seed=7)
    assert resumed.digest == reference.digest


def test_a_loader_that_the_script_drops_lives_as_long_as_it_is_tracked(tmp_path: Path) -> None:
    """A loop in a function of its own, closed outside of it, still gets its final snapshot."""
    run = Setting(every_boundary(tmp_path))
    run.track()
    for x, y, ids in run.loader:
        run.train(x, y, tuple(ids.tolist()))
    del run.loader
    run.end()
    assert saved(tmp_path)[-1].reason == "end"


def trains_one_fold_after_another(root: Path, *, seed: int) -> tuple[list[int], list[Any]]:
    """Three models, each with a run of its own and scored on data that draws; steps made here, and all there is."""
    seed_everything(seed)
    steps, trace = [], []
    for fold in range(3):
        model = Net()
        trace.append(digest(model=model.state_dict()))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader, test = (DataLoader(Augmented(n), batch_size=BATCH, shuffle=True) for n in (22, 8))
        with Checkpointer(every_boundary(root / str(fold))) as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            before = run.global_step
            for _ in range(run.epoch, 2):
                for x, y, _ in loader:
                    durable(ckpt)
                    ((model(x) - y) ** 2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for _ in test:
                pass
            steps.append(run.global_step - before)
        trace.append([digest(model=model.state_dict()), torch.rand(1).item()])
    return steps, trace


@pytest.mark.cells(1)
@pytest.mark.parametrize("over", [1, 2, 3])
def test_a_run_that_is_over_leaves_the_streams_as_it_did(over: int, tmp_path: Path) -> None:
    """The model of the next fold begins with the same weights, whatever a restarted script draws until `close`."""
    steps, trace = trains_one_fold_after_another(tmp_path, seed=0)
    assert steps == [12, 12, 12]
    for fold in range(over, 3):
        shutil.rmtree(tmp_path / str(fold))
    again, found = trains_one_fold_after_another(tmp_path, seed=5)
    assert again == [0] * over + [12] * (3 - over)
    assert found[1:] == trace[1:]  # the first one's weights are overwritten


class Growing(Net):
    """Its extra state is a tensor that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_an_inner_optimizer_whose_state_no_snapshot_has_is_named(tmp_path: Path) -> None:
    """The state of the outer one has nothing of it."""
    steps_through_an_inner_optimizer(every_boundary(tmp_path / "run"), named=False)
    snapshot = next(one for one in saved(tmp_path / "run") if one.step > 2)
    folder = only(tmp_path / "run", snapshot, tmp_path / "one")
    steps_through_an_inner_optimizer(resume_only(folder), seed=1, named=False)
    why = [one.why for one in report(folder).not_restored]
    assert len(why) == 1
    assert ".inner (SGD) makes steps, and no snapshot has its state" in why[0]


def test_extra_state_that_grows_fits(tmp_path: Path) -> None:
    """`set_extra_state` decides; and the model may keep what it gets."""
    for number in range(3):
        model = Growing()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(Augmented(), batch_size=BATCH)
        with Checkpointer(str(tmp_path), every_n_steps=1, writer="thread") as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            assert model.seen.tolist() == [float(i) for i in range(run.global_step + 1)]
            for _ in range(run.epoch, number + 1):
                for x, y, _ in loader:
                    model.seen = torch.cat([model.seen, model.seen[-1:] + 1])
                    ((model(x) - y) ** 2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(model.seen) == 19


class Empty(nn.Module):
    """Has a length, which is 0: such a model is false."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def __len__(self) -> int:
        return 0


def test_a_model_may_be_false(tmp_path: Path) -> None:
    """A snapshot has it all the same."""
    model = Empty()
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(str(tmp_path), every_n_steps=1, writer="thread") as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        model.net(torch.ones(2)).backward()
        optimizer.step()
        run.step()
    assert saved(tmp_path)


def test_a_loop_without_a_loader_ends_with_its_last_step(tmp_path: Path) -> None:
    """What is left of it is saved at its end, and another start finds nothing to train."""

    def train(steps: int) -> list[int]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        done: list[int] = []
        with Checkpointer(tmp_path, every_n_steps=100) as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer)
            for step in range(run.global_step, steps):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step()
                done.append(step)
        return done

    assert train(6) == list(range(6))
    assert train(6) == []
    assert train(8) == [6, 7]
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.snapshots()[-1].step == 8


def test_the_end_is_saved_where_no_step_comes_after_the_last_snapshot(tmp_path: Path) -> None:
    """The loop leaves out the step of its last batch, which batch norm has seen; once more it has nothing to train."""
    for _ in range(2):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Augmented(20), batch_size=5)
        with Checkpointer(tmp_path, every_n_steps=1) as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            for _ in range(run.epoch, 2):
                for batch, (x, _, _) in enumerate(loader):
                    loss = model(x).square().sum()
                    durable(ckpt)
                    if (run.epoch, batch) != (1, 3):
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
        with Checkpointer(tmp_path) as ckpt:
            assert [one.step for one in ckpt.snapshots() if one.reason == "end"] == [7]
            assert torch.equal(ckpt.load()["model"]["1.running_var"], model[1].running_var)
