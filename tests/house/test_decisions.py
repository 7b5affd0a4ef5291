"""Decision records have one form, and their index lists each of them once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
SECTIONS = ("Context", "Options", "Decision", "Measured", "Consequences")


def problems_of(name: str, text: str) -> list[str]:
    """What is wrong with the headings of a record."""
    title, *_ = text.splitlines()
    found = re.findall(r"^## (.*)$", text, re.MULTILINE)
    problems = [] if re.fullmatch(rf"# {name[:4]}\. \S.*[^.]", title) else [f"{name}: the title is {title!r}"]
    if found != [one for one in SECTIONS if one in found] or not {"Context", "Decision"} <= set(found):
        problems.append(f"{name}: the sections are {found}")
    return problems


def test_every_record_has_the_same_headings() -> None:
    """Its number and title, then the sections in their order; `Context` and `Decision` are never missing."""
    assert len(RECORDS) > 50, "the search finds nothing"
    assert [one for path in RECORDS for one in problems_of(path.name, path.read_text())] == []


def test_the_index_lists_each_record_once() -> None:
    """In some area, with its number and its title."""
    listed = re.findall(r"^- \[(\d{4})\]\((\S+)\) (.*)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    titles = [(path.name[:4], path.name, path.read_text().splitlines()[0][8:]) for path in RECORDS]
    assert sorted(listed) == titles


@pytest.mark.parametrize(
    "text",
    [
        "# A title without a number\n\n## Context\n\n## Decision\n",
        "# 0001: A colon\n\n## Context\n\n## Decision\n",
        "# 0002. Another number\n\n## Context\n\n## Decision\n",
        "# 0001. Another order\n\n## Decision\n\n## Context\n",
        "# 0001. Sections of its own\n\n## Context\n\n## Decision\n\n## Open\n",
        "# 0001. A section twice\n\n## Context\n\n## Context\n\n## Decision\n",
        "# 0001. No decision\n\n## Context\n\n## Measured\n",
    ],
)
def test_the_check_finds_other_headings(text: str) -> None:
    """One that lacks something or has more."""
    assert len(problems_of("0001-some-title.md", text)) == 1
