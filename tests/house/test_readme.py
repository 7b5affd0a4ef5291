"""The README is short, shows a picture and code at once, and its numbers are those of the benchmarks."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ckpt_engine.config import Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
WORDS, FIRST_SCREEN, STATUS_WORDS, BULLET_WORDS = 700, 25, 25, 15


def words(text: str) -> int:
    return len(text.split())


def test_the_readme_has_at_most_700_words() -> None:
    """Code and links count."""
    assert words(README) <= WORDS


def test_the_first_screen_has_a_picture_and_code() -> None:
    """The picture of the demo, the line that installs, and the change to a script, within 25 lines."""
    lines = README.splitlines()[:FIRST_SCREEN]
    (picture,) = [one for line in lines for one in re.findall(r"!\[[^]]+\]\(([^)]+)\)", line)]
    assert picture == "docs/figures/demo.svg"
    fences = [line for line in lines if line.startswith("```")]
    assert fences == ["```", "```", "```diff", "```"]
    assert any(line.startswith("pip install ") for line in lines)


def test_the_change_to_a_script_is_three_lines_of_real_code() -> None:
    """Before and after compile, and the callback takes what is given to it."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    before = [line[1:] for line in diff.splitlines() if line[0] in "- "]
    after = [line[1:] for line in diff.splitlines() if line[0] in "+ "]
    ast.parse("\n".join(before))
    calls = [one for one in ast.walk(ast.parse("\n".join(after))) if isinstance(one, ast.Call)]
    ours = [one for one in calls if isinstance(one.func, ast.Name) and one.func.id == "AdaptiveCheckpoint"]
    assert len([line for line in diff.splitlines() if line.startswith("+")]) == 3
    assert len(ours) == 1
    assert {one.arg for one in ours[0].keywords} <= set(Config.model_fields)


def test_the_bullets_and_the_status_are_short() -> None:
    """Five bullets before the status, which says alpha and what was not tested."""
    top = README[: README.index("## Why")]
    bullets = re.findall(r"^- (.*)$", top, re.MULTILINE)
    assert len(bullets) == 5
    assert [one for one in bullets if words(one) > BULLET_WORDS] == []
    (status,) = re.findall(r"^\*\*Status.*$", top, re.MULTILINE)
    assert words(status) <= STATUS_WORDS
    assert "alpha" in status and "never" in status


def measured(way: str) -> str:
    """The row of the benchmarks: what training waits is the stall and what the next step takes longer."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    row = rf"^\| {re.escape(way.removesuffix(', not synced'))} \| ([\d.]+) ms \| ([-\d.]+) ms \| ([\d.]+ s) \|"
    (stall, longer, durable) = re.findall(row, page, re.MULTILINE)[0]
    return f"| {way} | {float(stall) + float(longer):.0f} ms | {durable} |"


@pytest.mark.parametrize("way", ["ckpt-engine", "DLRover flash checkpoint", "DCP async_save, process"])
def test_the_six_numbers_are_those_of_the_benchmarks(way: str) -> None:
    """The README says them of three ways to save."""
    assert measured(way) in README


def test_the_numbers_of_the_comparison_are_those_of_the_benchmarks() -> None:
    """All rows of its first table."""
    page = (ROOT / "docs" / "comparison.md").read_text()
    rows = re.findall(r"^\| (.+?) \| \d+ ms \| [\d.]+ s \|$", page, re.MULTILINE)
    assert len(rows) >= 6
    assert [measured(way) for way in rows if measured(way) not in page] == []


def test_every_picture_of_a_page_is_a_small_svg_that_scales() -> None:
    """It has a view box, so that it fits a narrow page, and a text in its place; no font is fetched."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        (page, text, page.parent / target)
        for page in pages
        for text, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text())
    ]
    assert len(found) >= 6
    for page, text, target in found:
        assert text, f"{page.name}: {target}"
        assert target.suffix == ".svg" and target.stat().st_size < 100_000, target
        (root,) = re.findall(r"<svg [^>]*>", target.read_text())
        assert "viewBox=" in root, target
        assert "@import" not in target.read_text() and "@font-face" not in target.read_text(), target


def test_the_classifiers_are_the_pythons_that_the_page_of_versions_names() -> None:
    """Each has a row of what has run there; 3.14 has failing tests, and no classifier."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [one.rpartition(" ")[2] for one in classifiers if "Python :: 3." in one]
    page = (ROOT / "docs" / "support.md").read_text()
    (tested,) = re.findall(r"^\| Python \| [\d.]+ \| ([\d., ]+) \|", page, re.MULTILINE)
    assert named == tested.split(", ")
    rows = re.findall(r"^\| Python (3\.\d+)", page, re.MULTILINE)
    assert set(named) - {"3.11"} <= set(rows)
