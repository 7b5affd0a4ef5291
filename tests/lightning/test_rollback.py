"""A run whose loss diverges goes back by itself at the next start, and leaves out the batches that did it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import DivergedError, RollbackRequestedError
from ckpt_engine.observe.resume_report import ResumeReport
from ckpt_engine.preempt.divergence import LEAST
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.runs import (
    Case,
    Entry,
    Model,
    Recorder,
    every_batch,
    final_digest,
    fit,
    make_trainer,
    saved,
    seed_everything,
    train,
)


class Sick(Model):
    """Some batches, known by their samples, make its loss what no optimizer survives."""

    bad: frozenset[Any] = frozenset()
    factor = math.nan

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if tuple(batch[2].tolist()) in self.bad else loss


def batches(trace: list[Entry]) -> list[Entry]:
    """Epoch, batch and samples of all that was trained, in order."""
    return [(entry[1], entry[2], entry[4]) for entry in trace if entry[0] == "train"]


def sick(reference: list[Entry], first: int, count: int = 1, factor: float = math.nan) -> type[Model]:
    """A model that the batches from number `first` on make sick."""
    ids = frozenset(entry[2] for entry in batches(reference)[first : first + count])
    return type("Sick", (Sick,), {"bad": ids, "factor": factor})


def test_the_next_start_goes_back_and_skips_what_made_it_sick(tmp_path: Path) -> None:
    """In that epoch the samples that follow are those of the run that nothing happened to; steps are not counted.

    Later epochs are shuffled by a random stream that dropout did not use for the batches that were left out.
    """
    case = Case()
    reference = batches(fit(case).trace)
    at = next(n for n, entry in enumerate(reference) if entry[:2] == (1, 2))
    model = sick(fit(case).trace, at)
    options: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 2}}
    with pytest.raises(RollbackRequestedError, match="rollback 1 of 3") as caught:
        fit(Case(model=model), every_batch(tmp_path, **options))
    assert "resumes at step" in str(caught.value) and "skips 2 batches" in str(caught.value)
    known = {one.path.name for one in saved(tmp_path)}
    second = fit(Case(model=model), every_batch(tmp_path, **options), ckpt_path="auto", seed=7)
    rest = [entry for entry in reference[at + 2 :] if entry[0] == 1]
    assert batches(second.trace)[: len(rest)] == rest
    assert len(batches(second.trace)) == len(reference) - at - 2
    assert next(entry[3] for entry in second.trace if entry[0] == "train") == at
    report = ResumeReport.from_json(json.loads((tmp_path / "resume-report.json").read_text()))
    assert f"rollback 1: the loss of step {at + 1} is nan; 2 batches are skipped" in report.notes
    assert report.replay is not None  # the steps behind the snapshot are others on purpose
    assert (report.replay.result, "2 batches are skipped" in report.replay.why) == ("not compared", True)
    # A kill after that goes on from the newest snapshot, which has the gap behind it already.
    later = [one for one in saved(tmp_path) if one.path.name not in known]
    assert later and later[-1].step == len(reference) - 2
    third = fit(Case(model=model), every_batch(tmp_path, **options), ckpt_path="auto", seed=8)
    assert batches(third.trace) == []
    assert third.digest == second.digest


@pytest.mark.long
def test_the_same_process_may_call_fit_again(tmp_path: Path) -> None:
    """With the same trainer and model; it ends as a new process would, bit for bit."""
    reference = fit(Case()).trace
    case = Case(model=sick(reference, 7))
    options: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 1}}
    with pytest.raises(RollbackRequestedError):
        fit(case, every_batch(tmp_path / "a", **options))
    restarted = fit(case, every_batch(tmp_path / "a", **options), ckpt_path="auto", seed=7)
    trace: list[Entry] = []
    seed_everything(0)
    model = case.model(case, trace)
    trainer = make_trainer(case, [*case.callbacks(), *every_batch(tmp_path / "b", **options)], Recorder(trace))
    with pytest.raises(RollbackRequestedError):
        train(trainer, model, case, "auto")
    trace.clear()
    train(trainer, model, case, "auto")
    assert trace == restarted.trace
    assert final_digest(trainer, model) == restarted.digest


@pytest.mark.slow
def test_a_spike_goes_back_to_before_its_first_loss(tmp_path: Path) -> None:
    """Four losses in a row are far above the others; what was saved is from before the first of them."""
    reference = fit(Case(trainer={"max_epochs": 6})).trace
    first = LEAST + 2
    case = Case(model=sick(reference, first, 4, 1e4), trainer={"max_epochs": 6})
    options: dict[str, Any] = {"rollback": {"on": "loss_spike", "skip_batches": 4}}
    with pytest.raises(RollbackRequestedError, match="far above its usual"):
        fit(case, every_batch(tmp_path, **options))
    assert saved(tmp_path)[-1].step == first
    resumed = fit(case, every_batch(tmp_path, **options), ckpt_path="auto", seed=7)
    skipped = [n for n in range(first, first + 5) if batches(reference)[n] not in batches(resumed.trace)]
    assert skipped[:4] == [*range(first, first + 4)]


@pytest.mark.slow
def test_a_run_that_stays_sick_goes_further_back_and_gives_up(tmp_path: Path) -> None:
    """Every batch from some point on: each attempt begins earlier, and after the last one nothing is started again."""
    reference = fit(Case()).trace
    case = Case(model=sick(reference, 5, 1000))
    options: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 1, "at_most": 2}}
    steps = []
    for _ in range(2):
        with pytest.raises(RollbackRequestedError):
            fit(case, every_batch(tmp_path, **options), ckpt_path="auto")
        steps.append(json.loads((tmp_path / "rollback.json").read_text())["step"])
    assert steps == [5, 4]
    with pytest.raises(DivergedError, match="rolled back 2 times already") as caught:
        fit(case, every_batch(tmp_path, **options), ckpt_path="auto")
    assert not isinstance(caught.value, RollbackRequestedError)
    assert f"step 4 is durable on {tmp_path}" in str(caught.value)
    assert json.loads((tmp_path / "resume-report.json").read_text())["step"] == 4


@pytest.mark.slow
def test_accumulated_steps_are_skipped_whole(tmp_path: Path) -> None:
    """Else the first step after the gap would have fewer batches than the others."""
    batches_per_step = 3
    case = Case(trainer={"accumulate_grad_batches": batches_per_step, "max_epochs": 4})
    reference = fit(case).trace
    at = next(n for n, entry in enumerate(batches(reference)) if entry[:2] == (2, 1))
    options: dict[str, Any] = {"rollback": {"on": "nan", "skip_batches": 2}}
    broken = Case(model=sick(reference, at), trainer=case.trainer)
    with pytest.raises(RollbackRequestedError, match=f"skips {batches_per_step} batches"):
        fit(broken, every_batch(tmp_path, **options))
    assert json.loads((tmp_path / "rollback.json").read_text())["skip_batches"] == batches_per_step
    resumed = fit(broken, every_batch(tmp_path, **options), ckpt_path="auto", seed=7)
    assert batches(resumed.trace)[0][:2] == (2, batches_per_step)
    notes = json.loads((tmp_path / "resume-report.json").read_text())["notes"]
    assert any(note.endswith(f"{batches_per_step} batches are skipped") for note in notes), notes


@pytest.mark.slow
def test_what_is_only_in_memory_counts(tmp_path: Path) -> None:
    """The writer makes it durable before it is decided where to go."""
    reference = fit(Case()).trace
    case = Case(model=sick(reference, 7))
    ckpt = AdaptiveCheckpoint(
        tiers=[{"url": "memory", "every_n_steps": 1}, str(tmp_path)],
        every_n_steps=10**6,
        rollback={"on": "nan", "skip_batches": 1},
    )

    class Patience(every_batch(tmp_path)[1].__class__):  # type: ignore[misc]
        def on_train_batch_start(self, *args: Any) -> None:
            run = ckpt._run
            assert run is not None
            while run.engine._pipeline.slots.nbytes() and run.engine._pipeline.slots._warm_up is not None:
                run.engine.ready(durable=False)

    with pytest.raises(RollbackRequestedError):
        fit(case, [ckpt, Patience(ckpt)])
    assert json.loads((tmp_path / "rollback.json").read_text())["step"] == 7
