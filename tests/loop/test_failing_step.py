"""A loop that ends by an exception: its last boundary becomes durable where it resumes exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt_engine.loop import failing_loop
from tests.accelerate import runs as accelerate_runs
from tests.accelerate.hf import Text, train_hf
from tests.accelerate.runs import train_accelerate
from tests.loop import runs
from tests.loop.failing_script import FAILS_AT, Failure, Net, Script, fail
from tests.loop.runs import (
    BATCH,
    Augmented,
    Average,
    Case,
    Outcome,
    digest,
    resume_only,
    saved,
    seed_everything,
    shuffled,
    train_plain,
)
from tests.support import interpreters

BATCHES = 6
EPOCH_WITHOUT_EVALUATION = Case(evaluation=None)


class Bomb:
    """Raises at the n-th time that training comes to one place, if it is armed."""

    def __init__(self) -> None:
        self.where, self.left = "", 0

    def arm(self, where: str, at: int = FAILS_AT) -> None:
        self.where, self.left = where, at

    def at(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                self.where = ""
                raise Failure(where)


@pytest.fixture
def bomb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bomb]:
    """Goes off in the middle of forward, after backward, at the end of an optimizer's step, or in the data set.

    Steps of these models take no longer than a record of one; the policy has tests of its own.
    """
    bomb = Bomb()
    monkeypatch.setattr(failing_loop, "affordable", lambda *_: True)
    backward = torch.Tensor.backward

    def after_backward(self: torch.Tensor, *args: Any, **more: Any) -> None:
        backward(self, *args, **more)
        bomb.at("backward")

    monkeypatch.setattr(torch.Tensor, "backward", after_backward)

    def after_forward(module: nn.Module, *_: Any) -> None:
        # One in each of the models.
        if module.training and (type(module) is nn.BatchNorm1d or getattr(module, "num_embeddings", 0) == 256):
            bomb.at("forward")

    for kind in (Augmented, Text):
        monkeypatch.setattr(kind, "__getitem__", _fails_after(kind.__getitem__, bomb))
    handles = [
        torch.nn.modules.module.register_module_forward_hook(after_forward),
        register_optimizer_step_post_hook(lambda *_: bomb.at("step")),
    ]
    yield bomb
    for handle in handles:
        handle.remove()


def _fails_after(original: Callable[..., Any], bomb: Bomb) -> Callable[..., Any]:
    def getitem(self: Any, i: int) -> Any:
        sample = original(self, i)  # it has drawn
        bomb.at("sample")
        return sample

    return getitem


Ends = Callable[[Case, Path], None]


def failing(train: Any, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """A run with one snapshot, of step 5, that fails; it is closed as by `finally: ckpt.close()`."""

    def run(case: Case, root: Path) -> None:
        made: list[Any] = []
        module, name = (runs, "Checkpointer") if train is train_plain else (accelerate_runs, "AdaptiveCheckpoint")
        kind = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *args: made.append(kind(*args)) or made[-1])
            try:
                train(case, {"tiers": str(root), "every_n_steps": 5, "writer": "thread"})
            except Failure:
                made[0].close()
                return
        raise AssertionError("it did not fail")

    return run


def assert_exact(train: Any, case: Case, root: Path, step: int) -> None:
    """The run goes on behind that step, bit for bit."""
    newest = saved(root)[-1]
    assert (newest.step, newest.reason) == (step, "exception")
    reference = train(case, None)
    again = train(case, resume_only(root), seed=7)
    assert len(again.trace) == len(reference.trace) - step * case.accumulate
    assert again.trace == reference.trace[-len(again.trace) :]
    assert again.digest == reference.digest


TRAINS = {"plain": train_plain, "accelerate": train_accelerate}
PLACES = ("forward", "backward", "sample")


@pytest.mark.cells(2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("trainer", TRAINS)
def test_a_step_that_fails_before_it_changes_weights_loses_nothing(
    trainer: str, where: str, bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout has drawn, batch norm has moved, gradients exist: all of that is put back."""
    train, case = TRAINS[trainer], EPOCH_WITHOUT_EVALUATION
    bomb.arm(where, 22 + 3 * BATCH + 1 if where == "sample" else FAILS_AT)
    failing(train, monkeypatch)(case, tmp_path)
    # Accelerate fetches a batch ahead.
    assert_exact(train, case, tmp_path, FAILS_AT - (where == "sample" and trainer == "accelerate"))


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINS)
@pytest.mark.parametrize("where", ["forward", "sample"])
def test_gradients_of_earlier_batches_are_lost_only_if_their_batch_has_come(
    trainer: str, where: str, bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two batches make a step, the second one may fail; the boundary is the one before the first."""
    train, case = TRAINS[trainer], Case(evaluation=None, accumulate=2, loader=shuffled(24))
    bomb.arm(where, 24 + 3 * BATCH + 1 if where == "sample" else FAILS_AT)
    failing(train, monkeypatch)(case, tmp_path)
    assert_exact(train, case, tmp_path, FAILS_AT // 2)


def test_a_failure_in_an_evaluation_within_an_epoch_is_after_the_step(
    bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The boundary of that step was not reached, and that before is gone: one line says so."""
    monkeypatch.setattr(runs, "evaluate", lambda *_: bomb.at("evaluation"))
    bomb.arm("evaluation", 4)
    failing(train_plain, monkeypatch)(Case(evaluate_every=2), tmp_path)
    assert [one.step for one in saved(tmp_path)] == [5]
    assert "weights may have changed" in only_line(caplog)


def only_line(caplog: pytest.LogCaptureFixture) -> str:
    """What is said of the failure, once."""
    (said,) = (one.getMessage() for one in caplog.records if one.getMessage().startswith("Failure: "))
    return said


@pytest.mark.parametrize("trainer", TRAINS)
def test_a_step_that_may_have_changed_weights_is_not_saved(
    trainer: str, bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One line says which step is the newest durable one, and why it is not the last."""
    bomb.arm("step")
    failing(TRAINS[trainer], monkeypatch)(EPOCH_WITHOUT_EVALUATION, tmp_path)
    assert [one.step for one in saved(tmp_path)] == [5]
    said = only_line(caplog)
    assert "step 5 is durable" in said
    assert "steps behind" in said
    assert "weights may have changed" in said


# ---- a loop of its own


def _poison(script: Script) -> None:
    with torch.no_grad():
        script.optimizer.state[script.model.tail.weight]["exp_avg"][0, 0] = float("nan")
    fail(script)


def _write(script: Script) -> None:
    with torch.no_grad():
        script.model.tail.weight.add_(1.0)
    fail(script)


def _announce(script: Script) -> None:
    script.ckpt._tracker.before_update()
    script.model.tail.weight.data.add_(1.0)
    fail(script)


def _move(script: Script) -> None:
    script.more["average"].update(script.model)
    fail(script)


def _attribute(script: Script) -> None:
    script.model.temperature = 0.5
    fail(script)


def _unseen(script: Script) -> None:
    script.model.memory.numpy()[0] = 1.0  # torch counts no version
    fail(script)


def _rate(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = 0.5
    fail(script)


def _grow(script: Script) -> None:
    script.model.extra = nn.Linear(2, 2)
    fail(script)


class Wide(Net):
    """A buffer that is too large to be copied at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1 << 20))


class Remembers(Net):
    """A tensor that no `state_dict` has."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(3)


class Says(Net):
    """A state of its own, that only this class knows."""

    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


NOT_SAVED: dict[str, tuple[Callable[[Script], None], str]] = {
    "an optimizer whose state is not finite": (_poison, "not finite"),
    "weights that were written": (_write, "weights have changed"),
    "weights that may have been written": (_announce, "weights may have changed"),
    "an object that has moved": (_move, "average has changed"),
    "an attribute that has moved": (_attribute, "model.temperature has changed"),
    "an attribute that was written unseen": (_unseen, "model.memory has changed"),
    "a learning rate": (_rate, "optimizer has changed"),
    "a new layer": (_grow, "other parameters"),
    "a large buffer": (fail, "too large"),
    "a state of its own": (fail, "only the state_dict of model knows"),
}


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_cannot_be_had_exactly_is_not_saved(
    name: str, bomb: Bomb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why no snapshot was taken."""
    late, why = NOT_SAVED[name]
    models = {
        "a large buffer": Wide,
        "a state of its own": Says,
        "an attribute that was written unseen": Remembers,
    }
    script = Script(tmp_path, models.get(name, Net), writer="thread")
    script.more = {"average": Average(script.model)}
    with pytest.raises(Failure):
        script.train(late)
    assert [one.step for one in saved(tmp_path)] == [5]
    assert why in only_line(caplog)


def test_a_metric_is_put_back_to_the_boundary(bomb: Bomb, tmp_path: Path) -> None:
    """The batch that failed is not in it."""

    def late(script: Script) -> None:
        script.more["mean"].update(5.0)
        fail(script)

    script = Script(tmp_path, writer="thread")
    script.more = {"mean": torchmetrics.MeanMetric()}
    script.more["mean"].update(1.0)
    with pytest.raises(Failure):
        script.train(late)
    assert saved(tmp_path)[-1].reason == "exception"
    again = Script(tmp_path, writer="thread")
    again.more = {"mean": torchmetrics.MeanMetric()}
    with again.ckpt:
        again.track()
        assert again.more["mean"].compute() == 1.0


def test_weights_that_are_exchanged_after_the_loop_was_left_are_not_saved(
    bomb: Bomb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Left by `break`, before the optimizer stepped: averaged weights come in, unseen by torch's count of versions."""
    script = Script(tmp_path, writer="thread")
    with pytest.raises(Failure), script.ckpt:
        script.track()
        for steps, (x,) in enumerate(script.loader):
            if steps == 3:
                break
            script.model(x).sum().backward()
            script.optimizer.step()
        for weight in script.model.parameters():
            weight.data.mul_(0.5)
        fail(script)
    assert saved(tmp_path) == []
    assert "weights have changed" in only_line(caplog)


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_leaves_the_loop_is_raised_and_the_step_before_is_durable(
    kind: type[BaseException], bomb: Bomb, tmp_path: Path
) -> None:
    """The exception itself, without another one in its context."""

    def end(_: Script) -> None:
        raise kind

    with pytest.raises(kind) as caught:
        Script(tmp_path, writer="thread").train(end)
    assert caught.value.__context__ is None
    assert [(one.step, one.reason) for one in saved(tmp_path)] == [(5, "every_n_steps"), (FAILS_AT, "exception")]


def test_a_failure_to_save_does_not_hide_the_exception(
    bomb: Bomb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saving may fail at the boundary or when the Checkpointer is closed."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no device")

    def late(script: Script) -> None:
        script.ckpt.engine.save = broken  # type: ignore[method-assign]
        fail(script)

    with pytest.raises(Failure):
        Script(tmp_path, writer="thread").train(late)
    assert "OSError: no device" in only_line(caplog)


def test_a_loop_that_trains_while_an_exception_is_handled_has_not_failed(
    bomb: Bomb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that tries again with smaller batches does."""
    script = Script(tmp_path, writer="thread")
    try:
        raise Failure("the first try")
    except Failure:
        script.train()
    assert saved(tmp_path)[-1].step == 10
    assert not [one for one in caplog.records if one.getMessage().startswith("Failure: ")]


@pytest.mark.parametrize(("how", "writer"), [("fail", "process"), ("exit", "thread")])
def test_a_script_that_closes_nothing_leaves_the_step_before_durable(how: str, writer: str, tmp_path: Path) -> None:
    """The process ends by the exception, or by `sys.exit()`; a resume is the uninterrupted run, bit for bit."""
    command = [sys.executable, "-m", "tests.loop.failing_script", str(tmp_path), how, writer]
    done = interpreters.run(command, capture_output=True, text=True)
    assert done.returncode == (1 if how == "fail" else 3)
    assert done.stderr.count("Failure: late") == (how == "fail")
    why = "Failure" if how == "fail" else "the process ends without close()"
    assert f"{why}: step {FAILS_AT} is durable" in done.stderr
    assert (saved(tmp_path)[-1].step, saved(tmp_path)[-1].reason) == (FAILS_AT, "exception")
    ends = []
    for root, seed in ((None, 0), (tmp_path, 7)):
        seed_everything(seed)
        script = Script(root, writer="thread")
        script.train()
        ends.append(digest(weights=script.model.state_dict(), optimizer=script.optimizer.state_dict()))
    assert ends[0] == ends[1]


def test_a_cell_of_a_notebook_that_fails_and_is_run_again_goes_on_after_the_step_before(
    bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Checkpointer is still open: the newer one closes it, and resumes from what it has saved."""
    script = Script(tmp_path, writer="thread")
    script.track()
    with pytest.raises(Failure) as caught:
        script.loop(0, fail)
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    again = Script(tmp_path, writer="thread")
    with again.ckpt:
        assert again.track().global_step == FAILS_AT


def test_a_loop_that_makes_its_batches_itself_is_saved_too(bomb: Bomb, tmp_path: Path) -> None:
    """The call of `step()` is the boundary of such a loop."""

    def train(root: Path | None, fails: int | None, seed: int) -> dict[str, str]:
        seed_everything(seed)
        script = Script(root, writer="thread")
        model, optimizer = script.model, script.optimizer
        run = None if script.ckpt is None else script.ckpt.track(model=model, optimizer=optimizer)
        try:
            for step in range(0 if run is None else run.global_step, 12):
                optimizer.zero_grad()
                loss = model(torch.randn(BATCH, 6)).pow(2).mean()
                if step == fails:
                    fail(script)
                loss.backward()
                optimizer.step()
                if run is not None:
                    run.step()
        finally:
            if script.ckpt is not None:
                script.ckpt.close()
        return digest(weights=model.state_dict(), optimizer=optimizer.state_dict())

    with pytest.raises(Failure):
        train(tmp_path, 7, 0)
    assert (saved(tmp_path)[-1].step, saved(tmp_path)[-1].reason) == (7, "exception")
    assert train(tmp_path, None, 7) == train(None, None, 0)


# ---- transformers


def _hf(tmp_path: Path, arguments: Any = None, *, fails: bool = False, seed: int = 0, **options: Any) -> Outcome:
    settings = {"tiers": str(tmp_path / "run"), "every_n_steps": 5, "at_end": False, "writer": "thread", **options}
    trace: list[Any] = []
    try:
        return train_hf(arguments or {}, settings, tmp_path / "hf", seed=seed, trace=trace)
    except Failure:
        assert fails
        return Outcome(trace, {})


@pytest.mark.cells(1)
@pytest.mark.parametrize("where", PLACES)
def test_transformers_loses_nothing_in_a_step_that_fails_before_it_changes_weights(
    where: str, bomb: Bomb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters, the running loss and the history are put back too; a script that catches the error may go on."""
    bomb.arm(where, 22 + 3 * BATCH + 1 if where == "sample" else FAILS_AT)
    _hf(tmp_path, fails=True)
    step = FAILS_AT - (where == "sample")
    assert (saved(tmp_path / "run")[-1].step, saved(tmp_path / "run")[-1].reason) == (step, "exception")
    reference = train_hf({}, None, tmp_path / "reference")
    again = _hf(tmp_path, seed=7, every_n_steps=10**9)
    assert again.trace == reference.trace[-len(again.trace) :]
    assert sum(one[0] == "train" for one in again.trace) == 3 * BATCHES - step
    assert again.digest == reference.digest
