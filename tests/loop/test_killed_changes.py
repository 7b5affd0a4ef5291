"""A resume with changes whose processes are killed with SIGKILL is the change made by hand, and is made once."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.loop.change_script import RECIPES, train
from tests.loop.changes import (
    AT,
    SEED,
    End,
    Setup,
    begun_again,
    by_hand,
    rebatched,
    with_new_head,
    with_streams_of,
)
from tests.loop.changes import Trainer as Kind
from tests.loop.runs import Saved, only, report, saved
from tests.loop.test_resume_changes import TRAINERS
from tests.support.trainers import ForkServer, log, read

HANDS: Mapping[str, Callable[[Kind, Setup], End]] = {
    "weights": lambda kind, new: begun_again(kind, new, Setup(), SEED, "model"),
    "moments": lambda kind, new: begun_again(kind, new, Setup(), SEED, "model", "optimizer"),
    "head": lambda kind, new: by_hand(kind, Setup(), with_new_head(kind, new)),
    "epochs": by_hand,
    "batch": lambda kind, new: rebatched(kind, Setup(), new),
    "accumulation": lambda kind, new: by_hand(kind, Setup(), lambda mine: mine.accumulating(new.accumulate)),
    "streams": lambda kind, new: by_hand(kind, Setup(), with_streams_of(kind, new)),
}
CHANGES = {"weights", "moments", "head", "streams"}
"""Those whose report lists values that were not restored."""
QUICK = {("plain", "weights"), ("plain", "batch"), ("lightning", "head"), ("lightning", "epochs")}
CELLS = [
    pytest.param(one, recipe, id=f"{one}-{recipe}", marks=() if (one, recipe) in QUICK else pytest.mark.slow)
    for one in (*TRAINERS, "transformers")
    for recipe in RECIPES
]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("tests.loop.change_script")
    yield server
    server.close()


@pytest.mark.cells(1)
@pytest.mark.parametrize(("trainer", "recipe"), CELLS)
def test_a_change_survives_two_kills(trainer: str, recipe: str, server: ForkServer, tmp_path: Path) -> None:
    """The first one may come before the branch has a snapshot; each process has the same command."""
    draw, folder, reached = random.Random(f"{trainer} {recipe}"), tmp_path / "killed", 0
    point = _point(trainer, recipe, tmp_path / "run")
    only(tmp_path / "run", point, folder)
    expected = _expected(trainer, recipe, only(tmp_path / "run", point, tmp_path / "whole"))
    for life, last in enumerate((draw.randint(1, 3), draw.randint(2, 4), 0)):
        trace = tmp_path / f"{life}.trace"
        server.start({"trainer": trainer, "recipe": recipe, "root": str(folder), "trace": str(trace), "last": last})
        assert server.join() == (-signal.SIGKILL if last else 0), log(trace)
        done = read(trace)
        start = expected.index(done[0])
        assert start <= reached, log(trace)
        assert done == expected[start : start + len(done)], log(trace)
        reached = start + len(done)
        told = report(folder)
        assert bool(told.changes) == (told.snapshot == point.id and recipe in CHANGES), log(trace)
    assert reached == len(expected)


def _point(trainer: str, recipe: str, root: Path) -> Saved:
    """Where the script before its change ended, in the middle of an epoch or at the end."""
    train(trainer, None, root, [], 0)
    if recipe == "epochs":
        return saved(root)[-1]
    return next(one for one in saved(root) if (one.epoch, one.batch) == (0, AT) and one.reason != "end")


def _expected(trainer: str, recipe: str, folder: Path) -> list[str]:
    """What the script trains from there on if nothing interrupts it: by hand, where the trainer is a loop."""
    trace: list[Any] = []
    train(trainer, recipe, folder, trace, SEED)
    if trainer != "transformers":  # its tests have the changes by hand
        entries, end = HANDS[recipe](TRAINERS[trainer], RECIPES[recipe][0])
        assert trace == [*entries, ("end", end)][-len(trace) :]
    return [repr(entry) for entry in trace]
