"""Change fragments have one form, so that a release can join them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "changes"
KINDS = ("feature", "change", "fix", "removal", "doc")
MOST_CHARACTERS = 400
MOST_LINES = 60


def problems_of(name: str, text: str) -> list[str]:
    """What is wrong with a fragment."""
    problems = []
    if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+){{1,4}}\.({'|'.join(KINDS)})\.md", name):
        problems.append(f"{name}: the name is not <short-topic>.<kind>.md")
    paragraph = text.strip()
    if "\n\n" in paragraph or not re.match(r"[A-Z`]", paragraph) or not re.search(r"[.`]$", paragraph):
        problems.append(f"{name}: it is not one paragraph of whole sentences")
    if len(paragraph) > MOST_CHARACTERS:
        problems.append(f"{name}: it has more than {MOST_CHARACTERS} characters")
    if re.search(r"decision|tests/|\w+\(\)", paragraph):
        problems.append(f"{name}: it names what only contributors know")
    return problems


def test_every_fragment_has_the_form_of_the_page_beside_it() -> None:
    """Its name has a topic and a kind, and its text is one short paragraph for users."""
    files = [path for path in sorted(FOLDER.iterdir()) if path.name != "README.md"]
    assert [one for path in files for one in problems_of(path.name, path.read_text())] == []


def test_the_page_beside_them_lists_the_kinds() -> None:
    """Those that this test accepts."""
    assert tuple(re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)) == KINDS


def test_the_entry_of_a_version_stays_short() -> None:
    """A user reads it as a whole."""
    first, *entries = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert entries and first.startswith("# Changelog")
    assert [entry.splitlines()[0] for entry in entries if len(entry.splitlines()) > MOST_LINES] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.fix.md", "One word is no topic."),
        ("memory-limit.bug.md", "The kind does not exist."),
        ("Memory_Limit.fix.md", "The name has other characters."),
        ("memory-limit.fix.md", "- A list is no paragraph."),
        ("memory-limit.fix.md", "One paragraph.\n\nAnother one."),
        ("memory-limit.fix.md", "No end of the sentence"),
        ("memory-limit.fix.md", f"Too long{' and long' * 50}."),
        ("memory-limit.fix.md", "What `Repository.put()` does is for contributors."),
    ],
)
def test_the_check_finds_other_forms(name: str, text: str) -> None:
    """One thing is wrong with each."""
    assert len(problems_of(name, text)) == 1


def test_the_check_accepts_a_fragment() -> None:
    """The example of the page."""
    text = "A resume on a full disk names the tier that is full. It ended with a bare `OSError`.\n"
    assert problems_of("full-disk-message.fix.md", text) == []
