"""The fixed triggers, one by one and together."""

from ckpt_engine.frequency.policy import FrequencySettings
from ckpt_engine.frequency.triggers import FixedTriggers


def triggers(step: int = 0, now: float = 0.0, **settings: object) -> FixedTriggers:
    return FixedTriggers(FrequencySettings(overhead=None, **settings), step=step, now=now)  # type: ignore[arg-type]


def test_every_n_steps_keeps_its_grid_from_any_start() -> None:
    """A run resumed at step 130 fires at 200, not at 230."""
    found = [triggers(step, every_n_steps=100).wake_step for step in (0, 99, 100, 130, 199)]
    assert found == [100, 100, 200, 200, 200]


def test_every_seconds_counts_from_its_last_firing() -> None:
    """A late firing does not cause a burst."""
    fixed = triggers(every_seconds=10.0)
    assert [now for now in (5.0, 10.0, 12.0, 35.0, 40.0, 46.0) if fixed.fire(1, now)] == [10.0, 35.0, 46.0]
    assert triggers(now=35.0, every_seconds=10.0).wake_time == 45.0


def test_every_n_steps_fires_once_when_a_multiple_was_jumped_over() -> None:
    """Boundaries that are not offered do not multiply snapshots."""
    fixed = triggers(every_n_steps=10)
    assert [step for step in (5, 9, 34, 35, 39, 40, 41) if fixed.fire(step, 0.0)] == [34, 40]


def test_listed_steps_fire_once_each_beside_the_multiples() -> None:
    """A listed step that is also a multiple is one snapshot, and one that no boundary had is taken at the next one."""
    fixed = triggers(every_n_steps=10, at_steps=(1, 3, 20, 24))
    fired = [(step, fixed.fire(step, 0.0)) for step in (1, 2, 4, 10, 20, 21, 24, 25)]
    due = [(1, "at_steps"), (4, "at_steps"), (10, "every_n_steps"), (20, "at_steps"), (24, "at_steps")]
    assert [(step, reason) for step, reason in fired if reason] == due


def test_a_resumed_run_takes_the_listed_steps_behind_its_snapshot_only() -> None:
    """What the earlier process has taken is not taken again."""
    resumed = FixedTriggers(FrequencySettings(at_steps=(5, 12, 40)), step=12, now=0.0)
    assert [step for step in range(13, 60) if resumed.fire(step, 0.0)] == [40]


def test_validation_fires_once_and_only_where_asked() -> None:
    """The flag is consumed by firing."""
    asked, unasked = triggers(on_validation_end=True), triggers()
    for fixed in (asked, unasked):
        fixed.validation_ended()
    assert [asked.fire(1, 0.0), asked.fire(2, 0.0), unasked.fire(1, 0.0)] == ["validation", None, None]


def test_the_first_of_several_due_triggers_gives_the_reason_and_all_have_fired() -> None:
    """One boundary takes one snapshot."""
    fixed = triggers(every_n_steps=10, every_seconds=5.0, on_validation_end=True)
    fixed.validation_ended()
    assert fixed.fire(10, 7.0) == "validation"
    assert fixed.fire(11, 8.0) is None
    assert fixed.fire(20, 12.5) == "every_n_steps"
    assert fixed.fire(21, 13.0) is None
    assert fixed.fire(22, 17.5) == "every_seconds"


def test_the_end_is_due_only_with_work_not_yet_safe() -> None:
    """A run that ends at the step of its newest snapshot needs no other."""
    assert triggers().at_end(10, 9) == "end"
    assert triggers().at_end(10, 10) is None
    assert triggers(at_end=False).at_end(10, 9) is None


def test_nothing_fires_where_nothing_is_asked_for() -> None:
    """Without triggers no boundary takes a snapshot."""
    fixed = triggers()
    assert fixed.wake_step == fixed.wake_time == float("inf")
    assert fixed.fire(10**9, 1e12) is None


def test_description_lists_what_is_on() -> None:
    """The line names each fixed trigger."""
    text = triggers(every_n_steps=100, every_seconds=600.0, at_steps=(1, 7), on_validation_end=True).describe()
    assert text == "every 100 steps, every 10 min, at steps 1, 7, after each validation and at the end"
    assert triggers(at_end=False).describe() == "never"
