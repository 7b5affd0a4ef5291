"""The parts of a replicator: the life of a tier, when it tries again, and the gate that bytes pass."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from ckpt_engine.errors import StorageStalledError
from ckpt_engine.store.storage.base import Throttle, metered
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.replicate import NEXT, PAUSES, CopyStoppedError, CopyThrottle, Replicator, TierState
from tests.restore.memory_tier.lives import until
from tests.writer.passing import let_time_pass_where_calls_hang
from tests.writer.staged import WAIT_SECONDS
from tests.writer.tiered import Run

ROOT = Path(__file__).parents[2]
Life = list[tuple[TierState, TierState]]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    """All changes of state of all further tiers."""
    seen: Life = []
    change = Replicator.__setattr__

    def noted(one: Replicator, name: str, value: object) -> None:
        if name == "state" and "state" in vars(one):
            assert isinstance(value, TierState)
            seen.append((one.state, value))
        change(one, name, value)

    monkeypatch.setattr(Replicator, "__setattr__", noted)
    return seen


def test_the_page_has_the_table_of_states() -> None:
    """Each state with those that may follow it; two of them are final, and every other one leads to an end."""
    page = (ROOT / "docs/tiers.md").read_text()
    rows = re.findall(r"^\| `([A-Z]+)` \|(.*)\|$", page, re.MULTILINE)
    shown = {TierState[name]: {TierState[one] for one in re.findall(r"[A-Z]+", rest)} for name, rest in rows}
    assert shown == NEXT
    final = {state for state, following in NEXT.items() if not following}
    assert final == {TierState.LEFT, TierState.ENDED}
    assert all(TierState.ENDED in following for state, following in NEXT.items() if state not in final)


def test_a_tier_rests_fails_and_copies_again(run: Run, life: Life) -> None:
    """What it goes through is in the table, and it ends once."""
    run.start()
    run.save(1)
    run.until_copied(1)
    run.until_rest()
    run.weather[run.far].down("put")
    run.save(2)
    run.state_of(run.far, "away")
    run.weather[run.far].up()
    run.until_copied(2)
    run.close()
    assert all(after in NEXT[before] for before, after in life)
    for before, after in (("COPYING", "RESTING"), ("RESTING", "COPYING"), ("COPYING", "FAILED"), ("FAILED", "COPYING")):
        assert (TierState[before], TierState[after]) in life
    assert [after for _, after in life].count(TierState.ENDED) == 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_tier_that_hangs_goes_on_or_is_left(
    run: Run, life: Life, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """It is left only by a writer that ends."""
    let_time_pass_where_calls_hang(monkeypatch)
    run.start(drain_seconds=0.1)
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.far].hang("put")
    run.save(2)
    run.state_of(run.far, "hangs")
    if comes_back:
        end.set()
        run.until_copied(2)
        run.until_rest()
    run.close()
    wanted = TierState.ENDED if comes_back else TierState.LEFT
    until(lambda: life[-1][1] is wanted, lambda: str(life), WAIT_SECONDS)
    end.set()
    assert all(after in NEXT[before] for before, after in life)
    assert (TierState.COPYING, TierState.HUNG) in life


def test_a_call_that_ends_while_it_is_being_left_is_no_call_that_hangs(
    run: Run, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is released, as if the call had come back a moment earlier."""
    let_time_pass_where_calls_hang(monkeypatch)
    give_up = Replicator._give_up

    def late(one: Replicator, error: StorageStalledError) -> Exception | None:
        found = give_up(one, error)
        if found is not None:
            call = one.tier.place.copy_lane._call
            end.set()
            until(lambda: call is None or call.done, lambda: "the call does not end", WAIT_SECONDS)
        return found

    # Before the start: an attempt asks what was there when it began.
    monkeypatch.setattr(Replicator, "_give_up", late)
    run.start(drain_seconds=0.1)
    run.save(1)
    run.until_copied(1)
    end = run.weather[run.far].hang("put")
    run.save(2)
    run.state_of(run.far, "hangs")
    run.close()
    until(lambda: life[-1][1] in (TierState.ENDED, TierState.LEFT), lambda: str(life), WAIT_SECONDS)
    assert life[-1][1] is TierState.ENDED


@pytest.mark.parametrize("state", [TierState.LEFT, TierState.ENDED])
def test_nothing_follows_an_end(run: Run, state: TierState) -> None:
    """A change that the table does not have is a fault of the program."""
    run.start()
    assert run.client is not None
    run.save(1)
    (one,) = run.client._queue.persister.secondary.replicators  # type: ignore[union-attr]
    run.close()
    one.join(WAIT_SECONDS)
    assert not one.is_alive()
    one.state = state
    with pytest.raises(AssertionError, match="COPYING"):
        one._go(TierState.COPYING, settled=False)


def test_attempts_become_rarer_up_to_a_limit() -> None:
    """Twice as long each time, and no overflow after weeks."""
    assert [PAUSES.seconds(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert PAUSES.seconds(10**9) == 60.0
    assert [PAUSES.after(seconds) for seconds in (1.0, 32.0, 60.0)] == [2.0, 60.0, 60.0]


def test_an_open_gate_asks_its_limit() -> None:
    """Every byte that passes is counted against the bandwidth."""
    now = [0.0]
    gate = CopyThrottle(Throttle(100.0, lambda: now[0]))
    assert [gate.wait(50), gate.wait(50), gate.wait(50)] == [0.0, 0.5, 1.0]
    assert CopyThrottle(None).wait(10**9) == 0.0


def test_a_dropped_copy_ends_at_its_next_slice(tmp_path: Path) -> None:
    """`drop` holds for one copy, `stop` for all."""
    gate = CopyThrottle(None)
    sink = metered(LocalStorage(tmp_path), lambda _: gate)
    gate.drop()
    with pytest.raises(CopyStoppedError):
        sink.put("a", [memoryview(b"1")])
    gate.reopen()
    sink.put("a", [memoryview(b"1")])
    gate.stop()
    gate.reopen()
    with pytest.raises(CopyStoppedError):
        sink.put("b", [memoryview(b"1")])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_copy_that_waits_for_its_turn_can_be_stopped() -> None:
    """A low bandwidth must not delay the end."""
    gate = CopyThrottle(Throttle(1.0))
    gate.wait(1000)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(CopyStoppedError):
            gate.pause(gate.wait(1))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    gate.stop()
    assert ended.wait(30)
    thread.join(30)
