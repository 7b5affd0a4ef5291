"""A machine is lost and the disk is damaged: the restart mends the disk from what the memory of another machine has."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ckpt_engine.store import names
from tests.restore.peers.cluster import Cluster
from tests.restore.test_resumed_past_damage import newest, repository, rot
from tests.support import interpreters

STEPS = 3
WAIT_SECONDS = 60.0
REPLICAS, PARITY = {"url": "memory", "replicate": 1}, {"url": "memory", "parity": 3}
QUICK = (
    (REPLICAS, "now", "truncated"),
    (REPLICAS, "before", "quarantined"),
    (PARITY, "now", "quarantined"),
    (PARITY, "before", "truncated"),
)
"""Each two values of two of the three meet in one of these, which the quick suite runs: what is read back, where the
damaged bytes were written, and how the damage is known take different code. The slow suite runs the other four."""
CELLS = [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
    for cell in itertools.product((REPLICAS, PARITY), ("now", "before"), ("truncated", "quarantined"))
]


def until(condition: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def command(verb: str, root: Path) -> int:
    """Its exit code, in another process."""
    line = [sys.executable, "-m", "ckpt_engine.cli.main", verb, str(root)]
    return interpreters.run(line, capture_output=True, timeout=WAIT_SECONDS, check=False).returncode


@pytest.mark.cells(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("memory", "written", "damage"), CELLS)
def test_what_the_memory_of_another_machine_has_mends_the_disk(
    tmp_path: Path, memory: dict[str, object], damage: str, written: str
) -> None:
    """The damaged share is that of the machine that is lost, with its writer: only others have it, or its parity.

    Its file was written with the snapshot that is resumed from, or with an older one that this refers to.
    """
    root, machines = tmp_path / "run", 2 if "replicate" in memory else 3
    store, lost = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), machines - 1
    with Cluster(root, store, machines, memory, machines, durable_every=1) as cluster:
        cluster.job |= {"last": STEPS, "keep": {"last": 1}}
        assert cluster.start()[2] == "nowhere"
        cluster.nodes[0].until_idle()
        until(lambda: [parsed.step for parsed in repository(root).ids()] == [STEPS])
        cluster.kill({lost})
        there = newest(root)
        (name,) = (
            one.name
            for one in there.files
            if names.data_rank(one.name) == lost and (there.info.id in one.name) is (written == "now")
        )
        file = root / name
        was = file.read_bytes()
        if damage == "quarantined":
            pieces = (one for entry in there.entries.values() for one in entry.pieces)
            rot(root, there, next(one for one in pieces if there.files[one.file].name == name))
            assert command("scrub", root) == 1
            assert (root / names.quarantine_name(there.info.id)).exists()
        else:
            os.truncate(file, len(was) // 2)
        assert cluster.start() == ["resumed", str(STEPS), "memory"]
        # Bytes at the end of an older file that no snapshot needs any more are nowhere else.
        assert file.read_bytes() == was or (written, damage) == ("before", "truncated")
        assert not (root / names.quarantine_name(there.info.id)).exists()
        assert command("verify", root) == 0
