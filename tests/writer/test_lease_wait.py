"""Who starts a second trainer on a run learns at once whom it waits for, and what to do."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.errors import LeaseHeldError
from ckpt_engine.observe.events import Event, Notice, SnapshotFound
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.writer.launch import ProcessWriter, ThreadWriter, completed
from tests.writer.conftest import Writers
from tests.writer.staged import WAIT_SECONDS, Stage


@pytest.mark.parametrize("kind", [ProcessWriter, ThreadWriter], ids=["process", "thread"])
def test_a_second_writer_says_at_once_whom_it_waits_for(kind: Any, processes: Writers) -> None:
    """Process, machine, since when, how long, and how to end it; before it is refused."""
    other = os.getppid()
    processes.start(holder=replace(LeaseHolder.current(), pid=other))
    heard: list[Event] = []
    with pytest.raises(LeaseHeldError):
        kind.start(completed(WriterConfig(str(processes.root), lease_wait_seconds=0.5)), heard.append)
    (notice,) = heard
    assert isinstance(notice, Notice) and notice.level == "WARNING"
    for word in (
        f"process {other} on {socket.gethostname()} since ",
        "at most 500 ms",
        f"`ckpt stop file://{processes.root}`",
        "another folder",
    ):
        assert word in notice.message


def test_who_waits_for_a_run_whose_lease_file_it_shares_by_a_link_is_not_told_to_stop_it(
    processes: Writers, tmp_path: Path
) -> None:
    """A copy that `cp -al` has made: the other run is another one, and has nothing to do with this folder."""
    processes.start(holder=replace(LeaseHolder.current(), pid=os.getppid()))
    shutil.copytree(processes.root, tmp_path / "copy", copy_function=os.link)
    heard: list[Event] = []
    with pytest.raises(LeaseHeldError, match="hard links"):
        ThreadWriter.start(completed(WriterConfig(str(tmp_path / "copy"), lease_wait_seconds=0.3)), heard.append)
    (notice,) = heard
    assert isinstance(notice, Notice) and "hard links" in notice.message and "ckpt stop" not in notice.message


def test_another_writer_of_the_same_process_is_no_stranger(processes: Writers) -> None:
    """The message does not advise to stop the other writer: it ends by itself, and to stop it would end the trainer."""
    processes.start()
    heard: list[Event] = []
    with pytest.raises(LeaseHeldError, match="another writer of this process") as caught:
        ProcessWriter.start(completed(WriterConfig(str(processes.root), lease_wait_seconds=0.3)), heard.append)
    (notice,) = heard
    assert isinstance(notice, Notice) and notice.level == "INFO"
    assert "ckpt stop" not in notice.message and "stop" not in str(caught.value)


def test_a_writer_that_finishes_for_a_dead_trainer_is_no_alarm(processes: Writers) -> None:
    """A restart after a crash waits for the rescue, which ends by itself."""
    dead = 2**22 - 1
    first = processes.start(holder=replace(LeaseHolder.current(), pid=dead))
    heard: list[Event] = []
    with pytest.raises(LeaseHeldError):
        ProcessWriter.start(completed(WriterConfig(str(processes.root), lease_wait_seconds=0.3)), heard.append)
    (notice,) = heard
    assert isinstance(notice, Notice) and notice.level == "INFO"
    assert f"process {dead} is gone" in notice.message and "ckpt stop" not in notice.message
    assert first.alive


def test_who_need_not_wait_says_nothing(processes: Writers) -> None:
    """A writer that finds the lease free sends no event."""
    heard: list[Event] = []
    client = ProcessWriter.start(completed(WriterConfig(str(processes.root), lease_wait_seconds=60.0)), heard.append)
    assert client.close(60.0)
    assert heard == []


def test_a_writer_with_memory_tells_what_the_tier_has(processes: Writers, stage: Stage) -> None:
    """A trainer that resumed from the memory of the writer before learns which snapshot the rescue made durable."""
    heard: list[Event] = []
    first = ProcessWriter.start(completed(WriterConfig(str(processes.root), memory=True)), heard.append)
    stage.share(first)
    first.hold(stage.job(7))
    assert first.close(WAIT_SECONDS)
    assert heard == []
    config = completed(WriterConfig(str(processes.root), memory=True, lease_wait_seconds=WAIT_SECONDS))
    second = ProcessWriter.start(config, heard.append)
    assert second.close(WAIT_SECONDS)
    (found,) = [event for event in heard if isinstance(event, SnapshotFound)]
    assert (found.step, found.tier) == (7, str(processes.root))
