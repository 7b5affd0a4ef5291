"""A process that is killed while it makes parity, or mends with it, loses nothing, and the next one ends its work."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main
from tests.parity.places import PARTS, WAIT_SECONDS, ParityPlace, state, train
from tests.snapshot.passage import same

KILLS = 10
"""For each of the ways to be killed."""
MORTAL_RUN = """
import sys
from tests.cli.mortal import die_at
from tests.parity.places import PARTS, train
die_at(int(sys.argv[1]))
train([{"url": sys.argv[2], "parity": PARTS}], 1)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def killed(*command: str) -> bool:
    """Whether the process was killed, and did not end before."""
    done = subprocess.run([sys.executable, *command], capture_output=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr.decode()
    return done.returncode == -signal.SIGKILL


def sweep(run: Callable[[int], bool], check: Callable[[], None]) -> int:
    """Kill before so many calls to the disk, evenly over the whole life, and check what is left each time."""
    first, last = 0, 1
    while run(last):
        check()
        first, last = last, last * 2
    most = last
    while most - first > 4:  # the number of calls, about
        middle = (first + most) // 2
        first, most = (middle, most) if run(middle) else (first, middle)
        check()
    for number in range(KILLS):
        assert run(max(1, first * (number + 1) // (KILLS + 1)))
        check()
    return first


def ckpt(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def place(tmp_path: Path) -> ParityPlace:
    train([{"url": str(tmp_path / "run"), "parity": PARTS}])
    return ParityPlace(str(tmp_path / "run"))


def loaded(root: Path) -> Any:
    with Checkpointer(str(root), writer="thread") as run:
        return run.load()


def test_a_copy_that_is_killed_is_ended_by_the_next_one(place: ParityPlace, tmp_path: Path) -> None:
    """It makes data, manifests and then parity; what is there can be read each time."""
    copy = tmp_path / "copy"

    def run(call: int) -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        return killed("-m", "tests.cli.mortal", str(call), "cp", str(tmp_path / "run"), str(copy))

    def check() -> None:
        assert place.objects() == place.was
        if list((copy / "snapshots").glob("*.json")):
            assert loaded(copy) is not None
        assert ckpt("cp", tmp_path / "run", copy) == 0
        assert ParityPlace(str(copy)).was == place.was

    assert sweep(run, check) > KILLS


def test_a_repair_that_is_killed_is_ended_by_the_next_one(place: ParityPlace, tmp_path: Path) -> None:
    """Each file is as it was hurt, or whole."""
    for number, file in enumerate(place.parities):
        place.hurt(file, 2, random.Random(number))
    shutil.copytree(tmp_path / "run", tmp_path / "hurt")
    hurt = place.objects()

    def run(call: int) -> bool:
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "hurt", tmp_path / "run")
        return killed("-m", "tests.cli.mortal", str(call), "repair", str(tmp_path / "run"))

    def check() -> None:
        there = place.objects()
        assert all(there[name] in (hurt[name], place.was[name]) for name in place.was)
        assert same(loaded(tmp_path / "run"), state(3))
        assert ckpt("repair", tmp_path / "run") == 0
        assert place.objects() == place.was

    assert sweep(run, check) > KILLS


def test_a_run_that_is_killed_leaves_what_the_next_one_makes_up_for(tmp_path: Path) -> None:
    """Its snapshot is there, or not; the next start makes the parity that is missing."""
    root = tmp_path / "run"

    def run(call: int) -> bool:
        shutil.rmtree(root, ignore_errors=True)
        return killed("-c", MORTAL_RUN, str(call), str(root))

    def check() -> None:
        found = loaded(root) if list((root / "snapshots").glob("*[0-9a-f].json")) else None
        assert found is None or same(found, state(1))
        options = {"tiers": [{"url": str(root), "parity": PARTS}], "writer": "thread", "wait_at_end": WAIT_SECONDS}
        with Checkpointer(options) as again:
            again.load()
            again.engine.start()
            if found is None:
                assert again.save(state(1), step=1).wait(WAIT_SECONDS)
        there = ParityPlace(str(root))
        assert len(there.parities) >= 1 and ckpt("verify", root) == 0
        for number, file in enumerate(there.parities):
            there.hurt(file, 2, random.Random(number))
        assert same(loaded(root), state(1))

    assert sweep(run, check) > KILLS
