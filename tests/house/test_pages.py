"""Pages for users have short lines and the words of `STYLE.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FROM_CODE = {"benchmarks.md", "configuration.md", "errors.md", "files.md", "studies.md"}
"""Their lines come from results, options and docstrings."""
PAGES = [
    *(ROOT / one for one in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "changes/README.md")),
    *(one for one in sorted((ROOT / "docs").glob("*.md")) if one.name not in FROM_CODE),
]
LONGEST = 160
UNIDIOMATIC = re.compile(
    r"\b(go(es)? on|went on|going on|by (itself|themselves)|(is|are) there too|(is|are|was) away|gets? on|so long as|"
    r"of ours|tells?|hears?|heard|is said|are said)\b",
    re.IGNORECASE,
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blocks of code and output."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        if not inside and not fence:
            yield number, line
        inside ^= fence


def problems_of(name: str, text: str) -> list[str]:
    """Lines that are too long, except in tables, and those with other words."""
    problems = []
    for number, line in prose(text):
        if len(line) > LONGEST and not line.startswith("|"):
            problems.append(f"{name}:{number}: {len(line)} characters")
        if found := UNIDIOMATIC.search(re.sub(r"`[^`]*`", "", line)):
            problems.append(f"{name}:{number}: {found[0]}")
    return problems


def test_pages_have_short_lines_and_plain_words() -> None:
    """What a user reads, without code and output, which are as they are."""
    assert len(PAGES) > 20
    assert [one for page in PAGES for one in problems_of(page.name, page.read_text())] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("x" * 161, 1),
        ("x" * 160, 0),
        (f"| {'x' * 161} |", 0),
        ("The run goes on from the snapshot.", 1),
        ("A tier that is away is left out.", 1),
        ("It says `goes on` in the log.", 0),
        ("```\nthe run goes on\n```", 0),
        ("```\nthe run continues\n```\nIt does so by itself.", 1),
    ],
)
def test_the_check_finds_long_lines_and_other_words(text: str, problems: int) -> None:
    """Each outside of code."""
    assert len(problems_of("page.md", text)) == problems
