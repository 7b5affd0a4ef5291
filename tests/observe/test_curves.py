"""What a resume cuts off the files of loggers, and what it leaves alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.observe.curves import (
    Curves,
    EventFiles,
    TrackedRun,
    _is_of_this_process,
    cut_files,
    sizes,
)
from lightning_ckpt.compat_data import cut_rows, rows


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_table_keeps_so_many_rows(count: int, tmp_path: Path) -> None:
    """A line that a kill has cut in two is no row, and the header stays."""
    table = tmp_path / "metrics.csv"
    table.write_text("step,loss\n0,1\n1,2\n2,3\n3,")
    assert rows(table) == 3
    assert cut_rows(table, count) == ""
    assert rows(table) == count
    assert not count or table.read_text() == "step,loss\n" + "".join(f"{i},{i + 1}\n" for i in range(count))


def test_rows_are_counted_though_the_header_became_wider(tmp_path: Path) -> None:
    """A new column makes Lightning write the table again, in which the same rows are longer."""
    table = tmp_path / "metrics.csv"
    table.write_text("loss,step,val\n1,0,\n2,1,\n,1,9\n")
    assert cut_rows(table, 2) == ""
    assert table.read_text() == "loss,step,val\n1,0,\n2,1,\n"


def test_missing_rows_are_said(tmp_path: Path) -> None:
    """The machine lost power, say."""
    table = tmp_path / "metrics.csv"
    table.write_text("step,loss\n0,1\n")
    assert cut_rows(table, 3) == f"2 rows at the end of {table} are missing"
    assert cut_rows(tmp_path / "other.csv", 3) == f"{tmp_path / 'other.csv'} is not there any more"


def test_files_get_the_size_they_had_and_later_ones_go(tmp_path: Path) -> None:
    """Files that are not asked about stay."""
    for name in ("old", "later", "foreign"):
        (tmp_path / name).write_bytes(b"12345")
    marks = sizes(tmp_path, [tmp_path / "old"]) | {"old": 3}
    assert cut_files(tmp_path, marks, ["old", "later"]) == ""
    assert sizes(tmp_path, tmp_path.iterdir()) == {"old": 3, "foreign": 5}
    assert cut_files(tmp_path, {"old": 4}, []) == "the end of old is missing"


def test_event_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """All runs of a project may share a folder: a run knows its own files by how their names end."""
    tag = EventFiles.new_tag()
    assert EventFiles.tag_of(f".mine{tag}") == tag
    assert EventFiles.tag_of("events.out.tfevents.1.host.2.0") is None
    mine, other = tmp_path / f"events.out.tfevents.1.host.2.0{tag}", tmp_path / "events.out.tfevents.1.host.2.1"
    mine.write_bytes(b"1")
    other.write_bytes(b"1")
    files = EventFiles(tmp_path, tag)
    assert files.sizes() == {mine.name: 1}
    assert files.cut({}) == ""
    assert list(tmp_path.iterdir()) == [other]


class OneCurve:
    """A logger that notes what it is asked."""

    name, home = "Logger", "/logs"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def place(self) -> Mapping[str, Any]:
        return {"version": 3}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        self.heard.append(place)
        return ""

    def marks(self) -> Mapping[str, int]:
        return {"rows": 7}

    def cut(self, marks: Mapping[str, int]) -> str:
        self.heard.append(marks)
        return "why"


def test_a_logger_goes_on_where_its_own_run_was() -> None:
    """A copy of a run in another folder writes curves of its own."""
    notes = Curves("/run", [OneCurve()]).note()
    same, copy = OneCurve(), OneCurve()
    (problem,) = Curves("/run", [same]).go_on(notes)
    assert same.heard == [{"version": 3}, {"rows": 7}]
    assert (problem.name, problem.why) == ("the curve of Logger", "why")
    assert Curves("/copy", [copy]).go_on(notes) == []
    assert copy.heard == [None]


def test_only_event_files_of_this_process_are_its_own() -> None:
    """In containers every run has the same pid: a file that is older than the process, or of another host, stays."""
    me, now = f"{socket.gethostname()}.{os.getpid()}.0", int(time.time())
    own = [f"events.out.tfevents.{began}.{of}" for began, of in ((now, me), (1_000_000_000, me), (now, f"x{me}"))]
    assert [_is_of_this_process(name) for name in own] == [True, False, False]


class _Broken:
    name = home = "a logger"

    def place(self) -> dict[str, str]:
        return {}

    def begin(self, place: object) -> str:
        raise OSError("no room for logs")

    def marks(self) -> dict[str, int]:
        raise OSError("no room for logs")

    def cut(self, marks: object) -> str:
        raise OSError("no room for logs")


def test_a_logger_that_fails_costs_no_snapshot_and_no_resume(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and in the report of a resume."""
    curves = Curves("run", [_Broken()])
    assert (curves.note(), curves.note()) == ({}, {})
    assert caplog.text.count("no room for logs") == 1
    row = {"name": "a logger", "home": "a logger", "place": {}, "marks": {}}
    assert [one.why for one in curves.go_on({"curves": {"root": "run", "loggers": [row]}})] == ["no room for logs"] * 2


@pytest.mark.parametrize("is_local", [True, False], ids=["in a folder", "on a server"])
def test_a_run_that_is_tracked_goes_on_by_its_id(is_local: bool, tmp_path: Path) -> None:
    """Steps that come again are cut where the run is in a folder, else that is said; another run begins a curve."""
    loss = tmp_path / "train" / "loss"
    loss.parent.mkdir()
    waiting = ["1 0.5 1\n"]

    def flush() -> None:
        with loss.open("a") as file:
            file.writelines(waiting)
        waiting.clear()

    def opened(run: str) -> Curves:
        return Curves(
            "file:///run", [TrackedRun("MLflowCallback", "here 0", run, tmp_path if is_local else None, flush)]
        )

    first = opened("r1")
    assert first.go_on({}) == []
    notes = first.note()
    assert Curves.runs_of(notes, "file:///run") == {"MLflowCallback": "r1"}
    assert Curves.runs_of(notes, "file:///copy") == Curves.runs_of({}, "file:///run") == {}
    waiting.append("2 0.4 2\n")
    flush()
    (tmp_path / "late").write_text("2 1 2\n")
    problems = [(one.name, one.why) for one in opened("r1").go_on(notes)]
    if is_local:
        assert (problems, loss.read_text(), (tmp_path / "late").exists()) == ([], "1 0.5 1\n", False)
    else:
        assert problems == [("the curve of MLflowCallback", "the run continues, and shows the repeated steps twice")]
        assert loss.read_text() == "1 0.5 1\n2 0.4 2\n"
    (other,) = opened("r2").go_on(notes)
    assert other.why == "this start has opened another run"
