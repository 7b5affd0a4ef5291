"""Editing the YAML of a running job: what is taken over, what is refused, what is wrong."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.config import live, load_config
from ckpt_engine.config.live import SAFE, LiveFile, change, live_file
from ckpt_engine.config.models import Config
from tests.support.files import replace_text

PATIENCE_SECONDS = 60.0


def test_safe_options_are_taken_over_and_shown() -> None:
    """Old and new in one line; a key that is removed is the default again."""
    now = load_config("/data/run1", overhead="1%", every_seconds=60)
    made = change(now, load_config("/data/run1", overhead="2%", preemption={"grace": "2 min"}))
    assert made is not None and made.refused == ()
    assert made.text("ckpt.yaml") == (
        "ckpt.yaml: overhead: 0.01 -> 0.02, every_seconds: 60.0 -> null, preemption.grace: 30.0 -> 120.0"
    )
    assert (made.config.overhead, made.config.every_seconds, made.config.preemption.grace) == (0.02, None, 120.0)


def test_other_options_are_refused_by_name_and_stay() -> None:
    """Tiers, slots, the writer: how the run was set up. What is safe beside them is taken over."""
    now = load_config("/data/run1")
    made = change(now, load_config("/data/other", slots=3, writer="thread", every_n_steps=5))
    assert made is not None
    assert made.refused == ("tiers", "writer", "slots")
    assert made.config == load_config("/data/run1", every_n_steps=5)
    assert made.text("x").endswith("not in a running job: tiers, writer, slots; start it again for that")


def test_another_rhythm_of_the_memory_tier_is_refused_by_name() -> None:
    """It is a tier like the others, though it is kept beside them."""
    now = load_config(tiers=[{"url": "memory", "every_n_steps": 1}, "/data/run1"])
    made = change(now, load_config(tiers=[{"url": "memory", "every_n_steps": 5}, "/data/run1"]))
    assert made is not None and made.refused == ("tiers",)


def test_signals_are_refused_though_their_grace_is_safe() -> None:
    """Handlers and sources are installed once."""
    now = load_config("/data/run1", preemption={"signals": ["TERM"], "grace": 5})
    made = change(now, load_config("/data/run1", preemption={"signals": ["USR1"], "grace": 9}))
    assert made is not None and made.refused == ("preemption",)
    assert (made.config.preemption.signals, made.config.preemption.grace) == (("SIGTERM",), 9.0)


def test_the_same_options_are_no_change() -> None:
    """Another spelling of the same options is no change."""
    assert change(load_config("/data/run1", overhead="1%"), load_config("/data/run1", overhead=0.01)) is None


def test_every_safe_option_exists() -> None:
    """The list names options, or one of a section."""
    assert {name.partition(".")[0] for name in SAFE} <= set(Config.model_fields)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, LiveFile]]:
    """A file that is looked at often, with a keyword that wins over it."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    path = tmp_path / "ckpt.yaml"
    path.write_text("tiers: /data/run1\n")
    found = live_file(path, {"slots": 4})
    assert found is not None
    found.start()
    yield path, found
    found.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "ckpt-live"] == []


def taken(file: LiveFile) -> Any:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not found or found[-1] is None:
        assert time.monotonic() < deadline
        found.append(file.take())
        time.sleep(0.005)
    return found[-1]


def test_an_edit_is_noticed(edited: tuple[Path, LiveFile]) -> None:
    """A file that an editor replaces, or that is missing for a moment, is noticed too."""
    path, file = edited
    assert file.take() is None
    path.unlink()
    replace_text(path, "tiers: /data/run1\noverhead: 3%\n")
    found = taken(file)
    assert (found.overhead, found.slots) == (0.03, 4)
    assert file.take() is None


def test_a_broken_edit_is_reported_and_a_good_one_after_it_is_used(edited: tuple[Path, LiveFile]) -> None:
    """With file, line and key."""
    path, file = edited
    replace_text(path, "tiers: /data/run1\noverhed: 3%\n")
    assert "line 2: overhed: unknown key; did you mean 'overhead'?" in taken(file)
    replace_text(path, "tiers: /data/run1\noverhead: 4%\n")
    assert taken(file).overhead == 0.04


class Looks:
    """Stands for the event that ends the thread: lets it look at these moments, each of which may change the file."""

    def __init__(self, *moments: Callable[[], object]) -> None:
        self._moments = iter(moments)

    def wait(self, seconds: float) -> bool:
        moment = next(self._moments, None)
        if moment is None:
            return True
        moment()
        return False


def test_a_file_that_is_being_written_is_not_believed(tmp_path: Path) -> None:
    """Editors write piece by piece: what counts is what two looks agree on."""
    path = tmp_path / "ckpt.yaml"
    path.write_text("tiers: /data/run1\n")
    file = live_file(path, {})
    assert file is not None
    half = lambda: path.write_text("tiers: /data/run1\noverh")  # noqa: E731
    whole = lambda: path.write_text("tiers: /data/run1\noverhead: 5%\n")  # noqa: E731
    file._ending = Looks(half, whole)  # type: ignore[assignment]
    file._run()
    assert file.take() is None
    file._ending = Looks(half, whole, lambda: None)  # type: ignore[assignment]
    file._run()
    found = file.take()
    assert isinstance(found, Config) and found.overhead == 0.05


def test_an_edit_that_comes_while_another_one_is_taken_is_not_lost(tmp_path: Path) -> None:
    """An edit that is found while `take` returns the one before is returned by this call or the next one."""

    first, newest = load_config("/data/run1", overhead=0.02), load_config("/data/run1", overhead=0.03)

    class Slow(deque[Config | str]):
        meanwhile: Config | None = newest

        def pop(self) -> Config | str:  # type: ignore[override]
            found = super().pop()
            if self.meanwhile is not None:
                self.append(self.meanwhile)
                self.meanwhile = None
            return found

    path = tmp_path / "ckpt.yaml"
    path.write_text("tiers: /data/run1\n")
    file = LiveFile(path, {})
    file._found = Slow([first], maxlen=1)
    assert (file.take(), file.take(), file.take()) == (first, newest, None)


@pytest.mark.parametrize("source", [None, "/data/run1", {"tiers": "/data/run1"}, "s3://bucket/run.yaml", "gone.yaml"])
def test_only_a_yaml_file_can_be_edited(source: Any) -> None:
    """Everything else is what it was."""
    assert live_file(source, {}) is None
