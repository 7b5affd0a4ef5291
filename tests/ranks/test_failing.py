"""Two ranks of which one fails in the middle of a step: the last boundary of both is saved, or nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher, writers_of
from tests.ranks.stopped import SIZE, WAYS, Account, Launched, Lives, Traces, gone, snapshots

BATCH = 5
"""Is not trained to its end."""
ENDS: dict[str, dict[str, str]] = {
    "one rank raises": {f"1/{BATCH}": "raise"},
    "rank 0 raises": {f"0/{BATCH}": "raise"},
    "after SIGTERM": {f"{rank}/{BATCH}": "stop and raise" for rank in range(SIZE)},
    "both raise": {f"{rank}/{BATCH}": "raise" for rank in range(SIZE)},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Launcher]]:
    """What starts the runs of a trainer, made when one is asked for."""
    made: dict[str, Launcher] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture(params=["plain", pytest.param("lightning", marks=pytest.mark.slow)])
def lives(request: pytest.FixtureRequest, servers: dict[str, Launcher], tmp_path: Path) -> Iterator[Lives]:
    loop = request.param
    if loop not in servers:
        servers[loop] = Launcher(f"tests.ranks.stop_{loop}")
    made = Lives(servers[loop], loop, tmp_path)
    yield made
    made.kill()


@pytest.fixture
def account(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Account:
    return lives.reference(tmp_path_factory.mktemp("reference"))


def ended(lives: Lives, **changes: Any) -> Traces:
    """A life that ends by itself, and leaves no process."""
    # What counts its batches is hidden state, and has counted the one that fails.
    life = lives.start(pace=0.0, records=True, options={"hidden": "off"}, **changes)
    life.reach(1)
    processes = [*lives.pids, *writers_of(lives.pids)]
    assert all(lives.join()), life.log()
    assert gone(processes), life.log()
    return life


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        ("rank 0 raises", 7.0),
        *(pytest.param(one, 0.0, marks=pytest.mark.slow) for one in ENDS),
    ],
)
def test_a_step_that_fails_loses_nothing(
    how: str, seconds: float, lives: Lives, account: Account, tmp_path: Path
) -> None:
    """Each rank leaves its part of the last boundary, also the one that waits in an all-reduce for one that is gone.

    It hears of that late: the interpreter of rank 0 has much to tear down, and takes so many seconds to end.
    """
    life = ended(lives, events=ENDS[how], ends_late=seconds)
    account.add(life, fails=True)
    assert account.step == BATCH - 1
    assert snapshots(tmp_path) == [(BATCH - 1, "exception")], life.log()
    last = lives.start(pace=0.0)
    assert lives.join() == [0] * SIZE, last.log()
    account.add(last, ends=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lives", "wraps_late"),
    [("plain", False), ("plain", True), pytest.param("lightning", False, marks=pytest.mark.slow)],
    indirect=["lives"],
)
def test_each_rank_goes_on_with_its_own_buffers(*, wraps_late: bool, lives: Lives, tmp_path: Path) -> None:
    """DDP would take those of rank 0 where it is new, and in its first pass but after one without gradients."""
    (tmp_path / "reference").mkdir()
    whole = Lives(lives.launcher, lives.loop, tmp_path / "reference").whole(calibrates=True)
    life = ended(lives, events={f"1/{BATCH}": "raise"}, calibrates=True)
    assert snapshots(tmp_path) == [(BATCH - 1, "exception")], life.log()
    last = lives.start(pace=0.0, calibrates=True, **{"wraps late": wraps_late})
    assert lives.join() == [0] * SIZE, last.log()
    for rank in range(SIZE):
        wanted, found = ([line for line in one.lines(rank) if line[0] == "m"] for one in (whole, last))
        assert found == wanted[BATCH - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "raise late"])
def test_without_the_part_of_one_rank_there_is_nothing_and_nothing_hangs(
    how: str, lives: Lives, tmp_path: Path
) -> None:
    """Of a rank that is killed, or whose weights are between two boundaries. The next start drops the other part."""
    for victim in range(SIZE):
        life = ended(lives, events={f"{victim}/{BATCH}": how})
        assert snapshots(tmp_path) == [], life.log()
    last = lives.start(pace=0.0)
    assert lives.join() == [0] * SIZE, last.log()
    assert snapshots(tmp_path)[0][1] == "end"
    assert list((tmp_path / "run" / "parts").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("way", WAYS)
def test_under_every_launcher(way: str, victim: int, tmp_path: Path) -> None:
    """It sends SIGTERM to the rank that is left, in the middle of its step: that one leaves its part too."""
    (tmp_path / "reference").mkdir()
    reference = Launched(way, tmp_path / "reference", 0, pace=0.0)
    assert reference.end() == 0, reference.traces.log()
    account = Account(reference.traces)
    events = {f"{victim}/{BATCH}": "raise"}
    life = Launched(way, tmp_path, 0, pace=0.05, records=True, options={"hidden": "off"}, events=events)
    life.traces.reach(1)
    ranks = [life.traces.pid(rank) for rank in range(SIZE)]
    processes = [*ranks, *writers_of(ranks)]
    assert life.end() != 0
    assert gone(processes), life.traces.log()
    account.add(life.traces, fails=True)
    assert snapshots(tmp_path) == [(BATCH - 1, "exception")], life.traces.log()
    last = Launched(way, tmp_path, 1, pace=0.0)
    assert last.end() == 0, last.traces.log()
    account.add(last.traces, ends=True)
