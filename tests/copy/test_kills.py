"""Writers that share data, `ckpt compact` and `ckpt prune` are killed at random points: nothing is lost or wrong."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import prune
from ckpt_engine.restore.load import load
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepAll
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from tests.copy.victim import state
from tests.snapshot.passage import same

SECONDS = 120.0
"""For anything to happen at all."""


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def _live(root: Path, writer: str, draw: random.Random) -> int:
    """Run until some snapshots are durable, and a little longer; the newest step that was said to be durable."""
    wanted = draw.randrange(1, 9)
    with _running("-m", "tests.copy.victim", str(root), writer) as process:
        assert process.stdout is not None
        lines = []
        deadline = time.monotonic() + SECONDS
        while len(lines) < wanted:
            ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
            assert ready, "no snapshot became durable"
            line = process.stdout.readline()
            assert line.strip().isdigit(), line + process.stdout.read()
            lines.append(line)
        select.select([], [], [], draw.random() * 0.2)  # the point of the kill is by chance
        # With a writer of its own the group has two processes: it lives on, or it dies as well.
        if draw.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        return int([*lines, *process.stdout.read().split()][-1])


def _verb(verb: str, root: Path, draw: random.Random) -> None:
    with _running("-m", "tests.copy.verb", verb, str(root)) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        assert ready and process.stdout.readline() == "ready\n"
        select.select([], [], [], draw.random() * 0.15)


def _check(root: Path, said: int) -> int:
    """All snapshots are what was saved, and the newest durable one is not missing; how many refer to others."""
    storage = LocalStorage(root)
    with acquire(storage, wait_seconds=SECONDS):
        repository = Repository(storage)
        listing = repository.scan()
        assert not listing.damaged
        assert listing.snapshots[-1].step >= said
        checker, sharing = Checker(repository, lambda _: None), 0
        for info in listing.snapshots:
            verdict = checker.check(info.id)
            assert verdict.ok, verdict.problems
            found = load([Repository(storage)], only=info.id)
            assert found is not None and same(found.state, state(info.step)), f"step {info.step} is not what was saved"
            sharing += bool(repository.read(info.id).bases)
        return sharing


def _clean(root: Path) -> None:
    """Nothing is left but what the snapshots need."""
    storage = LocalStorage(root)
    with acquire(storage, wait_seconds=SECONDS) as lease:
        repository = Repository(storage)
        prune(repository, lease, KeepAll())
        needed = {name for parsed in repository.ids() for name in repository.files_of(parsed.id)}
        assert {item.name for item in storage.list("data/")} == needed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_of_writers_and_verbs_leave_only_whole_snapshots(tmp_path: Path, seed: int) -> None:
    """Real kills while data is shared, chains are shortened, snapshots are compacted and pruned."""
    draw = random.Random(seed)
    root = tmp_path / "run"
    sharing = 0
    for _ in range(5):
        said = _live(root, draw.choice(["thread", "thread", "process"]), draw)
        sharing += _check(root, said)
        for verb in draw.sample(["compact", "prune"], draw.randrange(3)):
            _verb(verb, root, draw)
            sharing += _check(root, said)
    assert sharing, "nothing was shared"
    _clean(root)
