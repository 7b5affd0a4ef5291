"""Snapshots that only stay in memory, in a Lightning run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from ckpt_engine.copy.job import PersistJob
from ckpt_engine.engine import Engine
from ckpt_engine.frequency.cadence import Cadence
from ckpt_engine.loop import boundary
from ckpt_engine.writer.launch import ProcessWriter
from lightning_ckpt import AdaptiveCheckpoint
from tests.lightning.cases import CASES
from tests.lightning.runs import fit, saved


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of the snapshots that the writer keeps in memory only."""
    steps: list[int] = []
    hold = ProcessWriter.hold

    def noted(self: ProcessWriter, job: PersistJob) -> None:
        assert job.reason == "memory"
        steps.append(job.step)
        hold(self, job)

    monkeypatch.setattr(ProcessWriter, "hold", noted)
    return steps


def test_every_boundary_without_a_durable_snapshot_has_one_in_memory(
    tmp_path: Path, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is bit for bit the one without the callback, and the cadence learns the cost of each snapshot."""
    charged: list[int] = []
    tell = Cadence.held

    def noted(self: Cadence, step: int, stall_seconds: float) -> None:
        assert stall_seconds > 0.0
        charged.append(step)
        tell(self, step, stall_seconds)

    monkeypatch.setattr(Cadence, "held", noted)
    case = CASES["validation within epochs"]
    reference = fit(case)
    tiers = [{"url": "memory", "every_n_steps": 1}, str(tmp_path)]
    watched = fit(case, [AdaptiveCheckpoint(tiers=tiers, every_n_steps=5, keep={"last": 100})])
    assert (watched.trace, watched.digest) == (reference.trace, reference.digest)
    durable = {snapshot.step for snapshot in saved(tmp_path)}
    steps = reference.trainer.global_step
    assert kept in (sorted(set(range(1, steps)) - durable), sorted(set(range(2, steps)) - durable))
    assert steps in durable
    assert charged == kept


def test_no_stop_waits_for_what_only_stays_in_memory(tmp_path: Path, kept: list[int]) -> None:
    """The status, from whose numbers stops are planned, counts none of them as on its way to a tier."""
    status = tmp_path / "status.json"
    tiers = [{"url": "memory", "every_n_steps": 1}, str(tmp_path / "run")]
    fit(CASES["shuffled"], [AdaptiveCheckpoint(tiers=tiers, every_n_steps=5, status={"file": str(status)})])
    assert kept
    assert json.loads(status.read_text())["snapshots_in_flight"] == 0


def test_no_snapshot_in_memory_while_gradients_accumulate(
    tmp_path: Path, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be taken right after the optimizer step is not made up for in the middle of an accumulation."""
    ready, refused = Engine.ready, []

    def once_not(self: Engine, *, durable: bool = True, cold: bool = False) -> bool:
        if kept and not durable and not refused:
            refused.append(kept[-1] + 1)
            return False
        return ready(self, durable=durable)

    monkeypatch.setattr(Engine, "ready", once_not)
    case = CASES["accumulation of 4"]
    reference = fit(case)
    tiers = [{"url": "memory", "every_n_steps": 1}, str(tmp_path)]
    watched = fit(case, [AdaptiveCheckpoint(tiers=tiers, every_n_steps=1000)])
    assert watched.digest == reference.digest
    assert kept == sorted(set(kept))
    assert len(kept) >= reference.trainer.global_step - 3
    assert len(refused) == 1
    assert not set(refused) & set(kept)


class Steps(Callback):
    """A clock of the cadence by which a step takes a second, a snapshot in memory a tenth, a durable one five."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        make, tell, take = boundary.cadence_of, Cadence.held, Cadence.taken
        monkeypatch.setattr(boundary, "cadence_of", lambda settings, clock, engine: make(settings, self, engine))
        monkeypatch.setattr(Cadence, "held", lambda cadence, step, stall_seconds: tell(cadence, step, 0.1))
        monkeypatch.setattr(Cadence, "taken", lambda cadence, step, stall_seconds: take(cadence, step, 5.0))
        monkeypatch.setattr(Cadence, "fence", lambda cadence, seconds: None)

    def monotonic(self) -> float:
        return self.now

    def on_train_batch_start(self, *args: Any) -> None:
        self.now += 1.0


def test_without_a_rhythm_the_budget_decides(tmp_path: Path, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that fails all the time: a generous one has them between its durable ones, that of 1 % at few steps."""
    case, steps = CASES["shuffled"], Steps(monkeypatch)
    tiers = ["memory", str(tmp_path / "a")]
    fit(case, [steps, AdaptiveCheckpoint(tiers=tiers, every_n_steps=1000, overhead="99%", mtbf="2 s")])
    many = len(kept)
    kept.clear()
    fit(case, [steps, AdaptiveCheckpoint(tiers=["memory", str(tmp_path / "b")], every_n_steps=1000, mtbf="2 s")])
    assert 0 < len(kept) < many


def test_without_a_memory_tier_nothing_is_kept(tmp_path: Path, kept: list[int]) -> None:
    """The engine works as before."""
    fit(CASES["shuffled"], [AdaptiveCheckpoint(str(tmp_path), every_n_steps=5)])
    assert kept == []
