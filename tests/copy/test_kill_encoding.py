"""Real `kill -9` of writers that encode, store differences and begin new chains: every snapshot is whole, always."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import psutil
import pytest

from ckpt_engine.restore.load import load
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import codecs_of
from tests.copy.training import STEPS, WIDTH, Training, digest_of
from tests.support import interpreters
from tests.support.writers import writers_of

REPOSITORY = Path(__file__).parents[2]
WAIT_SECONDS = 120.0


@cache
def truth() -> dict[int, str]:
    """What the state is after each step."""
    training, found = Training(width=WIDTH, before=0), {}
    for step in range(1, STEPS + 1):
        training.step()
        found[step] = digest_of(training.state())
    return found


class Seen:
    """What was found at the places so far."""

    def __init__(self) -> None:
        self.codecs: set[str] = set()
        self.snapshots = 0
        self.newest = 0

    def check(self, root: Path, durable: int) -> None:
        """Every snapshot is the state of its step, bit for bit; nothing acknowledged is lost."""
        newest = 0
        for name in ("near", "far"):
            place = Repository(LocalStorage(root / name))
            listing = place.scan()
            assert not listing.damaged
            for info in listing.snapshots:
                found = load([place], step=info.step)
                # A writer that dies before it says that a snapshot is durable leaves it to the next one once more.
                assert found is not None and found.info.step == info.step
                assert digest_of(found.state) == truth()[info.step], f"{info.id} at {name}"
                self.codecs |= codecs_of(place.read(info.id))
                self.snapshots += 1
                newest = max(newest, info.step)
        assert newest >= durable, "acknowledged and lost"
        self.newest = newest


def storm(root: Path, kills: int, seed: int, codec: str) -> Seen:
    """Kill the writer, and now and then the trainer as well; check the run while no process writes it."""
    chance, seen, done = random.Random(seed), Seen(), 0
    command = [sys.executable, "-m", "tests.copy.training", str(root), codec]
    while done < kills and seen.newest < STEPS - 20:
        with (
            (root / "stderr").open("w") as stderr,
            interpreters.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True) as trainer,
        ):
            assert trainer.stdout is not None
            durable = 0
            try:
                assert "resumed" in trainer.stdout.readline(), (root / "stderr").read_text()
                while done < kills:
                    for _ in range(chance.randint(1, 7)):
                        said = trainer.stdout.readline().split()
                        durable = int(said[1]) if said[:1] == ["durable"] else durable
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        trainer.wait(chance.uniform(0.0, 0.06))
                    os.kill(trainer.pid, signal.SIGSTOP)
                    killed = writers_of(trainer.pid)
                    for writer in killed:
                        writer.kill()
                    assert not psutil.wait_procs(killed, WAIT_SECONDS)[1]
                    seen.check(root, durable)
                    done += 1
                    if chance.random() < 0.2 or seen.newest > STEPS - 20:
                        break
                    os.kill(trainer.pid, signal.SIGCONT)
            finally:
                trainer.kill()
                trainer.wait(WAIT_SECONDS)
    return seen


def require(root: Path, seen: Seen, kills: int, codec: str) -> None:
    """The storm met what it was made for, and what it has left behind can be gone on from.

    Copies of raw snapshots begin a new chain with each writer, which lives for too few of them to predict a step.
    """
    assert seen.snapshots > 2 * kills
    assert {"byteplane-zstd"} | (set() if codec == "raw" else {"adam"}) <= seen.codecs
    for name in ("near", "far"):
        place = Repository(LocalStorage(root / name))
        assert all(names.data_owner(item.name) for item in place.storage.list(names.DATA))


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    """A writer that encodes for both tiers is killed a few times."""
    require(tmp_path, storm(tmp_path, 5, 1, "delta"), 1, "delta")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["raw", "delta", "byteplane-zstd"])
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills(codec: str, seed: int, tmp_path: Path) -> None:
    """A long storm, for each way in which the nearest tier may store what the further one gets."""
    require(tmp_path, storm(tmp_path, 25, seed, codec), 25, codec)


@pytest.mark.slow
def test_a_trainer_that_dies_is_resumed_from_memory_and_the_disk_has_it_encoded(tmp_path: Path) -> None:
    """With a memory tier before a tier with a codec, the arena itself is kept in memory, and the rescue encodes it."""
    command = [sys.executable, "-m", "tests.copy.training", str(tmp_path), "delta", "memory"]
    durable = 0
    for life in range(3):
        with (
            (tmp_path / "stderr").open("w") as stderr,
            interpreters.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True) as trainer,
        ):
            assert trainer.stdout is not None
            try:
                _, step, place, digest = trainer.stdout.readline().split()
                assert life == 0 or (int(step) >= durable and place == "memory" and digest == truth()[int(step)])
                wanted = 6
                while wanted:  # until the rescue has given back the run, snapshots fail
                    said = trainer.stdout.readline().split()
                    if said[0] == "durable":
                        durable, wanted = int(said[1]), wanted - 1
                writers = writers_of(trainer.pid)
            finally:
                trainer.kill()
                trainer.wait(WAIT_SECONDS)
    for writer in writers:
        with contextlib.suppress(psutil.NoSuchProcess):
            writer.kill()
    assert not psutil.wait_procs(writers, WAIT_SECONDS)[1]
    Seen().check(tmp_path, durable)
