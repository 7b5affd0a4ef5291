"""Results: verdicts, spreads, records and the page made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import PAGES, RESULTS
from benchmarks.page import BEGIN, END, render, write_page
from benchmarks.record import MeasuredBar, Record, read_all
from benchmarks.run import Scale
from benchmarks.values import BarResult, Check, Grid, Plot, Series, from_json, ratios, to_json

MACHINE = {
    "cpu": "A Processor",
    "cores": 2,
    "memory_gb": 8.0,
    "kernel": "Linux 6",
    "file_system": "ext4 on /dev/a",
    "huge_pages": "anonymous madvise, shared never",
}


def bar(name: str = "stall", measured: float = 1.0, when: str = "2025-01-02", others: float = 0.0) -> MeasuredBar:
    check = Check("stall / copy", "x", "at most", 1.25, (measured, measured, measured))
    result = BarResult(
        name, f"About {name}", {"state": "1 GB"}, (check,), (Series("copy", "s", (0.1, 0.3)),), ("A note.",)
    )
    shares = {"others": others, "stolen": 0.0}
    return MeasuredBar(result, f"{when}T03:04:05+00:00", Scale.FULL, shares, {"python": "3"})


@pytest.mark.parametrize(
    ("direction", "samples", "passed"),
    [
        ("at most", (1.0, 1.2, 9.0), True),
        ("at most", (1.0, 1.3, 1.3), False),
        ("at least", (1.0, 1.3, 1.4), True),
        ("at least", (9.0, 1.2, 1.0), False),
    ],
)
def test_verdict_follows_the_median(direction: str, samples: tuple[float, ...], passed: bool) -> None:
    """One lucky or unlucky sample neither passes nor fails a target."""
    assert Check("x", "x", direction, 1.25, samples).passed is passed  # type: ignore[arg-type]


def test_one_missed_target_fails_the_bar() -> None:
    """A bar passes only if all of its targets are kept."""
    good, bad = Check("a", "", "at most", 1, (1.0,)), Check("b", "", "at most", 1, (1.1,))
    assert BarResult("x", "X", {}, (good,), ()).passed
    assert not BarResult("x", "X", {}, (good, bad), ()).passed


def test_ratios_are_formed_round_by_round() -> None:
    """A machine that slows down half-way does not change the ratio."""
    assert ratios([2.0, 4.0], [1.0, 2.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_spread_is_the_quartiles() -> None:
    """An outlier does not widen the spread of enough samples; few samples are shown whole."""
    assert Series("x", "s", (1.0, 2.0, 3.0, 4.0, 100.0)).high == 4.0
    assert Series("x", "s", (1.0, 100.0)).high == 100.0


def test_results_survive_their_json_form() -> None:
    """What is read back has the same samples and the same verdict."""
    result = bar(measured=1.5).result
    assert from_json(to_json(result)) == result
    assert to_json(result)["passed"] is False


def test_record_round_trip_and_merge(tmp_path: Path) -> None:
    """A bar that is measured again replaces the old measurement and leaves the others."""
    record = Record(MACHINE, {}).with_bar(bar("persist")).with_bar(bar("stall", 1.0))
    record.write(tmp_path / "r.json")
    merged = Record.read(tmp_path / "r.json").merged(Record(MACHINE, {"stall": bar("stall", 9.0)}))
    assert list(merged.bars) == ["stall", "persist"]
    assert merged.bars["stall"].result.checks[0].measured == 9.0
    assert merged.bars["persist"] == record.bars["persist"]


def test_record_of_another_format_is_refused(tmp_path: Path) -> None:
    """A file of another format is not misread."""
    (tmp_path / "r.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        Record.read(tmp_path / "r.json")


def test_page_shows_misses_and_disturbance(tmp_path: Path) -> None:
    """A missed target and a noisy machine are said on the page, which is otherwise left alone."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, [Record(MACHINE, {}).with_bar(bar(measured=1.5, others=0.4))])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| stall | stall / copy | ≤ 1.25 x | 1.5 x | 1.5 to 1.5 (3) | MISS |" in text
    assert "40%" in text and "A note." in text


def test_page_without_markers_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten in a page that has no place for results."""
    page = tmp_path / "page.md"
    page.write_text("hand-written")
    with pytest.raises(ValueError, match="must have the lines"):
        write_page(page, [Record(MACHINE, {})])
    assert page.read_text() == "hand-written"


def test_page_has_the_newest_measurement_of_every_bar() -> None:
    """Who measures one bar again does not take the others off the page; each says where it was measured."""
    other = {**MACHINE, "cpu": "another"}
    first = Record(MACHINE, {}).with_bar(bar("persist", when="2026-01-02")).with_bar(bar("stall", 3.0, "2026-01-02"))
    second = Record(other, {}).with_bar(bar("stall", 9.0, when="2026-01-03"))
    older = Record(other, {}).with_bar(bar("stall", 5.0, when="2026-01-01"))
    for records in ([first, second, older], [older, second, first]):
        text = render(records)
        assert "| 9 x |" in text and "| 3 x |" not in text and "| 5 x |" not in text
        assert "| 2026-01-03, A |" in text and "| 2026-01-02, B |" in text
        assert "Machine A: another" in text


def test_committed_page_shows_the_newest_committed_results() -> None:
    """docs/benchmarks.md and docs/studies.md are what their generator makes of the result files."""
    records = read_all(RESULTS)
    for page, names in PAGES.items():
        assert render(records, names) in page.read_text()


def test_a_study_has_tables_and_figures_on_its_page(tmp_path: Path) -> None:
    """The same points give the same file; the study is on its own page and not on that of the bars."""
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}")
    grid = Grid("Table 5", ("interval", "published"), (("14", "5 %"),))
    plot = Plot("Progress", "hours", "epochs", {"ours": ((0.0, 0.0), (1.0, 2.0))})
    study = replace(bar("study-rojas"), result=replace(bar("study-rojas").result, grids=(grid,), plots=(plot,)))
    assert from_json(to_json(study.result)) == study.result
    record = Record(MACHINE, {}).with_bar(bar()).with_bar(study)
    write_page(page, [record], ("study-rojas",))
    text = page.read_text()
    assert "**Table 5**" in text and "| 14 | 5 % |" in text and "stall |" not in text
    (figure,) = (tmp_path / "figures").iterdir()
    assert f"![Progress](figures/{figure.name})" in text
    first = figure.read_bytes()
    write_page(page, [record], ("study-rojas",))
    assert figure.read_bytes() == first
    assert "study" not in render([record])
