"""What hooks take of training: measured where they begin, in the account and in what the time of a run went into."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.observe import run_times as module
from ckpt_engine.observe.run_times import HookTime, RunTimes, hook_time
from ckpt_engine.tools.simulate import VirtualClock
from tests.frequency.rig import Rig


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> HookTime:
    """A clock of its own, which is a second later each time it is read."""
    monkeypatch.setattr(module, "perf_counter", itertools.count(1.0).__next__)
    return HookTime()


def test_a_hook_within_a_hook_counts_once(hooks: HookTime) -> None:
    """The time of the outer one counts, in which the inner one has read the clock twice."""
    inner = hooks.counted(lambda: "done")
    outer = hooks.counted(inner)
    assert outer() == "done"
    assert hooks.seconds == 3.0
    assert inner() == "done"
    assert hooks.seconds == 4.0


def test_waits_are_left_out(hooks: HookTime) -> None:
    """A stall within a hook is counted as a stall, and one between two hooks changes nothing."""
    waits = hooks.counted(lambda: hooks.leave_out(0.75))
    waits()
    hooks.leave_out(100.0)
    waits()
    assert hooks.seconds == 0.5


def test_what_a_hook_calls_of_the_user_does_not_count_but_for_hooks_within(hooks: HookTime) -> None:
    """A loader that is followed fetches a batch, and asks a sampler that is followed as well."""
    sampler = hooks.counted(lambda: "an index")
    loader = hooks.counted(lambda: hooks.outside(lambda: (next(clock), sampler())[1]))
    clock = itertools.count()
    assert loader() == "an index"
    assert hooks.seconds == 3.0  # one before the loader is asked, one in the sampler, one behind the loader


def test_a_loader_that_ends_or_fails_does_not_count_either(hooks: HookTime) -> None:
    """Its exception goes through."""
    ended = hooks.counted(lambda: hooks.outside(next, iter(())))
    with pytest.raises(StopIteration):
        ended()
    assert hooks.seconds == 2.0


def test_the_time_of_a_hook_that_raises_counts(hooks: HookTime) -> None:
    """A stop leaves a hook by an exception."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hooks.counted(stop)()
    assert hooks.seconds == 1.0


def test_a_run_takes_each_second_over_once(hooks: HookTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so within a hook, whose own time it takes over at the next boundary."""
    monkeypatch.setattr(module, "hook_time", hooks)
    times = RunTimes(VirtualClock())
    hooks.counted(lambda: None)()
    boundary = hooks.counted(times.boundary)
    boundary(1)
    assert times.seconds["hooks"] == 1.0
    boundary(2)
    assert times.seconds["hooks"] == 2.0
    assert hooks.seconds == 3.0


def _trained(hook_seconds: float) -> tuple[int, float]:
    """How many snapshots of half a second a day's quarter has, and what the account says."""
    rig, taken = Rig(overhead=0.01, mtbf_seconds=60.0), 0
    for _ in range(21_600):
        rig.clock.now += hook_seconds
        hook_time.seconds += hook_seconds
        if rig.go() is not None:
            rig.take(0.5, 1.0)
            taken += 1
    return taken, rig.cadence.overhead_fraction


def test_hooks_use_up_the_budget_seven_eighths_of_it_at_most() -> None:
    """Snapshots have what hooks leave of the budget, and an eighth where they leave less. All is said."""
    without, overhead = _trained(0.0)
    assert overhead == pytest.approx(0.01, rel=0.02)
    for hook_seconds in (0.0025, 0.008):
        some, overhead = _trained(hook_seconds)
        assert some == pytest.approx((1.0 - 100.0 * hook_seconds) * without, rel=0.05)
        assert overhead == pytest.approx(0.01, rel=0.02)
    many, overhead = _trained(0.02)
    assert many == pytest.approx(0.125 * without, rel=0.05)
    assert overhead == pytest.approx(0.02125, rel=0.02)


def test_a_resumed_run_knows_the_hooks_of_earlier_attempts() -> None:
    """They are part of the overhead, and no debt of snapshots."""
    first = Rig(overhead=0.01)
    for _ in range(1000):
        hook_time.seconds += 0.02
        first.go(seconds=1.02)
    resumed = Rig(overhead=0.01)
    resumed.cadence.restore(first.cadence.state())
    resumed.cadence.start(1000)
    assert resumed.cadence.overhead_fraction == pytest.approx(0.02)
    assert resumed.cadence._account.credit(0.01, 100.0) == pytest.approx(0.01 * 1000)


def test_hooks_of_a_loop_are_found(tmp_path: Path) -> None:
    """A plain loop with `track`: they have a part of their own in the time of the run, and are in its overhead."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
    with Checkpointer(tmp_path / "run", writer="thread", every_n_steps=1000, at_end=False) as checkpointer:
        run = checkpointer.track(model=model, optimizer=optimizer, loader=loader)
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        spent = run._run.engine.times.spent
        assert spent.hooks > 0.0
        assert spent.wall == pytest.approx(sum(run._run.engine.times.seconds.values()))
        assert 0.0 < run._run.cadence._account.hook_seconds <= spent.hooks
        assert run._run.cadence.overhead_fraction > 0.0
