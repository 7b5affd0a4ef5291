"""`ckpt demo`: the first success, with one command and without a file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.cli import demo
from ckpt_engine.errors import CkptError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A shorter training, whose files would stay in the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_two_kills_are_one_curve_and_proved_exact(terminal: Callable[..., Any], quick: Path) -> None:
    """Three processes, resumed at the snapshots before the kills; each line fits, and nothing stays."""
    shown = terminal("demo")
    assert shown.code == 0, shown.out
    assert "process 1: steps 1 to 70, killed" in shown.lines
    assert "process 2: steps 61 to 150, killed" in shown.lines
    assert "process 3: steps 141 to 256, ended" in shown.lines
    assert shown.out.count("resume proved exact: 10 of 10 repeated steps") == 2
    assert "One loss curve of three processes: proved exact." in shown.lines
    assert max(map(len, shown.lines)) <= 80
    assert not list(quick.glob("ckpt-demo-*"))


LIVES = (
    dict.fromkeys(range(1, 21), 1.0),
    dict.fromkeys(range(21, 41), 0.5),
    dict.fromkeys(range(40, 49), 0.25),
)


def test_the_curve_has_each_process_where_it_trained() -> None:
    """A row for each few steps, with a bar that is as long as their mean loss."""
    rows = list(demo._rows(LIVES))
    assert [row[:2] for row in rows] == [("1 to 16", "1"), ("17 to 32", "1 and 2"), ("33 to 48", "2 and 3")]
    lengths = [len(row[3]) for row in rows]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 40


@pytest.mark.parametrize(("proved", "code"), [(("exact", "exact"), 0), (("exact", "different"), 1), (("exact",), 1)])
def test_it_ends_with_what_was_proved(
    ckpt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, quick: Path, proved: tuple[str, ...], code: int
) -> None:
    """A resume that was not compared is no proof."""
    lives, found = iter(LIVES), iter([*map(_Proof, proved), None])
    monkeypatch.setattr(demo, "_life", lambda *_: next(lives))
    monkeypatch.setattr(demo, "replay_of", lambda _: next(found))
    shown = ckpt("demo")
    assert shown.code == code
    assert re.search(r"One loss curve of three processes: (NOT )?proved exact\.$", shown.out.strip())
    assert ("NOT proved" in shown.out) is bool(code)


class _Proof:
    def __init__(self, result: str) -> None:
        self.result = result

    def text(self) -> str:
        return f"resume {self.result}"


@pytest.mark.parametrize("exitcode", [1, 0, -15])
def test_a_training_that_ends_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exitcode: int
) -> None:
    """Nothing is shown as proved."""

    class Ended:
        def __init__(self, **_: Any) -> None:
            self.exitcode = exitcode

        def start(self) -> None: ...

        kill = start

        def join(self, _: float) -> None: ...

    context = type("Context", (), {"Process": Ended, "set_forkserver_preload": lambda self, _: None})
    monkeypatch.setattr(demo.multiprocessing, "get_context", lambda _: context())
    with pytest.raises(CkptError, match=f"ended with {exitcode}"):
        demo._life(tmp_path, 70, 0)
