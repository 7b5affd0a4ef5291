"""The adaptive trigger alone: when it is due, when it holds back, which windows are clean."""

from ckpt_engine.frequency.policy import AdaptivePolicy, Costs, FrequencySettings
from ckpt_engine.frequency.triggers import CALIBRATE_AFTER_WINDOWS, Account, AdaptiveTrigger, Moment
from ckpt_engine.observe.events import MACHINE

CHEAP = Costs(step_seconds=1.0, stall_seconds=0.5, latency_seconds=5.0, busy_seconds=5.0)


def trigger(costs: Costs = CHEAP, **settings: object) -> AdaptiveTrigger:
    """A trigger with a decision in force; 10 steps for `CHEAP` at 5 %."""
    wanted = FrequencySettings(**{"overhead": 0.05} | settings)  # type: ignore[arg-type]
    one = AdaptiveTrigger(wanted)
    one.settle(0, AdaptivePolicy(wanted).decide(costs, {MACHINE: 1.0}), held_back=False)
    return one


def moment(
    since: float, *, trained: float | None = None, safe: float = 1000.0, failures: int = 0, quiet: int = 0
) -> Moment:
    """So many steps of a second after the snapshot at step 100, if not `trained` says how long they took."""
    seconds = since if trained is None else trained
    return Moment(100 + int(since), 1000.0 + since, 1000.0, seconds, safe, failures, quiet)


def account(credit_seconds: float = 1.0, training_seconds: float = 100.0) -> Account:
    one = Account()
    one.training_seconds = training_seconds
    one.paused_seconds = 0.05 * training_seconds - credit_seconds
    return one


def test_due_at_the_interval_and_not_before() -> None:
    """Before it the trigger names the time at which to ask again, to half a step."""
    early, due = trigger().ask(moment(9), account()), trigger().ask(moment(10), account())
    assert (early.due, early.again_time) == (False, 1009.5)
    assert due.due


def test_the_interval_is_one_of_time() -> None:
    """Slow steps bring a snapshot forward, because what may be lost is time."""
    assert trigger().ask(moment(4, trained=10.0), account()).due
    assert not trigger().ask(moment(14, trained=9.0), account()).due


def test_debt_stretches_the_interval_by_what_it_takes_to_earn_it() -> None:
    """Half a second short is ten steps at 5 %, half a step of tolerance included; at most twice the interval."""
    answer = trigger().ask(moment(10), account(credit_seconds=0.25))
    assert (answer.due, answer.again_step) == (False, 115)
    assert trigger().ask(moment(20), account(credit_seconds=-99.0)).due


def test_a_run_that_is_hours_old_pays_a_debt_back_slowly() -> None:
    """Half of what it may have saved up stretches the interval by a half, however long earning it would take."""
    old = account(credit_seconds=0.5 - 54.0, training_seconds=1e5)
    old.credit(0.05, 1e9)
    assert not trigger().ask(moment(14), old).due
    assert trigger().ask(moment(15), old).due


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


def test_overdue_work_is_taken_when_the_lower_bound_allows() -> None:
    """Under an RPO time counts, but never below what budget and back-pressure allow."""
    one = trigger(Costs(1.0, 0.1, latency_seconds=5.0, busy_seconds=5.0), max_lost_work_seconds=60.0, mtbf_seconds=1e9)
    costs = Costs(1.0, 0.1, latency_seconds=5.0, busy_seconds=5.0)
    one.settle(0, AdaptivePolicy(one.decision.settings).decide(costs, {MACHINE: 1e-12}), held_back=False)
    early, late = moment(4, trained=4.0, safe=934.0), moment(5, safe=934.0)
    assert (one.ask(early, account()).due, one.ask(early, account()).again_time) == (False, 1004.5)
    assert one.ask(late, account()).due
    assert one.ask(moment(5), account()).again_time == 1048.0  # time for two persists


def test_work_under_an_rpo_is_taken_again_at_once_after_a_failure() -> None:
    """A failed snapshot protects nothing; where the next one fails too, it comes when budget and writer allow it."""
    one = trigger(max_lost_work_seconds=60.0)
    assert one.ask(moment(1, safe=940.0, failures=1), account()).due
    assert not one.ask(moment(1, safe=940.0, failures=2), account()).due
