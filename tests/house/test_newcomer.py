"""Twenty questions of a newcomer: each has a page of the navigation, two clicks away, that a search finds, too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
FIRST = 5
"""Results of a search that a reader sees without scrolling."""
QUESTIONS = [
    ("memory 7 B", "sizing.md", "How much memory and disk it takes"),
    ("disk full", "sizing.md", "When there is less"),
    ("MinIO", "cloud-storage.md", "MinIO, R2, Ceph and other S3 servers"),
    ("IAM policy", "cloud-storage.md", "A minimal IAM policy"),
    ("S3 credentials", "cloud-storage.md", "Credentials"),
    ("Slurm several nodes", "slurm.md", "Slurm on several nodes"),
    ("Kubernetes", "kubernetes.md", "One pod"),
    ("JobSet several pods", "kubernetes.md", "Several pods"),
    ("Ray Tune", "ray.md", "Ray Tune"),
    ("LoRA", "fine-tuning.md", "LoRA and fine-tuning"),
    ("Optuna", "hyperparameter-search.md", "Optuna"),
    ("another machine", "another-machine.md", "Move to another machine"),
    ("Colab Google Drive", "notebook-services.md", "Colab with Google Drive"),
    ("Kaggle", "notebook-services.md", "Kaggle"),
    ("SageMaker", "managed-clouds.md", "SageMaker"),
    ("SkyPilot", "managed-clouds.md", "SkyPilot"),
    ("resume not exact", "not-exact.md", "Why is my resume not exact?"),
    ("choose interval", "interval.md", "Choose an interval"),
    ("clean up old runs", "clean-up.md", "Clean up old runs"),
    ("ModelCheckpoint migrate", "migrate.md", "From ModelCheckpoint"),
]


def pages_of(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for one in entry:
            yield from pages_of(one)
    else:
        for one in entry.values():
            yield from pages_of(one)


NAVIGATION = yaml.safe_load((DOCS / ".nav.yml").read_text())["nav"]
TABS = [list(pages_of(one)) for one in NAVIGATION]


def sections() -> dict[tuple[str, str], str]:
    """The text below each heading, by page and heading, as the search of the site has them."""
    found = {}
    for page in (one for tab in TABS for one in tab if one.endswith(".md")):
        parts = re.split(r"^#+ (.*)$", (DOCS / page).read_text(), flags=re.MULTILINE)
        found |= {(page, heading): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}
    return found


def stems(text: str) -> list[str]:
    return [re.sub(r"(s|ing|e)$", "", word) for word in re.findall(r"[a-z0-9]+", text.lower())]


def ranked(query: str) -> list[tuple[str, str]]:
    """Sections that have a word of the query: rare words count more, and so does a heading or a title."""
    texts = {place: Counter(stems(text)) for place, text in sections().items()}
    heads = {place: Counter(stems(f"{place[1]} {place[0]}")) for place in texts}
    scores: Counter[tuple[str, str]] = Counter()
    for word in stems(query):
        having = [place for place in texts if word in texts[place] or word in heads[place]]
        for place in having:
            times = texts[place][word] / (texts[place][word] + 1.2 + sum(texts[place].values()) / 200)
            scores[place] += log(1 + len(texts) / len(having)) * (times + 3 * (word in heads[place]))
    return [place for place, _ in scores.most_common()]


@pytest.mark.cells(5)
@pytest.mark.parametrize(("query", "page", "heading"), QUESTIONS, ids=[one[0] for one in QUESTIONS])
def test_a_newcomer_finds_the_answer(query: str, page: str, heading: str) -> None:
    """One click opens a tab, the second one a page of it; the search has the page among its first results."""
    assert sum(page in tab for tab in TABS) == 1
    assert (page, heading) in sections()
    assert page in [found for found, _ in ranked(query)[:FIRST]]


def test_the_site_shows_every_page_of_a_tab_at_once() -> None:
    """Sections of a tab are open, so that no third click is needed, and at most two levels deep."""
    configuration = (DOCS.parent / "mkdocs.yml").read_text()
    assert "navigation.tabs" in configuration and "navigation.sections" in configuration
    for tab in NAVIGATION:
        for group in (one for one in next(iter(tab.values())) if isinstance(one, dict)):
            assert all(isinstance(page, str) for page in next(iter(group.values())))


def test_there_are_twenty_questions() -> None:
    """None twice."""
    assert len({one[0] for one in QUESTIONS}) == 20
