"""How much an object remembers: what is counted today is the limit, and only goes down."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.attributes import attributes_of
from tests.house.source import tree_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("accelerate_ckpt", "ckpt_engine", "lightning_ckpt")
FILES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path.parent.name != "config"
]
FOUND = attributes_of(map(tree_of, FILES))
MOST_FLAGS, MOST_NAMES = 3, 15
FLAGS = {"Tenure": 4}
"""Classes with more attributes that are true or false."""
NAMES = {
    "SharedCadence": 20,
    "PrimaryTier": 16,
    "FitRun": 18,
    "Training": 20,
    "FitResume": 18,
    "SimulatedJob": 20,
    "_Drawer": 19,
}
"""Classes with more attributes in all."""
LIFE = {"ckpt_engine/loop": 16, "ckpt_engine/writer": 24}
"""Attributes that are true or false in the life of a loop, and in that of the writer and its tiers."""


def test_no_class_has_more_flags() -> None:
    """A life of many states is one enum (as in loop/phases), and what follows from another attribute is a question."""
    counted = {name: len(one.flags) for name, one in FOUND.items()}
    assert {name: count for name, count in counted.items() if count > FLAGS.get(name, MOST_FLAGS)} == {}


def test_no_class_has_more_attributes() -> None:
    """An object that remembers much is several objects."""
    counted = {name: len(one.names) for name, one in FOUND.items()}
    assert {name: count for name, count in counted.items() if count > NAMES.get(name, MOST_NAMES)} == {}


@pytest.mark.parametrize("folder", LIFE)
def test_the_lives_have_no_more_flags(folder: str) -> None:
    found = attributes_of([tree_of(path) for path in FILES if path.is_relative_to(ROOT / folder)], inherited=False)
    assert sum(len(one.flags) for one in found.values()) <= LIFE[folder]


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("self.a = False", "a"),
        ("self.a = self.b = not x", "a b"),
        ("self.a, self.b = 1, isinstance(x, int)", "b"),
        ("self.a = x > 1 and bool(y)", "a"),
        ("self.a = x or None", ""),
        ("self.a = given", "a"),
        ("self.a: bool = x", "a"),
    ],
)
def test_what_is_true_or_false_is_seen(line: str, flags: str) -> None:
    """Constants, comparisons, questions, and what an annotation says."""
    tree = ast.parse(f"class One:\n    def __init__(self, given: bool, x: int) -> None:\n        {line}\n")
    assert attributes_of([tree])["One"].flags == set(flags.split())
