"""A run that this process writes already: the newer Checkpointer takes it over at once, and the older one says so."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ClosedError, LeaseHeldError, OvertakenError
from ckpt_engine.observe.events import SnapshotFailed
from ckpt_engine.snapshot import writer_link
from ckpt_engine.snapshot.stage import Staging
from tests.support.delayed_devices import delay_copies
from tests.support.heard import Heard

WAIT_SECONDS = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would have to wait for the lease fails at once."""
    monkeypatch.setattr(writer_link, "LEASE_WAIT_SECONDS", 0.0)


@pytest.fixture(params=["process", "thread"])
def writer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cell(root: Path, failing: int | None, **options: Any) -> Checkpointer:
    """A notebook's cell: goes on from the newest snapshot to step 5, unless it fails."""
    ckpt = Checkpointer(root, **options)
    found = ckpt.load()
    step = 0 if found is None else found["step"]
    while step < 5:
        step += 1
        ckpt.save(state(step), step=step)
        assert ckpt.wait(WAIT_SECONDS)
        if step == failing:
            raise ZeroDivisionError
    return ckpt


def test_a_cell_that_failed_is_run_again(tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on where it failed, without a wait; its traceback keeps all of the first run alive."""
    with pytest.raises(ZeroDivisionError) as kept:
        cell(tmp_path, 3, writer=writer)
    with cell(tmp_path, None, writer=writer) as second:
        assert second.loaded is not None and second.loaded.info.step == 3
        assert [one.step for one in second.snapshots()][-2:] == [4, 5]
    assert "was not closed; what it has in flight becomes durable" in caplog.text
    assert "ckpt stop" not in caplog.text
    assert kept.tb is not None


def test_snapshots_in_flight_are_not_lost(tmp_path: Path, writer: str) -> None:
    """What the older one has handed to its writer, or is still copying, becomes durable before the newer one looks."""
    first = Checkpointer(tmp_path, writer=writer, keep={"last": 9})
    first.save(state(1), step=1)
    handle = first.save(state(2), step=2, lazy=lambda path: True)
    second = Checkpointer(tmp_path, writer=writer, keep={"last": 9})
    loaded = second.load()
    assert loaded is not None and loaded["step"] == 2
    assert handle.snapshot is not None
    first.save(state(3), step=3)
    with pytest.raises(OvertakenError):
        second.engine.start()
    assert [one.step for one in second.snapshots()] == [1, 2, 3]
    second.close()


def test_what_is_only_in_memory_becomes_durable_too(tmp_path: Path) -> None:
    """The memory tier keeps it for a trainer that restarts; this one goes on itself."""
    tiers = ["memory", str(tmp_path)]
    first = Checkpointer(tiers=tiers)
    first.save(state(1), step=1).wait(WAIT_SECONDS)
    first.save(state(2), step=2, durable=False).wait(WAIT_SECONDS)
    with Checkpointer(tiers=tiers) as second:
        found = second.load()
        assert found is not None and found["step"] == 2
        second.save(state(3), step=3).wait(WAIT_SECONDS)


CALLS: dict[str, Callable[[Checkpointer], Any]] = {
    "save": lambda ckpt: ckpt.save(state(9), step=9),
    "load": lambda ckpt: ckpt.load(),
    "choose": lambda ckpt: ckpt.engine.choose(),
    "start": lambda ckpt: ckpt.engine.start(),
    "prepare": lambda ckpt: ckpt.prepare(state(9)),
    "track": lambda ckpt: ckpt.track(model=torch.nn.Linear(1, 1)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_checkpointer_starts_nothing(tmp_path: Path, call: Callable[[Checkpointer], Any]) -> None:
    """It says that it is closed. To look at the run, and to close it again, is no harm."""
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.save(state(1), step=1).wait(WAIT_SECONDS)
    with pytest.raises(ClosedError, match="is closed"):
        call(ckpt)
    assert ckpt.engine._pipeline._writer is None and not ckpt.engine.ready()
    ckpt.close()
    assert ckpt.wait(1) and ckpt.before_update() == 0.0
    assert [one.step for one in ckpt.snapshots()] == [1]


@pytest.mark.cells(2)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_older_of_two_says_so_at_its_next_call(tmp_path: Path, call: Callable[[Checkpointer], Any]) -> None:
    """Two on one folder by mistake: the newer one writes, and nothing that the older one does disturbs it."""
    older, newer = Checkpointer(tmp_path, writer="thread"), Checkpointer(f"file://{tmp_path}/", writer="thread")
    older.save(state(1), step=1)
    newer.save(state(2), step=2).wait(WAIT_SECONDS)
    with pytest.raises(ClosedError, match="a newer Checkpointer of this process"):
        call(older)
    older.close()
    newer.save(state(3), step=3).wait(WAIT_SECONDS)
    newer.close()
    assert [one.step for one in newer.snapshots()] == [1, 2, 3]


def test_a_reader_disturbs_no_writer(tmp_path: Path) -> None:
    """Who only loads and lists takes nothing over."""
    with Checkpointer(tmp_path, writer="thread", keep={"last": 9}) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step)
            reader = Checkpointer(tmp_path)
            found = reader.load()
            assert found is not None and found["step"] == step and len(reader.snapshots()) == step
        ckpt.save(state(4), step=4).wait(WAIT_SECONDS)


def test_other_folders_are_other_runs(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a", writer="thread") as a, Checkpointer(tmp_path / "b", writer="thread") as b:
        for step in (1, 2):
            a.save(state(step), step=step).wait(WAIT_SECONDS)
            b.save(state(step), step=step).wait(WAIT_SECONDS)


def test_a_forked_child_is_another_process(tmp_path: Path) -> None:
    """It is refused like any stranger, and the parent's snapshots go on."""
    with Checkpointer(tmp_path) as parent:
        parent.save(state(1), step=1).wait(WAIT_SECONDS)
        child = os.fork()
        if child == 0:
            try:
                Checkpointer(tmp_path, writer="thread").save(state(2), step=2)
            except LeaseHeldError:
                os._exit(7)
            except BaseException:  # noqa: BLE001 - a child of a test never returns into it
                traceback.print_exc(file=sys.stderr)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        parent.save(state(3), step=3).wait(WAIT_SECONDS)
    assert [one.step for one in parent.snapshots()] == [1, 3]


def test_an_older_one_in_use_by_another_thread_gives_way_at_its_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is closed under the hands of a thread that may be in the middle of `save`."""
    monkeypatch.setattr(writer_link, "LEASE_WAIT_SECONDS", WAIT_SECONDS)
    older, began, wanted = Checkpointer(tmp_path, writer="thread"), threading.Event(), threading.Event()
    refused: list[BaseException] = []

    def use() -> None:
        older.save(state(1), step=1)
        began.set()
        assert wanted.wait(WAIT_SECONDS)
        try:
            older.save(state(2), step=2)
        except ClosedError as err:
            refused.append(err)

    user = threading.Thread(target=use)
    user.start()
    assert began.wait(WAIT_SECONDS)
    replace = older.engine.tenure._replace
    monkeypatch.setattr(older.engine.tenure, "_replace", lambda: (replace(), wanted.set()))
    with Checkpointer(tmp_path, writer="thread") as newer:
        newer.save(state(3), step=3).wait(WAIT_SECONDS)
    user.join(WAIT_SECONDS)
    assert len(refused) == 1
    assert [one.step for one in newer.snapshots()] == [1, 3]


def test_a_close_that_was_interrupted_is_no_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the end is waited for: the same Checkpointer can be closed again, and a newer one takes over."""
    for again in (lambda one: one.close(), lambda one: None):
        first = Checkpointer(tmp_path)
        first.save(state(1), step=1)
        with monkeypatch.context() as patch:
            patch.setattr(first.engine._pipeline, "_drain", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.close()
        again(first)
        with Checkpointer(tmp_path) as second:
            second.save(state(2), step=2).wait(WAIT_SECONDS)


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["begin", "fence"])
def test_a_save_that_was_interrupted_leaves_no_torn_snapshot(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `save` or at the fence: weights change afterwards, and what is durable is one instant, or nothing."""
    live = {"a": torch.zeros(3_000_000), "b": torch.zeros(3_000_000)}
    heard = Heard()
    if where == "fence":
        delay_copies(monkeypatch)
    with Checkpointer(tmp_path, writer="thread") as ckpt:
        ckpt.engine.events = heard
        with monkeypatch.context() as patch:
            if where == "begin":
                from ckpt_engine.snapshot.copying import CopyTasks

                patch.setattr(CopyTasks, "finish", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save(live, step=1)
            else:
                patch.setattr(Staging, "fence", _interrupted)
                ckpt.save(live, step=1, lazy=lambda path: True)
                with pytest.raises(KeyboardInterrupt):
                    ckpt.before_update()
        ckpt.before_update()
        for one in live.values():
            one.fill_(1.0)
        assert ckpt.wait(WAIT_SECONDS)
        found = ckpt.load()
        assert (found is None) == (where == "begin")
        assert found is None or not (found["a"].any() or found["b"].any())
        assert not [event for event in heard.events if isinstance(event, SnapshotFailed)]
        ckpt.save(live, step=2).wait(WAIT_SECONDS)
