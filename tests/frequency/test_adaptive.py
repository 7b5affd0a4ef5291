"""The adaptive trigger alone: when it is due, when it holds back, which windows are clean."""

from ckpt_engine.frequency.account import Account
from ckpt_engine.frequency.adaptive import CALIBRATE_AFTER_WINDOWS, AdaptiveTrigger, Moment
from ckpt_engine.frequency.controller import Costs
from ckpt_engine.frequency.settings import FrequencySettings

CHEAP = Costs(step_seconds=1.0, stall_seconds=0.5, latency_seconds=5.0, busy_seconds=5.0)


def trigger(costs: Costs = CHEAP, **settings: object) -> AdaptiveTrigger:
    """A trigger with a decision in force; 10 steps for `CHEAP` at 5 %."""
    one = AdaptiveTrigger(FrequencySettings(**{"overhead": 0.05} | settings))  # type: ignore[arg-type]
    one.decide(0, costs, 1.0, held_back=False)
    return one


def moment(since: int, *, quiet: int = 0) -> Moment:
    return Moment(step=100 + since, now=1000.0 + since, taken_step=100, taken_time=1000.0, quiet_steps=quiet)


def account(credit_seconds: float = 1.0) -> Account:
    one = Account()
    one.training_seconds = 100.0
    one.paused_seconds = 5.0 - credit_seconds
    return one


def test_due_at_the_interval_and_not_before() -> None:
    """Before it the trigger names the step at which to ask again."""
    early, due = trigger().ask(moment(9), account()), trigger().ask(moment(10), account())
    assert (early.due, early.again_step) == (False, 110)
    assert due.due


def test_debt_stretches_the_interval_by_what_it_takes_to_earn_it() -> None:
    """Half a second short is ten steps at 5 %, half a step of tolerance included."""
    answer = trigger().ask(moment(10), account(credit_seconds=0.25))
    assert (answer.due, answer.again_step) == (False, 115)
    assert trigger().ask(moment(20), account(credit_seconds=-99.0)).due


def test_calibration_waits_for_clean_steps() -> None:
    """While the clean step time is not known well enough, a window leaves a few steps alone."""
    one = trigger()
    one.calibrating = True
    assert [one.ask(moment(10, quiet=quiet), account()).due for quiet in (0, 2, 3)] == [False, False, True]
    assert one.ask(moment(10, quiet=1), account()).again_step == 112
    assert one.ask(moment(20), account()).due


def test_windows_without_clean_steps_lead_to_a_calibration() -> None:
    """A clean step time that was measured long ago is measured again."""
    one = trigger()
    for _ in range(CALIBRATE_AFTER_WINDOWS - 1):
        one.window_began(0)
    assert one.ask(moment(10), account()).due
    one.window_began(0)
    assert not one.ask(moment(10), account()).due
    one.window_began(3)
    assert one.ask(moment(10), account()).due


def lowered(*windows: tuple[float, bool]) -> int:
    """The interval after these windows (cost, held back) when snapshots have become cheap."""
    one = trigger(Costs(step_seconds=1.0, stall_seconds=5.0, latency_seconds=5.0))
    assert one.decision is not None
    assert one.decision.interval_steps == 100
    for cost, held_back in windows:
        one.window_ended(cost, held_back=held_back)
    return one.decide(1, CHEAP, 1.0, held_back=False).interval_steps


def test_only_clean_windows_lower_the_interval() -> None:
    """Clean means that the interval paid for the snapshot and that nothing waited."""
    assert lowered((0.5, False), (0.5, False)) == 67
    assert lowered((0.5, False)) == 100
    assert lowered((0.5, False), (5.1, False)) == 100
    assert lowered((0.5, False), (0.5, True)) == 100
    assert lowered((0.5, True), (0.5, False), (0.5, False)) == 67


def test_a_change_starts_the_count_of_clean_windows_again() -> None:
    """Each lowering needs its own two windows."""
    one = trigger(Costs(step_seconds=1.0, stall_seconds=5.0, latency_seconds=5.0))
    for _ in range(2):
        one.window_ended(0.5, held_back=False)
    assert one.decide(1, CHEAP, 1.0, held_back=False).interval_steps == 67
    assert one.decide(2, CHEAP, 1.0, held_back=False).interval_steps == 67
    one.window_ended(0.5, held_back=False)
    assert one.decide(3, CHEAP, 1.0, held_back=False).interval_steps == 67
    one.window_ended(0.5, held_back=False)
    assert one.decide(4, CHEAP, 1.0, held_back=False).interval_steps == 45


def test_overdue_work_is_taken_when_the_lower_bound_allows() -> None:
    """Under an RPO time counts, but never below what budget and back-pressure allow."""
    one = trigger(Costs(1.0, 0.1, latency_seconds=5.0, busy_seconds=5.0), max_lost_work_seconds=60.0, mtbf_seconds=1e9)
    one.decide(0, Costs(1.0, 0.1, latency_seconds=5.0, busy_seconds=5.0), 1e-12, held_back=False)
    late = Moment(step=104, now=1070.0, taken_step=100, taken_time=1000.0, quiet_steps=0)
    assert (one.ask(late, account()).due, one.ask(late, account()).again_step) == (False, 105)
    assert one.ask(Moment(105, 1071.0, 100, 1000.0, 0), account()).due
    assert one.ask(Moment(105, 1050.0, 100, 1000.0, 0), account()).again_time == 1054.0
