"""Whatever is passed to `save`: it becomes durable, or the call itself says which argument it was.

One writer takes everything: it lives afterwards, and the next good snapshot is durable.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ArgumentError, CkptError, ConfigError, StateError
from ckpt_engine.observe.events import SnapshotFailed, WriterLost
from ckpt_engine.store import container
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.snapshot.arguments.values import ABSURD, ALL, HUGE, LONE, REAL, TEXTS, WHOLE, Colour, Level, Spiteful
from tests.snapshot.passage import same
from tests.support.heard import Heard

WAIT_SECONDS = 60


@pytest.fixture(scope="module", params=["process", "thread"])
def ckpt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """A run that takes all that is thrown at it, and is well at the end of each test."""
    root = tmp_path_factory.mktemp(str(request.param)) / "run"
    with Checkpointer(root, writer=request.param, keep={"last": 1}) as made:
        made.engine.events = Heard()
        yield made


@pytest.fixture(autouse=True)
def well(ckpt: Checkpointer) -> Iterator[None]:
    """The writer lives, nothing has failed after a call, and a correct snapshot is durable."""
    heard = ckpt.engine.events = Heard()
    yield
    before = ckpt.engine._pipeline._writer
    ckpt.save({"w": torch.ones(2)}, step=7).wait(WAIT_SECONDS)
    assert ckpt.engine._pipeline._writer is (before or ckpt.engine._pipeline._writer)
    assert [event for event in heard.events if isinstance(event, SnapshotFailed | WriterLost)] == []


def saved(ckpt: Checkpointer, **arguments: Any) -> Manifest:
    """The manifest of a snapshot with these arguments, which is durable."""
    snapshot = ckpt.save(**{"state": {"w": torch.ones(2)}, "step": 1, **arguments}).wait(WAIT_SECONDS)
    manifest = Repository(open_storage(ckpt.engine.root_url)).read(snapshot)
    assert manifest.info.id == ckpt.snapshots()[-1].id
    return manifest


def refused(match: str, call: Callable[[], Any], kind: type[CkptError] = ArgumentError) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert match in caught.value.message
    caught.value.message.encode()  # it can be printed


def test_whole_numbers_of_any_make_are_steps_epochs_and_metrics(ckpt: Checkpointer) -> None:
    """numpy's, torch's, with a point nothing: what is stored is a plain whole number."""
    for value in WHOLE.values():
        found = saved(ckpt, step=value, epoch=value, metrics={"m": value}, notes={"n": value})
        expected = 1 if value is Level.ONE else 3
        assert (found.info.step, type(found.info.step)) == (expected, int)
        assert (found.info.epoch, found.info.metrics["m"], found.notes["n"]) == (expected, expected, expected)


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_no_other_value_is_a_step(ckpt: Checkpointer, name: str) -> None:
    """Negative, broken, endless, huge numbers, truth values and all else are refused by the call, by name."""
    for value in {**REAL, **TEXTS, **ABSURD}.values():
        if name == "step" or value is not None:
            refused(f"{name} must be a whole number", lambda value=value: saved(ckpt, **{name: value}))


def test_every_real_number_is_a_metric_and_nothing_else(ckpt: Checkpointer) -> None:
    """NaN and infinity too, which retention passes over; a value that is none is named."""
    for value in REAL.values():
        found = saved(ckpt, metrics={"m": value}).info.metrics["m"]
        assert found == float(value) or (math.isnan(found) and math.isnan(float(value)))
    for value in {**TEXTS, **ABSURD}.values():
        refused("metrics/val must be a number", lambda value=value: saved(ckpt, metrics={"ok": 1, "val": value}))
    for key in (1, None, (), LONE):
        refused("a key of metrics", lambda key=key: saved(ckpt, metrics={key: 1.0}))
    for value in ALL.values():
        if value is not None and not isinstance(value, dict):
            refused("metrics must be a mapping", lambda value=value: saved(ckpt, metrics=value))


def test_notes_are_json_or_refused_with_the_leaf(ckpt: Checkpointer) -> None:
    """Numbers and paths become plain, deep inside as well."""
    for value in TEXTS.values():
        assert saved(ckpt, notes={"a": [{"b": value}]}).notes == {"a": [{"b": os.fspath(value)}]}
    for name, value in {**REAL, **ABSURD}.items():
        if name in ("None", "list", "tuple", "dict", "True", "np.bool", "torch.bool"):
            saved(ckpt, notes={"a": value})
        elif name in REAL and math.isfinite(value):
            assert float(saved(ckpt, notes={"a": value}).notes["a"]) == float(value)
        else:
            refused("notes/a", lambda value=value: saved(ckpt, notes={"a": [0, {"b": value}]}))
    refused("notes/a/1/b is not JSON", lambda: saved(ckpt, notes={"a": [0, {"b": {1}}]}))
    for value in ALL.values():
        if value is not None and not isinstance(value, dict):
            refused("notes must be a mapping", lambda value=value: saved(ckpt, notes=value))


def test_a_reason_is_a_text(ckpt: Checkpointer) -> None:
    """A reason may contain any text that has bytes."""
    for value in TEXTS.values():
        if isinstance(value, str):
            assert saved(ckpt, reason=value).info.reason == value
    for value in {**WHOLE, **REAL, **ABSURD}.values():
        refused("reason", lambda value=value: saved(ckpt, reason=value))


def test_flags_and_functions_are_asked_for_by_name(ckpt: Checkpointer) -> None:
    """`durable=1` or `lazy=True` is a mistake that would be found late."""
    for name, value in ALL.items():
        if not callable(value) and value is not None:
            refused("lazy must be a function", lambda value=value: saved(ckpt, lazy=value))
            refused("check must be a function", lambda value=value: ckpt.engine.load(check=value))
            refused("check must be a function", lambda value=value: ckpt.engine.choose(check=value))
            refused("live must be a function", lambda value=value: ckpt.engine.load(live=value))
        if name not in ("True", "np.bool"):
            refused("durable must be True or False", lambda value=value: saved(ckpt, durable=value))
    refused("memory tier", lambda: saved(ckpt, durable=False), ConfigError)


def test_load_finds_a_step_of_any_make(ckpt: Checkpointer) -> None:
    """`load` accepts whole numbers of all types, and refuses every other value."""
    for value in WHOLE.values():
        expected = {"n": 1 if value is Level.ONE else 3}
        ckpt.save(expected, step=value).wait(WAIT_SECONDS)
        assert ckpt.load(step=value) == expected
        assert ckpt.engine.choose(step=value) is not None
    for value in {**REAL, **TEXTS, **ABSURD}.values():
        if value is not None:
            refused("step must be a whole number", lambda value=value: ckpt.load(step=value))
            refused("step must be a whole number", lambda value=value: ckpt.engine.choose(step=value))
            refused("step must be a whole number", lambda value=value: ckpt.engine.begin_step(value))
            refused("step must be a whole number", lambda value=value: ckpt.engine.miss(value, "why"))


def test_load_into_anything_says_what_does_not_fit(ckpt: Checkpointer) -> None:
    """`into` is live state like that of `save`; nothing of it is overwritten."""
    state = {"w": torch.arange(3.0)}
    ckpt.save(state, step=1).wait(WAIT_SECONDS)
    for value in ALL.values():
        for into in (value, {"w": value}):
            if value is not None:  # None takes a component as it is read
                with pytest.raises(StateError):
                    ckpt.load(into=into)
    live = {"w": torch.zeros(3)}
    assert same(ckpt.load(into=live), state) and same(live, state)


def test_a_time_to_wait_is_a_number(ckpt: Checkpointer) -> None:
    """A time may be a number of any type and size; a time in the past waits not at all."""
    handle = ckpt.save({"w": torch.ones(2)}, step=1)
    for name, value in {**WHOLE, **REAL}.items():
        if "NaN" in name or "nan" in name:
            refused("timeout must be a number", lambda value=value: ckpt.wait(value))
            refused("timeout must be a number", lambda value=value: handle.wait(value))
            continue
        assert ckpt.wait(value) or value in (-1, -math.inf)
        assert handle.wait(value)
    for value in {**TEXTS, **ABSURD}.values():
        if value is not None:
            refused("timeout must be a number", lambda value=value: ckpt.wait(value))
            refused("timeout must be a number", lambda value=value: handle.wait(value))
            refused("timeout must be a number", lambda value=value: ckpt.close(value))


def test_what_is_lazy_is_a_function(ckpt: Checkpointer) -> None:
    refused("lazy must be a function", lambda: ckpt.prepare({}, lazy=1))


@pytest.mark.long
def test_a_state_is_durable_or_refused_with_its_leaf(ckpt: Checkpointer) -> None:
    """The value may be the state, a leaf, in a list or deep inside; what becomes durable comes back."""
    refusals = 0
    for value in ALL.values():
        inside = {"leaf": value, "list": [0, value], "deep": {"x": value}}
        places = {"leaf": "part/leaf", "list": "part/list/1", "deep": "part/deep/x"}
        for state in (value, {"part": inside}):
            try:
                handle = ckpt.save(state, step=1)
            except StateError as err:
                err.message.encode()
                if state is value:
                    refusals += 1
                    assert "(" in err.message or "\\ud800" in err.message
                    continue
                for name, place in places.items():
                    refusals += 1
                    refused(place, lambda one={name: inside[name]}: ckpt.save({"part": one}, step=1), StateError)
            else:
                handle.wait(WAIT_SECONDS)
                assert repr(ckpt.load()).split(" at 0x")[0] == repr(state).split(" at 0x")[0]
    assert refusals > 20


KEYS = [LONE, HUGE, Colour, 1j, (1, LONE), Path(LONE), Spiteful()]


@pytest.mark.parametrize("key", KEYS, ids=["lone", "huge", "class", "complex", "tuple", "path", "spiteful"])
def test_a_key_is_storable_or_refused_with_its_place(ckpt: Checkpointer, key: Any) -> None:
    """As the name of a component, and in it."""
    for state in ({"part": {key: 1}}, {"part": {"deep": [{key: torch.ones(1)}]}}):
        if isinstance(key, complex):
            ckpt.save(state, step=1).wait(WAIT_SECONDS)
            continue
        with pytest.raises(StateError, match="part"):
            ckpt.save(state, step=1)
    if isinstance(key, str):
        with pytest.raises(StateError, match="d800"):
            ckpt.save({key: torch.ones(1)}, step=1)


def test_more_arrays_than_a_file_takes_are_refused_at_the_call(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of safetensors refuse longer headers: the call says how many arrays there are, and what to do."""
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(StateError, match=r"100 arrays cannot be saved.*join small tensors"):
        ckpt.save({f"w{n}": torch.ones(1) for n in range(100)}, step=1)
