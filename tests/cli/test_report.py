"""`ckpt report`: one page for a browser, without any other file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import CLOSED, FAILED
from ckpt_engine.observe.resume_report import FILE_NAME, NotRestored, ResumeReport
from ckpt_engine.store.manifest import Line
from ckpt_engine.writer.attempts import Attempt
from tests.cli.conftest import CREATED, RunFolder
from tests.cli.test_goodput import record
from tests.house import test_site as site

Ckpt = Callable[..., Any]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OFTEN = ((20.0, 50, "every 50 steps: the overhead budget"),)
ARRAYS: dict[str, Any] = {"model/w": np.zeros((4, 4), "float32"), "optimizer/m": np.zeros(2, "float32")}


@pytest.fixture
def killed(run_folder: RunFolder) -> Path:
    """A run of two processes: snapshots at steps 100 and 200, a failure at 230, and on from 200 to 400."""
    first, second = Line("a" * 32), Line("b" * 32)
    run_folder.add(100, ARRAYS, created=CREATED + 60.0, line=first)
    last = run_folder.add(200, ARRAYS, created=CREATED + 120.0, line=first, reason="validation")
    run_folder.add(300, ARRAYS, created=CREATED + 260.0, line=second, parent=last)
    run_folder.add(400, ARRAYS, created=CREATED + 320.0, line=second, parent=last)
    record(
        run_folder.path,
        Attempt(
            "node1", "a", CREATED, 140.0, FAILED, step=230, times={"training": 130.0, "stall": 5.0}, intervals=OFTEN
        ),
        Attempt("node2", "b", CREATED + 200.0, 130.0, CLOSED, step=400, times={"training": 110.0, "replay": 15.0}),
    )
    return run_folder.path


def test_what_each_failure_has_cost(ckpt: Ckpt, killed: Path) -> None:
    """The report says at which step a process went on, and how many steps the one before had done beyond it."""
    report = ckpt("report", killed, "--json").json
    one, two = report["lives"]
    assert (one["step"], one["resumed"], one["lost_steps"], one["failed"]) == (230, None, 30, True)
    assert (two["step"], two["resumed"], two["lost_steps"], two["failed"]) == (400, 200, None, False)
    assert one["seconds"]["down"] == 60.0
    spent = {name: one["seconds"][name] + two["seconds"][name] for name in report["seconds"]}
    assert spent == pytest.approx(report["seconds"])
    assert [each["gap"] for each in report["snapshots"]] == [None, 60.0, None, 60.0]
    assert report["components"] == {"model": 64, "optimizer": 8}
    assert report["verified"] is None


def test_the_page_is_one_file(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """No script, no network, and everything that the numbers say."""
    page = tmp_path / "page.html"
    done = ckpt("report", killed, "--html", page)
    assert (done.code, done.out.split(":")[0].split(" (")[0]) == (0, str(page))
    text = page.read_text()
    assert re.findall(r"""(?:src|href)="(?!data:)|<script|@import|url\(""", text) == []
    assert text.count("<circle") == 4
    assert text.count('class="kill"') == 1
    assert "30 steps done again" in text
    assert "60 s after the one before" in text
    assert re.search(r"50 steps</td><td>the overhead budget<", text)


def test_where_a_process_began_is_not_drawn_as_zero(ckpt: Ckpt, run_folder: RunFolder, tmp_path: Path) -> None:
    """Retention has removed what it left, so nothing says which step it went on from."""
    run_folder.add(200, ARRAYS, created=CREATED + 120.0, line=Line("a" * 32))
    record(
        run_folder.path,
        Attempt("node1", "a", CREATED, 140.0, FAILED, step=230),
        Attempt("node2", "b", CREATED + 200.0, 130.0, CLOSED, step=400),
    )
    page = tmp_path / "page.html"
    ckpt("report", run_folder.path, "--html", page)
    one, two = ([point.split(",")[1] for point in line.split()] for line in _lines(page))
    assert one[0] not in two, "at the height of step 0"
    assert len(two) == 1, "its end is known"


def _lines(page: Path) -> list[str]:
    return re.findall(r'<polyline[^>]* points="([^"]*)"', page.read_text())


def test_what_a_store_says_is_text(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """Names of machines and of parts of a state come from the store: the page runs none of them."""
    evil = "<script>alert(1)</script>"
    record(killed, Attempt(evil, "a", CREATED, 140.0, FAILED, step=230))
    report = ResumeReport("x", "s", 1, not_restored=(NotRestored(evil, '"><img src=x onerror=alert(1)>'),))
    (killed / FILE_NAME).write_text(json.dumps(report.to_json()))
    ckpt("report", killed, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_damage_is_shown(ckpt: Ckpt, killed: Path, run_folder: RunFolder, tmp_path: Path) -> None:
    """Of a listing at once, of bytes with `--verify`; a damaged record of attempts hides nothing else."""
    assert ckpt("report", killed, "--verify", "--json").json["verified"] is True
    snapshot = run_folder.repository.ids()[-1].id
    run_folder.flip(snapshot, "model/w")
    (killed / "attempts.json").write_text("{}")
    report = ckpt("report", killed, "--verify", "--json").json
    assert report["verified"] is False
    assert any(snapshot in one and "CKPT401" in one for one in report["problems"])
    assert any("attempts.json" in one for one in report["problems"])
    assert len(report["snapshots"]) == 4
    ckpt("report", killed, "--verify", "--html", tmp_path / "page.html")
    assert "damaged" in (tmp_path / "page.html").read_text()


def test_a_file_is_not_replaced_by_accident(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """An existing file is replaced only with `--force`."""
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused = ckpt("report", killed, "--html", page)
    assert refused.code == 2
    assert "--force" in refused.err
    assert page.read_text() == "mine"
    assert ckpt("report", killed, "--html", page, "--force").code == 0
    assert ckpt("report", killed, "--html", page).code == 0, "our page is written again"


def test_a_run_that_has_nothing_yet(ckpt: Ckpt, run_folder: RunFolder, tmp_path: Path) -> None:
    """There is a page all the same; without a run there is none."""
    assert ckpt("report", run_folder.path, "--html", tmp_path / "page.html").code == 0
    assert "There is no snapshot yet" in (tmp_path / "page.html").read_text()
    none = ckpt("report", tmp_path / "nowhere", "--html", tmp_path / "other.html")
    assert none.code == 2
    assert not (tmp_path / "other.html").exists()


def test_a_long_run_makes_a_small_page(ckpt: Ckpt, run_folder: RunFolder, tmp_path: Path) -> None:
    """Snapshots that would lie on one pixel are one mark: a page does not grow with the run."""
    from ckpt_engine.tools.report_page import page
    from ckpt_engine.tools.run_report import Life, RunReport, SnapshotMark

    snapshots = tuple(SnapshotMark(f"{n}", n, CREATED + 60.0 * n, "interval", 1, (1,), 60.0) for n in range(10_000))
    life = Life("node", CREATED, 600_000.0, "", False, 10_000, None, None, {})
    text = page(RunReport("x", CREATED, (), (), snapshots, {}, (life,), None, None, (), None))
    assert len(text) < 5_000_000
    assert 500 < text.count("<circle") < 5_000


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_every_plot(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """From disk, without an error on its console; marks, the failure and bars have their colours on the screen."""
    from matplotlib import image

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    ckpt("report", killed, "--html", page)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    done = subprocess.run(
        [*command, "--window-size=1100,2000", f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    seen = np.round(image.imread(picture)[:, :, :3] * 255).astype(int)
    for name, colour in {"marks": "0072b2", "failure": "d1242f", "work": "009e73", "work done again": "b2182b"}.items():
        wanted = [int(colour[at : at + 2], 16) for at in (0, 2, 4)]
        assert (np.abs(seen - wanted).max(axis=2) <= 2).sum() > 20, name


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_of_the_page_is_cut(ckpt: Ckpt, killed: Path, tmp_path: Path, width: int) -> None:
    """Also on the screen of a phone, with a long name of a machine and long reasons."""
    if site.BROWSER is None:
        pytest.skip("no Chromium is installed")
    why = (
        "resume not exact: step 12 repeats otherwise, first seen in the weights of a.layer.with.a.long.name, by 1.2e-03"
    )
    record(
        killed,
        Attempt("a-machine-with-a-long-name.cluster.example.org", "a", CREATED, 140.0, FAILED, step=230),
        Attempt("b", "b", CREATED + 200.0, 130.0, CLOSED, step=400, resumed_at=200, proof=why),
    )
    ckpt("report", killed, "--html", tmp_path / "page.html")
    assert site.problems(tmp_path, ["page.html"], width) == []


def test_a_metric_is_a_curve(ckpt: Ckpt, run_folder: RunFolder, tmp_path: Path) -> None:
    """Of the snapshots that have it as a number; that of `keep.best` is marked."""
    for step, value in ((100, 0.5), (200, 0.2), (300, 0.4), (400, float("nan"))):
        run_folder.add(step, ARRAYS, created=CREATED + step, metrics={"acc": 0.9, "loss": value})
    run_folder.add(500, ARRAYS, created=CREATED + 500)
    options = tmp_path / "ckpt.yaml"
    options.write_text(f"tiers: [{run_folder.path}]\nkeep: {{best: {{monitor: loss, mode: min}}}}\n")
    assert ckpt("report", options, "--json").json["best"] == ["loss", "min"]
    ckpt("report", options, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<h2>loss</h2>" in text and "the best one, as keep.best has it" in text
    curve = text.split("<h2>loss</h2>")[1].split("</svg>")[0]
    assert len(_lines(tmp_path / "page.html")[-1].split()) == curve.count("<circle") == 3
    assert re.findall(r'class="best"[^>]*><title>step (\d+)', curve) == ["200"]
    assert ">0.3<" in curve, "ticks of small numbers"


def test_an_older_record_is_read(ckpt: Ckpt, killed: Path, tmp_path: Path) -> None:
    """It has no steps of resumes, no proof and no budget: the snapshots say what they can."""
    lives = ckpt("report", killed, "--json").json["lives"]
    assert [(one["resumed"], one["proof"], one["lost_steps"]) for one in lives] == [(None, "", 30), (200, "", None)]
    ckpt("report", killed, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "not known: nothing is recorded of it" in text and "overhead of snapshots" not in text


def test_where_a_run_begins_is_shown(ckpt: Ckpt, tmp_path: Path) -> None:
    """The snapshot of another run that it was forked from, and each resume that changed something, once."""
    with Checkpointer(tmp_path / "base", writer="thread") as checkpointer:
        checkpointer.save({"rate": 0.1}, step=5).wait(60)
    section = {"from": f"{tmp_path / 'base'}#5", "override": {"rate": 0.2}}
    for resume, step in ((section, 6), (section, 7), ({"override": {"rate": 0.3}}, 8)):
        with Checkpointer(tmp_path / "run", writer="thread", resume=resume, keep={"last": 9}) as checkpointer:
            checkpointer.save(checkpointer.load(), step=step).wait(60)
    report = ckpt("report", tmp_path / "run", "--json").json
    assert (report["fork"]["step"], report["fork"]["url"]) == (5, f"file://{tmp_path / 'base'}")
    assert [one["step"] for one in report["changed"]] == [6, 8]
    assert ckpt("report", tmp_path / "run", "--html", tmp_path / "page.html").code == 0
    text = tmp_path.joinpath("page.html").read_text()
    assert re.search(r"Forked from \S+base#5", text)
    assert len(re.findall(r"resumed with changes", text)) == 1
    assert re.search(r"resumed with changes: <b>step 6</b>.*<b>step 8</b>", text)
    plain = ckpt("report", tmp_path / "base", "--json").json
    assert (plain["fork"], plain["changed"]) == (None, [])
