"""What a loop uses of installed packages, keeps beside its model, or draws before it begins: restored, or named."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine.audit.attributes import UsedObject
from ckpt_engine.audit.audit import HiddenState
from ckpt_engine.audit.carried import CarriedLocals
from tests.loop.test_hidden import report
from tests.loop.test_loop_begins import STEPS, Script, life
from tests.support.sweeps import crossed

Loop = Callable[[Script], None]
PACKAGE = '''
import itertools, random
import numpy as np

class Walk:
    """An environment with a position, a clock and a random stream."""
    def __init__(self, seed):
        self._np_random, self.position, self.began = np.random.default_rng(seed), 0.0, 0.0
    def step(self, push):
        import time
        self.position += push + self._np_random.normal()
        self.began = time.time()
        return self.position

class Wrapped:
    def __init__(self, env): self.env = env
    def step(self, push): return self.env.step(push)

class Normalizer:
    """Running statistics, in slots and in arrays."""
    __slots__ = ("mean", "count", "_seen")
    def __init__(self): self.mean, self.count, self._seen = np.zeros(1), 0, []
    def step(self, push):
        self.count += 1
        self.mean += (push + self.count - self.mean) / self.count
        self._seen = [*self._seen[-2:], float(self.mean[0])]
        return sum(self._seen)

class Hidden:
    """What it does next is in a generator, which nothing shows."""
    def __init__(self, seed): self.ticks, self._turns = 0, self._make(seed)
    def _make(self, seed):
        dice = random.Random(seed)
        while True: yield dice.random()
    def step(self, push):
        self.ticks += 1
        return next(self._turns)

class Pipeline:
    """Begins a pass to tell its state, as the loader of torchdata.nodes does; what is loaded later is not used."""
    def __init__(self): self._given, self._position, self._begun, self._told = None, 0, False, False
    def load_state_dict(self, state): self._given = state
    def state_dict(self):
        if not self._begun:
            iter(self)
            self._told = True
        return {"position": self._position}
    def __iter__(self):
        if self._told: self._told = False
        else: self._position, self._given, self._begun = (self._given or {"position": 0})["position"], None, True
        return self
    def __next__(self):
        self._position += 1
        return self._position
'''


ENGINE = '''
import functools

class Mean:
    """A running mean that an engine calls, as ignite's do."""
    def __init__(self): self.value, self.weight = 0.0, 0.5
    def seen(self, engine, scale):
        self.value += scale * self.weight * (engine.counted - self.value)
        return self.value
    def __call__(self, engine): return self.seen(engine, 1.0)

class Engine:
    """It calls what it was given in each step, and tells only its own count."""
    def __init__(self, mean, how):
        self.counted, self._handlers, self._called = 0, {"step": []}, []
        wrapped = functools.wraps(mean.seen)(lambda *args: mean.seen(*args))
        if how == "by event": self._handlers["step"].append((mean.seen, (1.0,)))
        elif how == "by filter": self._handlers["step"].append((wrapped, (1.0,)))
        elif how == "in a list": self._called.append(functools.partial(mean.seen, scale=1.0))
        else: self._called.append(mean)
    def state_dict(self): return {"counted": self.counted}
    def load_state_dict(self, state): self.counted = state["counted"]
    def step(self):
        self.counted += 1
        return sum(one(self, *args) for one, args in [*self._handlers["step"], *((one, ()) for one in self._called)])
'''


SLOTS = '''
class Slots:
    __slots__ = ("count", "unset", "shown")
    def __init__(self): self.count = 0
    def step(self, push):
        self.count += 1
        return push * self.count

class Asks(Slots):
    """What it does not have it asks others for, as SQLAlchemy's events do, which may fail in any way."""
    __slots__ = ()
    def __getattr__(self, name): raise TypeError("cannot create weak reference")

class Shows(Slots):
    """It has a property in the place of a slot."""
    __slots__ = ()
    @property
    def shown(self): raise OSError("the database is gone")

class Lists(Slots):
    """It has a value in the place of a slot."""
    shown = ()
'''


FLAGS = '''
import io

class Checked:
    """Its first steps look at what the reset before the loop has left, and use it up."""
    def __init__(self): self.was_checked, self.was_compared, self.previous = False, False, (0.5, {})
    def step(self, push):
        if not self.was_checked: self.was_checked, self.previous = True, (self.previous[0] + push, {})
        elif not self.was_compared: self.was_compared, self.previous = sum(self.previous[:1]) > 0, None
        return 1.0

class Cached(Checked):
    """The same, and an object is kept that was asked for since."""
    spec = kept = None
    def __init__(self): super().__init__(); self.kept = None
    def step(self, push):
        self.kept = self.kept or Checked()
        return super().step(push)

class Fitted:
    """A scaler that is fitted to what it sees first."""
    is_fitted, mean = False, 0.0
    def __init__(self): self.is_fitted, self.mean, self.turn = False, 0.0, 0
    def step(self, push):
        self.turn += 1
        if not self.is_fitted: self.is_fitted, self.mean = True, self.turn + push
        return self.mean

class Ended:
    """An environment that says whether its episode is over, which is so after the first step, too."""
    def __init__(self): self.position, self.is_over = 2.0, False
    def step(self, push):
        self.position = 0.0 if self.is_over else self.position + 1.0
        self.is_over = self.position >= 3.0
        return self.position + 2.0 * self.is_over

class Opened:
    """It opens a file in each process."""
    def __init__(self): self.is_open, self.file, self.total = False, None, 0.0
    def step(self, push):
        if not self.is_open: self.is_open, self.file = True, io.StringIO()
        self.file.seek(0)
        self.total += push
        return self.total
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A module that pip might have installed."""
    name = f"walks_{abs(hash(request.node.name))}"
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"{name}.py").write_text(PACKAGE + ENGINE + SLOTS + FLAGS)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


def continued(tmp_path: Path, loop: Loop, seeds: tuple[int, int] = (1, 1)) -> tuple[bool, str]:
    """Whether a run that was killed goes the way of a whole one, and what its report names."""
    whole = life(tmp_path / "whole", loop, seed=seeds[0])
    life(tmp_path / "run", loop, seed=seeds[0], die_at=5)
    rest = life(tmp_path / "run", loop, seed=seeds[1])
    assert 0 < len(rest) < len(whole)
    named = "; ".join(f"{row['name']} {row['why']}" for row in report(tmp_path / "run")["not_restored"])
    return whole[-len(rest) :] == rest, named


def driven(made: Callable[[], Any], *, inside: Callable[[Any], Any] = lambda env: env) -> Loop:
    """A loop that feeds on an object."""

    def loop(script: Script) -> None:
        env = inside(made())
        run = script.track()
        for _ in range(run.global_step, STEPS):
            one = env["walk"] if isinstance(env, dict) else getattr(env, "walk", env)
            script.learn(torch.full((2, 3), float(one.step(0.1))))
            run.step()

    return loop


class Holder:
    """An object of the user's own."""

    def __init__(self, walk: Any) -> None:
        self.walk = walk


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", ["local", "attribute", "in a dict", "wrapped", "wrapped often", "slots"])
def test_an_object_of_a_package_continues(kind: str, tmp_path: Path, package: Any) -> None:
    """Its position and its private stream come back; a reading of the clock among them is no state."""
    loops = {
        "local": driven(lambda: package.Walk(7)),
        "attribute": driven(lambda: package.Walk(7), inside=Holder),
        "in a dict": driven(lambda: package.Walk(7), inside=lambda env: {"walk": env}),
        "wrapped": driven(lambda: package.Wrapped(package.Wrapped(package.Walk(7)))),
        "wrapped often": driven(
            lambda: functools.reduce(lambda env, _: package.Wrapped(env), range(10), package.Walk(7))
        ),
        "slots": driven(package.Normalizer),
    }
    assert continued(tmp_path, loops[kind]) == (True, "")


@pytest.mark.cells(3)
@pytest.mark.parametrize("kind", ["Checked", "Cached", "Fitted", "Ended", "Opened"])
@pytest.mark.parametrize("inside", [lambda env: env, Holder])
def test_flags_of_an_object_of_a_package_fit_what_else_it_has(
    kind: str, inside: Callable[[Any], Any], tmp_path: Path, package: Any
) -> None:
    """They come back with the rest, or each process sets them, and what is used up with them, for itself."""
    assert continued(tmp_path, driven(getattr(package, kind), inside=inside)) == (True, "")


def test_what_nothing_shows_of_a_package_is_named_with_its_path(tmp_path: Path, package: Any) -> None:
    """Its count comes back, and its generator begins again."""
    same, named = continued(tmp_path, driven(lambda: package.Hidden(7), inside=Holder))
    assert not same
    assert "env.walk._turns" in named
    assert "ticks" not in named


@pytest.mark.parametrize("derived", [0, 1, 2])
def test_a_loader_of_a_package_is_not_asked_for_its_state_before_it_has_got_one(
    derived: int, tmp_path: Path, package: Any
) -> None:
    """Asking may begin a pass, which the state that is loaded next does not change any more.

    What a class of the user's own adds to it continues too.
    """

    class Counted(package.Pipeline):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.given = 0

        def __next__(self) -> int:
            self.given += 1
            return int(super().__next__()) + self.given

    class Again(Counted):
        """The same once more."""

    def loop(script: Script) -> None:
        loader = (package.Pipeline, Counted, Again)[derived]()
        run = script.track(loader=loader)
        for number in loader:
            script.learn(torch.full((2, 3), float(number)))
            run.step()
            if run.global_step == STEPS:
                break

    assert continued(tmp_path, loop) == (True, "")


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", ["Slots", "Asks", "Shows", "Lists"])
def test_slots_are_read_without_a_call_of_the_object(kind: str, tmp_path: Path, package: Any) -> None:
    """What it does where a slot is not assigned, or is hidden by a property, may fail."""
    assert continued(tmp_path, driven(getattr(package, kind), inside=Holder)) == (True, "")


@pytest.mark.cells(1)
@pytest.mark.parametrize("how", ["by event", "by filter", "in a list", "itself"])
def test_what_an_engine_of_a_package_calls_in_each_step_continues(how: str, tmp_path: Path, package: Any) -> None:
    """The engine's own `state_dict` does not have it."""

    def loop(script: Script) -> None:
        engine = package.Engine(package.Mean(), how)
        run = script.track(engine=engine)
        for _ in range(run.global_step, STEPS):
            script.learn(torch.full((2, 3), 1.0 / (1.0 + engine.step())))
            run.step()

    assert continued(tmp_path, loop) == (True, "")


def test_a_stream_continues_wherever_a_process_begins_it(tmp_path: Path) -> None:
    """Without a seed it begins elsewhere in each process."""

    def loop(script: Script) -> None:
        dice = random.Random(script.seed)
        held = Holder(dice)
        run = script.track()
        for _ in range(run.global_step, STEPS):
            script.learn(torch.full((2, 3), held.walk.random()))
            run.step()

    assert continued(tmp_path, loop, seeds=(1, 2)) == (True, "")


# ---- counters beside the model


@dataclasses.dataclass
class State:
    """Of the user's own."""

    model: Any
    count: int = 0


def as_dict(script: Script) -> Any:
    return {"model": script.net, "optimizer": script.optimizer, "count": 0}


def as_dataclass(script: Script) -> Any:
    return State(script.net)


def as_namespace(script: Script) -> Any:
    return SimpleNamespace(model=script.net, count=0)


def as_arguments(script: Script) -> Any:
    return argparse.Namespace(model=script.net, count=0)


def as_list(script: Script) -> Any:
    return [script.net, 0]


def counted(state: Any) -> int:
    """One more."""
    if isinstance(state, dict):
        state["count"] += 1
        return int(state["count"])
    if isinstance(state, list):
        state[1] += 1
        return int(state[1])
    state.count += 1
    return int(state.count)


@pytest.mark.cells(3)
@pytest.mark.parametrize("kind", [as_dict, as_dataclass, as_namespace, as_arguments, as_list])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_counter_beside_the_model_continues(kind: Callable[[Script], Any], is_held: bool, tmp_path: Path) -> None:
    """As Fabric's `state` has it, in a variable or in an object."""

    def loop(script: Script) -> None:
        state = kind(script)
        held = Holder(state if is_held else None)
        run = script.track()
        for _ in range(run.global_step, STEPS):
            script.learn(torch.full((2, 3), 1.0 / counted(held.walk if is_held else state)))
            run.step()

    assert continued(tmp_path, loop, seeds=(1, 1)) == (True, "")


@pytest.mark.cells(2)
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_scheduler_that_is_not_tracked_continues(kind: str, is_held: bool, tmp_path: Path) -> None:
    """In a variable or in an object."""
    options = {"StepLR": {"step_size": 2}, "OneCycleLR": {"max_lr": 0.5, "total_steps": 20}, "ReduceLROnPlateau": {}}

    def loop(script: Script) -> None:
        schedule: Any = getattr(torch.optim.lr_scheduler, kind)(script.optimizer, **options[kind])
        held = Holder(schedule if is_held else None)
        run = script.track()
        for _ in range(run.global_step, STEPS):
            script.learn(torch.randn(2, 3))
            one = held.walk if is_held else schedule
            one.step(*([float(script.done[-1].startswith("0x1"))] if kind == "ReduceLROnPlateau" else []))
            run.step()

    assert continued(tmp_path, loop) == (True, "")


# ---- what is drawn before the loop

DRAWS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.randn(4),
    "array": lambda: np.random.rand(4),
    "rows": lambda: torch.randperm(64)[:4].tolist(),
    "weights by class": lambda: {name: random.random() for name in ("a", "b")},
    "pair": lambda: (torch.randn(2), torch.randn(2)),
    "fraction": random.random,
}


def sum_of(value: Any) -> float:
    """Of all numbers."""
    if isinstance(value, dict):
        return sum_of(list(value.values()))
    return float(sum(map(sum_of, value))) if isinstance(value, list | tuple) else float(np.sum(np.asarray(value)))


@pytest.mark.cells(4)
@pytest.mark.parametrize(("kind", "seed"), crossed(tuple(DRAWS), [2, 1]))
@pytest.mark.parametrize("is_held", [False, True])
def test_what_a_script_without_a_seed_draws_before_the_loop_is_named(
    kind: str, is_held: bool, seed: int, tmp_path: Path
) -> None:
    """It is compared with the first process's; with the same seed nothing is named.

    A value is compared in the same way whatever draws it, so the quick suite has the same seed for one kind only.
    """

    def loop(script: Script) -> None:
        drawn = DRAWS[kind]()
        held = Holder(drawn if is_held else None)
        run = script.track()
        for _ in range(run.global_step, STEPS):
            script.learn(torch.full((2, 3), 1.0 / (1.0 + abs(sum_of(held.walk if is_held else drawn)))))
            run.step()

    same, named = continued(tmp_path, loop, seeds=(1, seed))
    assert same == (seed == 1)
    assert ("held.walk" if is_held else "loop().drawn") in named or seed == 1
    assert not named or seed == 2


def test_buffers_that_are_filled_in_place_continue(tmp_path: Path) -> None:
    """Tensors and arrays of the loop that keep being the same objects, as those of on-policy algorithms."""

    def loop(script: Script) -> None:
        seen, sums = torch.zeros(3), np.zeros(2)
        run = script.track()
        for step in range(run.global_step, STEPS):
            seen[step % 3] += 1.0
            sums += seen[:2].numpy()
            script.learn(torch.full((2, 3), float(seen.sum()) + float(sums.sum())))
            run.step()

    assert continued(tmp_path, loop) == (True, "")


@pytest.mark.cells(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, np.float64])
def test_a_buffer_that_is_again_what_it_was_at_first_is_not_named(
    dtype: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot then needs no value of it: each process begins with the same."""

    def loop(script: Script) -> None:
        flags: Any = torch.zeros(2, dtype=dtype) if isinstance(dtype, torch.dtype) else np.zeros(2, dtype)
        run = script.track()
        for step in range(run.global_step, STEPS):
            script.learn(torch.full((2, 3), 1.0 + float(flags[1]) + float(flags[0])))
            flags[step % 2] = step % 4 == 1
            run.step()

    assert continued(tmp_path, loop) == (True, "")
    assert "carried" not in caplog.text


# ---- what is no state


@pytest.mark.parametrize("clock", [time.time, time.monotonic, time.perf_counter, time.time_ns])
def test_a_reading_of_a_clock_is_no_state(clock: Callable[[], Any]) -> None:
    """Neither in a local variable nor in an attribute; a number that is none is."""
    found, meter = CarriedLocals(), SimpleNamespace(began=clock(), total=0.0)
    hidden = HiddenState("auto")
    hidden.note("batch", {"meter": UsedObject(meter)})
    began, total = clock(), 0.0
    for _ in range(4):
        found.look()
        passed = clock() - began
        total += passed + 1.0
        began = meter.began = clock()
        meter.total += total
    assert found.names == ["total"]
    assert set(hidden.state()) == {"meter.total"}


class ByHand(torch.optim.SGD):
    """An optimizer of the user's own."""


def test_a_flag_that_a_scheduler_puts_on_an_optimizer_is_no_state(tmp_path: Path) -> None:
    """Nor is any other name that torch itself assigns."""

    def loop(script: Script) -> None:
        script.optimizer = ByHand(script.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 2)
        run = script.track(schedule=schedule)
        for _ in range(run.global_step, STEPS):
            script.learn(torch.ones(2, 3))
            schedule.step()
            run.step()

    assert continued(tmp_path, loop) == (True, "")


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", ["attribute", "in a dict", "in a list"])
def test_our_own_objects_are_no_state(kind: str, tmp_path: Path) -> None:
    """A model that has the tracker, as `self.run = ckpt.track(…, net=self)` gives it one."""

    def loop(script: Script) -> None:
        run = script.track()
        script.net.run = {"attribute": run, "in a dict": {"run": run, "n": 0}, "in a list": [run]}[kind]
        for _ in range(run.global_step, STEPS):
            if kind == "in a dict":
                script.net.run["n"] += 1
            script.learn(torch.full((2, 3), 1.0 / (script.net.run["n"] if kind == "in a dict" else 1)))
            run.step()

    assert continued(tmp_path, loop) == (True, "")


# ---- iterators that are older than the run


def older(kind: str, loader: Any) -> tuple[Any, Callable[[], Any]]:
    """What keeps an iterator, and what takes a batch from it."""
    batches: Any = itertools.cycle(loader) if kind == "cycle" else iter(loader)
    if kind == "generator":
        batches = (one for one in batches)
    held = Holder(batches)
    return held, lambda: next(held.walk)


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", ["held", "generator", "cycle"])
@pytest.mark.parametrize("announces", [False, True])
def test_an_iterator_from_before_the_run_is_named_at_the_first_step(
    kind: str, announces: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the loop announces its steps or not; what a resume restores without it is named too."""

    def loop(script: Script) -> None:
        loader = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=2, shuffle=True)
        held, batch = older(kind, loader)
        run = script.track(loader=loader)
        for number in range(run.global_step, STEPS):
            script.learn(batch()[0])
            assert number > 0 or caplog.text.count("an iterator of 'loader' was made before track()") == 1
            if announces:
                run.step()
        assert held

    with caplog.at_level(logging.WARNING):
        life(tmp_path, loop, die_at=5)
    if announces:
        life(tmp_path, loop)
        assert "made before track()" in str(report(tmp_path)["not_restored"])


def test_a_loader_that_is_asked_later_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One to evaluate on, of a loop that announces its steps."""

    def loop(script: Script) -> None:
        loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
        next(iter(loader))
        run = script.track(evaluation=loader)
        for _ in range(run.global_step, STEPS):
            script.step()

    with caplog.at_level(logging.WARNING):
        assert continued(tmp_path, loop) == (True, "")
    assert "made before" not in caplog.text
