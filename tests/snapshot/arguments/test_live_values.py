"""What the user's code puts into a living run: numbers that are none, texts that have no bytes, objects, odd names.

It is refused where it is put in, by its name, or the run goes on, ends as without it, and its last step is durable.
"""

from __future__ import annotations

import fractions
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import nn
from transformers import Trainer

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ArgumentError, CkptError
from tests.snapshot.arguments.loops import LOOPS, STEPS, Hooks
from tests.snapshot.arguments.values import ABSURD, ALL, HUGE, LONE, REAL, TEXTS, WHOLE


class Counter:
    """An object with a state."""

    def __init__(self, state: Any = 1) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def options(root: Path) -> dict[str, Any]:
    return {"tiers": [{"url": str(root)}], "writer": "thread", "every_n_steps": 1}


def ends_well(loop: str, root: Path, hooks: Hooks, log: pytest.LogCaptureFixture) -> None:
    """The run ends, without an error in the log, and its last step is durable; another one resumes from it."""
    log.clear()
    LOOPS[loop](options(root), hooks)
    assert [one.getMessage() for one in log.records if one.levelno >= logging.ERROR] == []
    assert Checkpointer(root).snapshots()[-1].step == STEPS
    assert Checkpointer(root).load() is not None


def test_a_metric_of_a_loop_is_refused_where_it_is_put_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each way to set a metric refuses a bad value at once, and takes numbers of any type."""
    puts: list[Callable[[Any, Any], Any]] = [
        lambda run, value: run.metrics.__setitem__("m", value),
        lambda run, value: run.metrics.update({"m": value}),
        lambda run, value: run.metrics.update(m=value),
        lambda run, value: (run.metrics.pop("m", None), run.metrics.setdefault("m", value)),
        lambda run, value: run.metrics.__ior__({"m": value}),
        lambda run, value: setattr(run, "metrics", {"m": value}),
    ]

    def step(number: int, run: Any) -> None:
        for put in puts:
            for value in {**TEXTS, **ABSURD}.values():
                with pytest.raises(ArgumentError, match="metrics/m must be a number"):
                    put(run, value)
            for value in {**WHOLE, **REAL}.values():
                put(run, value)
                assert type(run.metrics["m"]) is float
        for key in (LONE, 1, None):
            with pytest.raises(ArgumentError, match="a key of metrics"):
                run.metrics[key] = 1.0

    for loop in ("plain", "accelerate"):
        ends_well(loop, tmp_path / loop, Hooks(step), caplog)


def put_into_tables(number: int, module: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        try:
            move_data_to_device(value, torch.device("cpu"))
        except Exception:  # noqa: BLE001 - Lightning itself does this at the end, and fails
            continue
        module.trainer.callback_metrics[name] = value
        module.trainer._logger_connector._logged_metrics[name] = value
        module.trainer._logger_connector._progress_bar_metrics[name] = value
        if name in WHOLE or name in REAL:  # Lightning itself fails at the end of the epoch for others
            with suppress(ValueError, RuntimeError, OverflowError):  # or at the call
                module.log(f"log {name}", value)


def put_into_state(number: int, loop: Any, values: dict[str, Any]) -> None:
    ours, state = loop
    ours.on_evaluate(None, state, None, metrics=values)
    state.log_history.append({"step": number, **values})
    for name, value in values.items():
        state.best_metric = state.trial_name = value
        state.trial_params = {name: value, "nested": [value]}


PUTS: dict[str, Callable[[int, Any, dict[str, Any]], None]] = {
    "lightning": put_into_tables,
    "transformers": put_into_state,
}


@pytest.mark.parametrize("loop", PUTS)
def test_what_a_trainer_remembers_may_be_anything(loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All at once, and from the first step on."""
    everything = {**ALL, "str/ange \ud800": 1, "": 2}
    ends_well(loop, tmp_path / "run", Hooks(lambda number, on: PUTS[loop](number, on, everything)), caplog)


@pytest.mark.slow
@pytest.mark.parametrize("loop", PUTS)
def test_what_a_trainer_remembers_may_be_anything_alone(
    loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each value alone, in a run that resumes from one that ended with it."""
    for number, (name, value) in enumerate(ALL.items()):
        alone = {name: value}
        ends_well(loop, tmp_path / str(number), Hooks(lambda at, on, alone=alone: PUTS[loop](at, on, alone)), caplog)
        LOOPS[loop](options(tmp_path / str(number)), Hooks())


class Keyed(pl.Callback):
    """A callback that counts batches, and is found again by a key of the user's."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.batches, self.given = 0, -1

    @property
    def state_key(self) -> Any:
        return self._key

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = self.batches = state["batches"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


KEYS = ["", "a/b", "..", "$", "state_dict", "x" * 100_000, LONE, 3, None, ("a", 1), b"x", object(), Counter]


@pytest.mark.long
def test_a_callback_may_have_any_key(tmp_path: Path) -> None:
    """Its state is found by it at the resume, or the first snapshot is refused by the name of the callbacks."""
    keyed(KEYS, tmp_path)
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # Lightning itself
        LOOPS["lightning"](options(tmp_path), Hooks(callbacks=[Keyed("k"), Keyed("k")]))


@pytest.mark.slow
def test_a_callback_may_have_any_value_as_its_key(tmp_path: Path) -> None:
    """All values but NaN are tried: NaN equals nothing, and Lightning itself does not find it."""
    keyed([one for name, one in ALL.items() if "nan" not in name.lower()], tmp_path)


def keyed(keys: list[Any], root: Path) -> None:
    for number, key in enumerate(keys):
        try:
            LOOPS["lightning"](None, Hooks(callbacks=[Keyed(key)]))
        except Exception:  # noqa: BLE001 - Lightning itself fails for some, such as what has no hash
            continue
        try:
            LOOPS["lightning"](options(root / str(number)), Hooks(callbacks=[Keyed(key)]))
        except CkptError as err:
            assert "callbacks" in err.message
            err.message.encode()
            continue
        again = Keyed(key)
        LOOPS["lightning"](options(root / str(number)), Hooks(callbacks=[again]))
        assert again.given == STEPS, key


class Failure(RuntimeError):
    """What ends a life of a run."""


KINDS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "np.int32": np.int32,
    "np.int64": np.int64,
    "np.float64": np.float64,
    "np.array": np.array,
    "Fraction": fractions.Fraction,
    "NaN": lambda _: math.nan,
    "np.nan": lambda _: np.float32("nan"),
}
"""What transformers can count on with."""


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_counts_may_be_any_number(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its counters may have any type: a run that fails in its last step resumes, and ends as one with integers."""
    which = ["global_step", "epoch"]
    if "nan" in kind.lower() and not hasattr(Trainer, "_init_training_state"):
        which.remove("epoch")  # transformers 4 keeps an epoch that is no number, so its run never ends well
    counts(which, KINDS[kind], tmp_path, caplog)


@pytest.mark.slow
def test_the_epoch_of_transformers_may_be_anything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It only shows it. (Another number is refused at the resume: it says of which epoch the snapshot is.)"""
    for number, value in enumerate({**TEXTS, **ABSURD}.values()):
        counts(["epoch"], lambda _, value=value: value, tmp_path / str(number), caplog)


@cache
def without_ours() -> dict[str, str]:
    return LOOPS["transformers"](None, Hooks())


def counts(which: list[str], kind: Callable[[Any], Any], root: Path, log: pytest.LogCaptureFixture) -> None:
    def after(number: int, on: Any) -> None:
        for name in which:
            setattr(on[1], name, kind(getattr(on[1], name)))

    steps = iter(range(1, STEPS + 1))

    def fail(number: int, on: Any) -> None:
        if next(steps) == STEPS:
            raise Failure

    with pytest.raises(Failure):
        LOOPS["transformers"](options(root), Hooks(fail, after))
    assert [one.step for one in Checkpointer(root).snapshots()][-1] == STEPS - 1
    ended = LOOPS["transformers"](options(root), Hooks(after=after))
    assert ended == without_ours()
    assert [one.getMessage() for one in log.records if one.levelno >= logging.ERROR] == []
    assert Checkpointer(root).snapshots()[-1].step == STEPS
    LOOPS["transformers"](options(root), Hooks())


NAMES = ["", " ", "a/b", "a.b", "..", "$", "rng", "ckpt_engine", "state_dict", "ü😀", "x" * 5000, "a\0b", "\n", LONE]


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_component_has_any_name_or_it_is_refused(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`track` takes the name, or refuses it before anything is trained."""
    try:
        ends_well("plain", tmp_path / "run", Hooks(parts={name: Counter()}), caplog)
    except CkptError as err:
        assert name.encode(errors="backslashreplace").decode() in err.message


@pytest.mark.cells(1)
@pytest.mark.parametrize("loop", ["plain", "accelerate", "lightning"])
def test_a_state_that_becomes_unstorable_is_said_and_the_run_goes_on(
    loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says of which step; the next state that can be stored is durable."""
    becomes(loop, [object(), LONE, HUGE], tmp_path, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "accelerate", "lightning"])
def test_whatever_a_state_becomes_the_run_goes_on(loop: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same as the test above with all values of the sweep."""
    becomes(loop, list(ALL.values()), tmp_path, caplog)


class Extra(nn.Module):
    """A module with a state of its own."""

    def __init__(self, part: Counter) -> None:
        super().__init__()
        self._part = [part]

    def get_extra_state(self) -> Any:
        return self._part[0].state

    def set_extra_state(self, state: Any) -> None:
        self._part[0].state = state


def becomes(loop: str, values: list[Any], tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    for number, value in enumerate(values):
        part = Counter()
        log.clear()

        def step(at: int, run: Any, part: Counter = part, value: Any = value) -> None:
            part.state = value if at == 2 else 1

        parts = {"extra": Extra(part) if loop == "lightning" else part}
        LOOPS[loop](options(tmp_path / str(number)), Hooks(step, parts))
        errors = [one.getMessage() for one in log.records if one.levelno >= logging.ERROR]
        assert all("step 2" in one for one in errors), errors
        assert Checkpointer(tmp_path / str(number)).snapshots()[-1].step == STEPS
