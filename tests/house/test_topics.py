"""One topic a file: the files that have several are listed, and the lists may only become shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.source import tree_of
from tests.house.topics import constant_blocks, lists_topics, summary

ROOT = Path(__file__).parents[2]
PACKAGES = ("accelerate_ckpt", "ckpt_engine", "lightning_ckpt")
MODULES = {path.relative_to(ROOT).as_posix(): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
MOST_BLOCKS = 1

GLUED: dict[str, str] = {}
"""Files with two blocks of constants or more between definitions."""

LISTS = {
    "accelerate_ckpt": "private_trainer transformers_state",
    "ckpt_engine": "engine",
    "ckpt_engine/audit": "audit roots values",
    "ckpt_engine/cli": "__init__ cp doctor explain ls main output prune show verify verify_resume",
    "ckpt_engine/config": "__init__ live load_config models rehearsal sections",
    "ckpt_engine/data": "changed_loader epoch_start exactness iteration position private_names rng sampling streams",
    "ckpt_engine/interop": "__init__ dcp_reader formats state_parts trainer_folders",
    "ckpt_engine/loop": (
        "__init__ boundary components distributed_models diverging feed live_model loops resume shape "
        "taking_over tracker"
    ),
    "ckpt_engine/preempt": "__init__ divergence stop_plan stop_requests watch",
    "ckpt_engine/probe": "recorder repeated_steps sample",
    "ckpt_engine/ranks": "__init__ boxes process_group session world",
    "ckpt_engine/snapshot": "__init__ arena arguments ownership pipeline save_request writer_link",
    "ckpt_engine/state": "__init__ entries flatten json_types layout optimizers rebuild sharding",
    "lightning_ckpt": "__init__ callback compat_data fit_resume loaders loggers restart run sharded",
}
"""Files whose docstring begins with a list."""


def paths_of(table: dict[str, str]) -> set[str]:
    return {f"{folder}/{name}.py" for folder, names in table.items() for name in names.split()}


def new_ones(found: Iterable[str], known: dict[str, str]) -> list[str]:
    return sorted(set(found) - paths_of(known))


def test_no_other_file_has_constants_between_its_definitions() -> None:
    """Constants stand at the top of a file; a second block further down begins a second topic."""
    assert (
        new_ones((name for name, path in MODULES.items() if constant_blocks(tree_of(path)) > MOST_BLOCKS), GLUED) == []
    )


def test_no_other_docstring_begins_with_a_list() -> None:
    """The first paragraph is one sentence with one subject."""
    assert new_ones((name for name, path in MODULES.items() if lists_topics(summary(tree_of(path)))), LISTS) == []


@pytest.mark.parametrize("table", [GLUED, LISTS])
def test_the_lists_name_files_that_exist(table: dict[str, str]) -> None:
    """A file that was split or renamed leaves the list."""
    assert sorted(paths_of(table) - set(MODULES)) == []


@pytest.mark.parametrize(
    ("source", "blocks"),
    [
        ("A = 1\ndef f(): ...\nclass C: ...\n", 0),
        ("def f(): ...\nA = 1\nB: int = 2\n", 0),
        ("def f(): ...\nA = 1\nB: int = 2\ndef g(): ...\n", 1),
        ("def f(): ...\nA = 1\ndef g(): ...\nlog = f()\n'''Its log.'''\nclass C: ...\n", 2),
        ("class C:\n    A = 1\n    def f(self): ...\n    B = 2\n    def g(self): ...\n", 0),
    ],
)
def test_blocks_between_definitions_are_counted(source: str, blocks: int) -> None:
    """Those at the top, at the end and in a class are no sign of a second topic."""
    assert constant_blocks(ast.parse(source)) == blocks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Reads the arrays of one snapshot.", False),
        ("Reads the arrays of one snapshot, verified: each is compared with its digest.", False),
        ("Reads the arrays of one snapshot (docs/format.md).", False),
        ("Reads the arrays of one snapshot. No torch.", True),
        ("Reads the arrays of one snapshot; writes them too.", True),
        ("Names, options and retries of object stores.", True),
        ("Reads a snapshot, and writes it.", True),
        ("What object stores share: names, options, retries.", True),
    ],
)
def test_a_list_of_topics_is_found(text: str, *, expected: bool) -> None:
    """A second sentence, a semicolon, and things in a row with commas."""
    assert lists_topics(text) == expected


def test_only_the_first_paragraph_is_the_summary() -> None:
    """What follows it may have as many sentences as it needs."""
    tree = ast.parse('"""Reads the arrays\nof one snapshot.\n\nFast; safe, and small."""\n')
    assert summary(tree) == "Reads the arrays of one snapshot."
