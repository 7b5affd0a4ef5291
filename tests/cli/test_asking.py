"""`ckpt save-now` and `ckpt stop`: what they say to a run, and what they answer where no process trains it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.writer.control import Control
from ckpt_engine.writer.messages import Reply

Ckpt = Callable[..., Any]
PATIENCE_SECONDS = 60.0
WAIT = "60 s"


class Writer:
    """Stands in for the writer of a run: notes what it is asked."""

    def __init__(self, root: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self.trainer = True
        self.then: Callable[[], object] = lambda: None
        self._timers: list[threading.Timer] = []
        self._control = Control(str(root), self._answer)
        self._control.open(PATIENCE_SECONDS)

    def _answer(self, request: dict[str, Any]) -> Reply:
        if request["what"] == "status":
            return Reply({"pid": 1, "trainer": self.trainer})
        self.asked.append(request)
        reply = Reply({"trainer": self.trainer})
        self._timers.append(threading.Timer(0.1, self.then))
        self._timers[-1].start()
        return reply

    def done(self) -> None:
        """Return when what was to happen `then` is over."""
        for timer in self._timers:
            timer.join(PATIENCE_SECONDS)

    def close(self) -> None:
        self.done()
        self._control.close(PATIENCE_SECONDS)


@pytest.fixture
def writer(run_folder: Any) -> Iterator[Writer]:
    served = Writer(run_folder.path)
    yield served
    served.close()


@pytest.mark.parametrize(("verb", "what"), [("save-now", "save"), ("stop", "stop")])
def test_a_run_is_asked(verb: str, what: str, ckpt: Ckpt, run_folder: Any, writer: Writer, tmp_path: Path) -> None:
    """The run is named by its folder or its ckpt.yaml, and learns who asked."""
    config = tmp_path / "ckpt.yaml"
    config.write_text(f"tiers: {run_folder.path}\n")
    for root in (run_folder.path, config):
        done = ckpt(verb, root)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"asked: the run at {run_folder.path} takes a snapshot at the end of its step")
        assert ckpt(verb, root, "--json").json["asked"] is True
    assert {request["what"] for request in writer.asked} == {what}
    assert all("(pid " in request["who"] for request in writer.asked)


def test_save_now_waits_for_the_new_snapshot(ckpt: Ckpt, run_folder: Any, arrays: Any, writer: Writer) -> None:
    """What was there before does not count."""
    run_folder.add(10, arrays)
    made: list[str] = []
    writer.then = lambda: made.append(run_folder.add(20, arrays))
    done = ckpt("save-now", run_folder.path, "--wait", WAIT)
    writer.done()
    assert (done.code, done.out) == (0, f"{made[0]} is durable at {run_folder.path}\n")


def test_stop_waits_for_the_end(ckpt: Ckpt, run_folder: Any, writer: Writer) -> None:
    """The writer then serves no trainer, or is gone."""
    writer.then = lambda: setattr(writer, "trainer", False)
    assert ckpt("stop", run_folder.path, "--wait", WAIT, "--json").json == {
        "root": str(run_folder.path),
        "asked": True,
        "ended": True,
    }


@pytest.mark.parametrize(("verb", "what"), [("save-now", "no new snapshot"), ("stop", "did not end")])
def test_waiting_has_an_end(verb: str, what: str, ckpt: Ckpt, run_folder: Any, writer: Writer) -> None:
    """Exit code 2, and it is said that the run was asked."""
    done = ckpt(verb, run_folder.path, "--wait", "0.3")
    assert done.code == 2
    assert "[CKPT603]" in done.err and what in done.err and "carries it out later" in done.err
    assert len(writer.asked) == 1


@pytest.mark.parametrize("verb", ["save-now", "stop"])
def test_a_run_without_a_trainer_gets_that_answer(verb: str, ckpt: Ckpt, run_folder: Any) -> None:
    """One line that says what to look at, and exit code 2."""
    done = ckpt(verb, run_folder.path)
    assert (done.code, done.out) == (2, "")
    assert f"[CKPT600] no run at {run_folder.path} is being trained on this machine" in done.err
    assert f"`ckpt status {run_folder.path}`" in done.err


def test_a_writer_that_outlived_its_trainer_cannot_save(ckpt: Ckpt, run_folder: Any, writer: Writer) -> None:
    """It finishes what it has."""
    writer.trainer = False
    done = ckpt("save-now", run_folder.path)
    assert done.code == 2
    assert "its trainer has died" in done.err


def test_a_wait_that_is_no_duration_is_refused_before_anybody_is_asked(
    ckpt: Ckpt, run_folder: Any, writer: Writer
) -> None:
    """A typing mistake must not stop a run."""
    done = ckpt("stop", run_folder.path, "--wait", "soon")
    assert done.code == 2 and "--wait: must be a duration" in done.err
    assert writer.asked == []
