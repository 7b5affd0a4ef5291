"""Loops of every shape around tracked loaders: killed at any boundary and resumed, or said to be inexact first."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from tests.loop.runs import (
    BATCH,
    Augmented,
    Outcome,
    Saved,
    every_boundary,
    only,
    report,
    resume_only,
    saved,
)
from tests.loop.test_unusual_loops import Setting

Loop = Callable[["Watched"], None]
EPOCHS = 3


def shuffled(samples: int) -> DataLoader[Any]:
    return DataLoader(Augmented(samples), batch_size=BATCH, shuffle=True)


def step(run: Setting, batch: Any, *what: Any) -> None:
    x, y, ids = batch
    run.train(x, y, *what, tuple(ids.tolist()))


# ---- loops that resume exactly


def breaks_before_it_trains(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(run.loader, run.done):
            if i == 3:
                break
            step(run, batch, epoch)


def breaks_after_it_trained(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(run.loader, run.done):
            step(run, batch, epoch, i)
            if i == 3:
                break


def slices(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        batches = itertools.islice(run.loader, 4)
        if run.done:
            gc.collect(1)  # it is found although it is no young object any more
        for batch in batches:
            step(run, batch, epoch)


def slices_and_counts(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(itertools.islice(run.loader, 4), run.done):
            step(run, batch, epoch, i)


def pairs_with_a_shorter_one(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other in zip(run.loader, second, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()))


def pairs_with_a_longer_one(run: Watched) -> None:
    second = shuffled(30)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other in zip(second, run.loader, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()))


def pairs_a_counted_one(run: Watched) -> None:
    second = shuffled(30)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for (i, batch), other in zip(enumerate(run.loader, run.done), second, strict=False):
            step(run, batch, epoch, i, tuple(other[2].tolist()))


def pairs_a_counted_one_of_a_bar(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        counted = enumerate(bar(itertools.islice(second, 5)), run.done)
        for batch, (i, other) in zip(run.loader, counted, strict=False):
            step(run, batch, epoch, i, tuple(other[2].tolist()))


def takes_three_at_once(run: Watched) -> None:
    """The second one ends first: the first one has given a batch more by then, and the third one is not asked."""
    streams = [torch.Generator().manual_seed(number) for number in (1, 2)]
    second, third = (
        DataLoader(Augmented(n), batch_size=BATCH, shuffle=True, generator=g)
        for n, g in zip((18, 26), streams, strict=False)
    )
    run.track(second=second, third=third)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other, more in zip(run.loader, second, third, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()), tuple(more[2].tolist()))


def takes_three_at_once_from_the_common_stream(run: Watched) -> None:
    second, third = shuffled(18), shuffled(26)
    run.track(second=second, third=third)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other, more in zip(run.loader, second, third, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()), tuple(more[2].tolist()))


def trains_on_two_in_turn(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch in run.loader:
            step(run, batch, "first", epoch)
        for batch in second:
            step(run, batch, "second", epoch)


def nests(run: Watched) -> None:
    inner = shuffled(10)
    run.track(inner=inner)
    for epoch in range(run.epoch, 2):
        for outer in run.loader:
            for batch in inner:
                step(run, batch, epoch, tuple(outer[2].tolist()))


def nests_and_trains_on_both(run: Watched) -> None:
    inner = shuffled(10)
    run.track(inner=inner)
    for epoch in range(run.epoch, 2):
        for outer in run.loader:
            step(run, outer, "outer", epoch)
            for batch in inner:
                step(run, batch, "inner", epoch)


def read_ahead(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    ready = next(batches)
    for following in batches:
        yield ready
        ready = following
    yield ready


def reads_one_ahead(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in read_ahead(run.loader):
            step(run, batch, epoch)


def buffered(loader: Any, size: int) -> Iterator[Any]:
    waiting: deque[Any] = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > size:
            yield waiting.popleft()
    yield from waiting


def one_behind(loader: Any) -> Iterator[Any]:
    before = None
    for batch in loader:
        if before is not None:
            yield before
        before = batch
    yield before


def trains_one_behind(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in one_behind(run.loader):
            step(run, batch, epoch)


def reads_two_ahead(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in buffered(run.loader, 2):
            step(run, batch, epoch)


def changed(batches: Iterable[Any]) -> Iterator[Any]:
    """Copies, which share no memory with what was loaded."""
    for x, y, ids in batches:
        yield 2.0 * x, y.clone(), ids.clone()


def reads_one_ahead_and_changes_it(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in read_ahead(changed(run.loader)):
            step(run, batch, epoch)


def reads_two_ahead_and_changes_them(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in buffered(changed(run.loader), 2):
            step(run, batch, epoch)


def cropped(batches: Iterable[Any]) -> Iterator[Any]:
    """Parts of them at random, as timm's prefetcher does behind the loader: streams of torch, numpy and Python."""
    for x, y, ids in batches:
        chance = random.random() + np.random.random()
        yield x * (torch.rand_like(x) < chance / 2), y.clone(), ids.clone()


def reads_one_ahead_and_erases_it(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in read_ahead(cropped(run.loader)):
            step(run, batch, epoch)


def reads_two_ahead_and_erases_them(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in buffered(cropped(run.loader), 2):
            step(run, batch, epoch)


def erases_ahead_in_an_object(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        prefetcher = Prefetcher(cropped(run.loader))
        batch = prefetcher.next()
        while batch is not None:
            step(run, batch, epoch)
            batch = prefetcher.next()


class Ahead:
    """Keeps the changed copy of what it has read ahead in an attribute, as timm's prefetcher and others do."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.kept = loader, None

    def __iter__(self) -> Iterator[Any]:
        for x, y, ids in self.loader:
            ready, self.kept = self.kept, (x + 0.0, y + 0.0, ids + 0)
            if ready is not None:
                yield ready
        ready, self.kept = self.kept, None
        yield ready


def reads_ahead_in_an_iterable_object(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in Ahead(run.loader):
            step(run, batch, epoch)


PACKAGE = """
class Ahead:
    def __init__(self, loader): self.loader, self.kept = loader, None
    def __iter__(self):
        for x, y, ids in self.loader:
            ready, self.kept = self.kept, (x + 0.0, y + 0.0, ids + 0)
            if ready is not None: yield ready
        ready, self.kept = self.kept, None
        yield ready
"""


def reads_ahead_in_a_package(run: Watched) -> None:
    """What the package keeps is in none of its variables that a generator reads later."""
    package: dict[str, Any] = {"__name__": "walks"}
    exec(compile(PACKAGE, f"{os.sep}site-packages{os.sep}walks.py", "exec"), package)
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in package["Ahead"](run.loader):
            step(run, batch, epoch)


class Prefetcher:
    """As in NVIDIA's examples: `next` gives the batch that is there and asks for the one after it."""

    def __init__(self, loader: Any) -> None:
        self.batches = iter(loader)
        self.preload()

    def preload(self) -> None:
        self.ready = next(self.batches, None)

    def next(self) -> Any:
        batch = self.ready
        self.preload()
        return batch


def reads_ahead_in_an_object(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        prefetcher = Prefetcher(run.loader)
        batch = prefetcher.next()
        while batch is not None:
            step(run, batch, epoch)
            batch = prefetcher.next()


def erased(batches: Iterable[Any]) -> Iterator[Any]:
    """Changed copies, as of random erasing and mixup: each draws from the streams that the model draws from, too."""
    for x, y, ids in batches:
        share = random.random() + float(np.random.rand()) + float(torch.rand(()))
        yield share * x, y.clone(), ids.clone()


def reads_one_ahead_and_draws_for_it(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in read_ahead(erased(run.loader)):
            step(run, batch, epoch)


def reads_two_ahead_and_draws_for_them(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch in buffered(erased(run.loader), 2):
            step(run, batch, epoch)


def reads_ahead_in_an_object_and_draws(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        prefetcher = Prefetcher(erased(run.loader))
        batch = prefetcher.next()
        while batch is not None:
            step(run, batch, epoch)
            batch = prefetcher.next()


def reads_two_loaders_ahead_and_draws(run: Watched) -> None:
    second = shuffled(18)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other in zip(read_ahead(erased(run.loader)), read_ahead(erased(second)), strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()), float(other[0].sum()))


class Endless:
    """Makes its iterator when it is first asked, and again at each end."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, None

    def sample(self) -> Any:
        if self.batches is None:
            self.batches = iter(self.loader)
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


def alternates(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    real, other = iter(run.loader), iter(second)
    for number in range(run.step, 12):
        try:
            batch = next(real)
        except StopIteration:
            real = iter(run.loader)
            batch = next(real)
        step(run, batch, "real", number)
        try:
            batch = next(other)
        except StopIteration:
            other = iter(second)
            batch = next(other)
        step(run, batch, "other", number)


def samples_from_endless_ones(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    real, other = Endless(run.loader), Endless(second)
    for number in range(run.step, 16):
        batch = real.sample()
        step(run, batch, number, tuple(other.sample()[2].tolist()))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        gc.collect(1)  # what is around grows old
        yield from loader


def pairs_an_endless_one_with_its_steps(run: Watched) -> None:
    run.track()
    for number, batch in zip(range(run.step, 16), endless(run.loader), strict=False):
        step(run, batch, number)


def counts_the_steps_of_an_endless_one(run: Watched) -> None:
    run.track()
    for number, batch in enumerate(endless(run.loader), run.step):
        if number == 16:
            break
        step(run, batch, number)


GLOBAL: list[DataLoader[Any]] = []


def endless_global() -> Iterator[Any]:
    while True:
        yield from GLOBAL[0]


def takes_from_a_global_one(run: Watched) -> None:
    run.track()
    GLOBAL[:] = [run.loader]
    batches = endless_global()
    for number in range(run.step, 16):
        step(run, next(batches), number)
    GLOBAL.clear()


def pairs_an_endless_one_first(run: Watched) -> None:
    """More passes over the one that is asked first than epochs."""
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for other, batch in zip(endless(second), run.loader, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()))


def takes_turns_at_one_place(run: Watched) -> None:
    loaders = [run.loader, shuffled(14), shuffled(10)]
    run.track(second=loaders[1], third=loaders[2])
    batches = list(map(iter, loaders))
    for number in range(run.step, 16):
        try:
            batch = next(batches[number % 3])
        except StopIteration:
            batches[number % 3] = iter(loaders[number % 3])
            batch = next(batches[number % 3])
        step(run, batch, number)


def takes_turns_until_all_are_over(run: Watched) -> None:
    loaders = [run.loader, shuffled(14), shuffled(10)]
    run.track(second=loaders[1], third=loaders[2])
    for epoch in range(run.epoch, 2):
        batches = list(map(iter, loaders))
        while batches:
            for one in list(batches):
                try:
                    batch = next(one)
                except StopIteration:
                    batches.remove(one)
                    continue
                step(run, batch, epoch)


def looks_at_a_batch_in_each_epoch(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        next(iter(run.loader))
        for batch in run.loader:
            step(run, batch, epoch)


def prints_a_count(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(run.loader):
            step(run, batch, epoch)
            if i % 2 == 0:
                print(f"{epoch} {i}")


def drops_the_first_batch_of_an_iterator(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        batches = iter(run.loader)
        next(batches)
        for batch in batches:
            step(run, batch, epoch)


def evaluates_on_a_part(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch in run.loader:
            step(run, batch, epoch)
            part = iter(second)
            run.note("part", tuple(next(part)[2].tolist()), tuple(next(part)[2].tolist()))


# ---- loops that a resume cannot repeat, and says so


def counts_from_zero(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(run.loader):
            step(run, batch, epoch)
            if i == 3:
                break


def counts_from_one(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(run.loader, 1):
            if i == 4:
                break
            step(run, batch, epoch)


def bar(batches: Any) -> Iterator[Any]:
    yield from batches


def counts_around_a_bar(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for i, batch in enumerate(bar(run.loader)):
            step(run, batch, epoch)
            if i == 3:
                break


def pairs_with_a_range(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for _, batch in zip(range(4), run.loader, strict=False):
            step(run, batch, epoch)


def counts_by_itself(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        i = 0
        for batch in run.loader:
            step(run, batch, epoch)
            i += 1  # noqa: SIM113
            if i == 4:
                break


def takes_several_per_round(run: Watched) -> None:
    run.track()
    batches = Endless(run.loader)
    for _ in range(run.step // 3, 6):
        for turn in range(3):
            step(run, batches.sample(), turn)


def cycles(run: Watched) -> None:
    second = shuffled(14)
    run.track(second=second)
    for epoch in range(run.epoch, EPOCHS):
        for batch, other in zip(run.loader, itertools.cycle(second), strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()))


def iterates_one_loader_twice_at_once(run: Watched) -> None:
    run.track()
    for epoch in range(run.epoch, EPOCHS):
        for batch, other in zip(run.loader, run.loader, strict=False):
            step(run, batch, epoch, tuple(other[2].tolist()))


EXACT: tuple[Loop, ...] = (
    breaks_before_it_trains,
    breaks_after_it_trained,
    slices,
    slices_and_counts,
    pairs_with_a_shorter_one,
    pairs_with_a_longer_one,
    pairs_a_counted_one,
    pairs_a_counted_one_of_a_bar,
    takes_three_at_once,
    takes_three_at_once_from_the_common_stream,
    trains_on_two_in_turn,
    nests,
    nests_and_trains_on_both,
    reads_one_ahead,
    trains_one_behind,
    reads_two_ahead,
    reads_one_ahead_and_changes_it,
    reads_two_ahead_and_changes_them,
    reads_ahead_in_an_object,
    reads_one_ahead_and_erases_it,
    reads_two_ahead_and_erases_them,
    erases_ahead_in_an_object,
    reads_one_ahead_and_draws_for_it,
    reads_two_ahead_and_draws_for_them,
    reads_ahead_in_an_object_and_draws,
    alternates,
    samples_from_endless_ones,
    pairs_an_endless_one_with_its_steps,
    counts_the_steps_of_an_endless_one,
    pairs_an_endless_one_first,
    takes_turns_at_one_place,
    takes_turns_until_all_are_over,
    looks_at_a_batch_in_each_epoch,
    prints_a_count,
    drops_the_first_batch_of_an_iterator,
    evaluates_on_a_part,
)
DECLARED: dict[Loop, str] = {
    counts_from_zero: "enumerate(…, run.resumed_batches)",
    counts_from_one: "enumerate(…, 1 + run.resumed_batches)",
    counts_around_a_bar: "enumerate(…, run.resumed_batches)",
    pairs_with_a_range: "zip",
    counts_by_itself: "i was",
    takes_several_per_round: "turn was",
    cycles: "cycle",
    iterates_one_loader_twice_at_once: "two passes",
    reads_ahead_in_an_iterable_object: "self is carried from step to step",
    reads_ahead_in_a_package: "takes 1 batches more than the next",
    reads_two_loaders_ahead_and_draws: "zip around 'loader'",
}


@dataclass
class Life:
    """What one process of a loop saw."""

    outcome: Outcome
    said_before_the_first_step: list[str]


class Watched(Setting):
    """Reads the resume report right before the first step, and counts the events before each snapshot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before = 0
        self.said: list[str] = []

    def train(self, x: Any, y: Any, *what: Any) -> None:
        if not self.trace:
            self.read()
        super().train(x, y, *what)
        self.count()

    def read(self) -> None:
        folder = Path(str((self.options or {}).get("tiers", "")))
        if (folder / "resume-report.json").exists():
            self.said = [one.why for one in report(folder).not_restored]

    def note(self, *what: Any) -> None:
        self.trace.append(what)
        self.count()

    def count(self) -> None:
        if self.tracker is not None:
            self.tracker.metrics["events"] = self.before + len(self.trace)

    def track(self, **more: Any) -> None:
        super().track(**more)
        if self.tracker is not None:
            self.before = int(self.tracker.metrics.get("events", 0))


def live(loop: Loop, options: Any, seed: int = 0) -> Life:
    run = Watched(options, seed=seed)
    loop(run)
    outcome = run.end()
    if not outcome.trace:
        run.read()
    return Life(outcome, run.said)


def rest_of(reference: Outcome, snapshot: Saved) -> list[Any]:
    """The events after the snapshot."""
    info = json.loads(snapshot.path.read_bytes())["manifest"]["info"]
    return reference.trace[int(info["metrics"]["events"]) :]


def generations(
    loop: Loop, reference: Outcome, root: Path, snapshot: Saved, target: Path, most: int
) -> list[tuple[str, Life]]:
    """Resumes that differ from the reference, each killed at a boundary after the resume, and so on."""
    wrong = []
    for generation in range(most):
        folder = only(root, snapshot, target / str(generation))
        last = generation == most - 1
        life = live(loop, resume_only(folder) if last else every_boundary(folder), seed=77 + snapshot.step)
        if life.outcome.trace != rest_of(reference, snapshot) or life.outcome.digest != reference.digest:
            wrong.append((f"step {snapshot.step}, epoch {snapshot.epoch}, batch {snapshot.batch}", life))
            break
        later = [one for one in saved(folder) if one.reason != "end" and one.step > snapshot.step]
        if last or not later:
            break
        root, snapshot = folder, later[min(1, len(later) - 1)]
    return wrong


QUICK: dict[Loop, int] = {
    **dict.fromkeys((breaks_before_it_trains, slices, pairs_with_a_shorter_one, nests, reads_one_ahead), 1),
    **dict.fromkeys((reads_one_ahead_and_changes_it, reads_two_ahead_and_changes_them), 2),
    **dict.fromkeys((reads_one_ahead_and_erases_it, reads_two_ahead_and_erases_them, erases_ahead_in_an_object), 2),
    **dict.fromkeys((reads_one_ahead_and_draws_for_it, reads_two_ahead_and_draws_for_them), 2),
    **dict.fromkeys((reads_ahead_in_an_object_and_draws, reads_two_loaders_ahead_and_draws), 2),
    takes_three_at_once: 3,  # one of them where the second loader ends next
    **dict.fromkeys((pairs_an_endless_one_first, takes_turns_at_one_place, takes_turns_until_all_are_over), 2),
    **dict.fromkeys((counts_from_zero, counts_around_a_bar, reads_ahead_in_an_iterable_object), 1),
}
"""How many boundaries of a loop the quick tests resume from."""


@pytest.mark.cells(1)
@pytest.mark.parametrize("loop", [prints_a_count, pairs_a_counted_one, pairs_a_counted_one_of_a_bar])
def test_what_trains_the_same_is_no_fault(loop: Loop, tmp_path: Path) -> None:
    """A resumed loop that only prints other numbers, or whose iterators go on by themselves: nothing is reported."""
    reference = live(loop, None).outcome
    live(loop, every_boundary(tmp_path / "run"))
    snapshot = [one for one in saved(tmp_path / "run") if one.reason != "end"][7]
    life = live(loop, resume_only(only(tmp_path / "run", snapshot, tmp_path / "again")))
    assert life.outcome.digest == reference.digest
    assert life.said_before_the_first_step == []


def cases(loops: Iterable[Loop]) -> list[Any]:
    """Each loop with all of its boundaries; some with a few of them."""
    marks = (pytest.mark.slow, pytest.mark.timeout(1200))
    every = [pytest.param(loop, 1000, id=loop.__name__, marks=marks) for loop in loops]
    return [*every, *(pytest.param(loop, QUICK[loop], id=f"{loop.__name__}, some") for loop in loops if loop in QUICK)]


def some(snapshots: list[Saved], share: int) -> list[Saved]:
    """So many of them, from the second half on if not all."""
    return snapshots if share >= len(snapshots) else snapshots[len(snapshots) // 2 :][:share]


@pytest.mark.cells(5)
@pytest.mark.parametrize(("loop", "share"), cases(EXACT))
def test_the_loop_goes_on_where_it_was(loop: Loop, share: int, tmp_path: Path) -> None:
    """From each boundary, under another seed, three generations deep; and the run itself is that without tracking."""
    if loop in (slices, slices_and_counts) and not hasattr(itertools.islice, "__setstate__"):
        pytest.skip("from Python 3.14 on a slice does not tell where it stands: it is named, and not put back")
    reference = live(loop, None).outcome
    options = every_boundary(tmp_path / "run", every_n_steps=5 if share == 1 else 1)
    assert live(loop, options).outcome == reference
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    assert snapshots
    for number, snapshot in enumerate(some(snapshots, share)):
        for where, life in generations(
            loop, reference, tmp_path / "run", snapshot, tmp_path / str(number), min(share, 3)
        ):
            pytest.fail(f"{where}: {life.outcome.trace[:3]} instead of {rest_of(reference, snapshot)[:3]}")


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "loop", [pairs_an_endless_one_with_its_steps, counts_the_steps_of_an_endless_one, takes_from_a_global_one]
)
def test_what_goes_on_over_several_passes_is_no_fault(loop: Loop, tmp_path: Path) -> None:
    """Of a `zip` or `enumerate` around a generator the saved run knows in its second pass how far it is."""
    live(loop, every_boundary(tmp_path / "run"))
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    for number in (2, 7):
        life = live(loop, resume_only(only(tmp_path / "run", snapshots[number], tmp_path / str(number))))
        assert life.said_before_the_first_step == []


@pytest.mark.cells(1)
@pytest.mark.parametrize(("loop", "share"), cases(DECLARED))
def test_a_loop_that_cannot_be_repeated_says_so_before_it_trains(loop: Loop, share: int, tmp_path: Path) -> None:
    """Each resume is exact, or its report says what to change, before the first step if there is one."""
    reference = live(loop, None).outcome
    assert live(loop, every_boundary(tmp_path / "run")).outcome == reference
    snapshots = [one for one in saved(tmp_path / "run") if one.reason != "end"]
    silent, spoken = [], 0
    for number, snapshot in enumerate(some(snapshots, share)):
        for where, life in generations(
            loop, reference, tmp_path / "run", snapshot, tmp_path / str(number), min(share, 3)
        ):
            if any(DECLARED[loop] in why for why in life.said_before_the_first_step):
                spoken += 1
            else:
                silent.append((where, life.said_before_the_first_step))
    assert silent == []
    assert spoken


def test_a_batch_that_is_left_out_is_named_in_each_life(tmp_path: Path) -> None:
    """A resumed run finds out again that its loop reads ahead unseen: the next one leaves out a batch, too."""
    options = every_boundary(tmp_path / "run")
    for life in range(3):
        said = live(reads_ahead_in_a_package, options, seed=life).said_before_the_first_step
        assert [why for why in said if "takes 1 batches more than the next" in why] == said
        assert bool(said) == (life > 0)
        folder = tmp_path / ("run" if life == 0 else str(life))
        snapshot = [one for one in saved(folder) if one.reason != "end"][2]
        options = every_boundary(only(folder, snapshot, tmp_path / str(life + 1)))


def takes_one_of_two(run: Watched, order: Iterable[int]) -> None:
    loaders = [run.loader, shuffled(14)]
    run.track(second=loaders[1])
    batches = list(map(iter, loaders))
    for which in order:
        try:
            batch = next(batches[which])
        except StopIteration:
            batches[which] = iter(loaders[which])
            batch = next(batches[which])
        step(run, batch, which)


def test_a_loader_that_had_no_more_batches_ends_once(tmp_path: Path) -> None:
    """Also where the resumed loop draws another loader to ask first."""
    takes_one_of_two(first := Watched(every_boundary(tmp_path / "run")), [0, 0, 0, 0, 0, 0, 1, 1])
    first.end()
    snapshot = next(one for one in saved(tmp_path / "run") if one.step == 7)
    takes_one_of_two(again := Watched(resume_only(only(tmp_path / "run", snapshot, tmp_path / "again"))), [0, 0, 1])
    assert [which for which, *_ in again.end().trace] == [0, 0, 1]


def test_a_resumed_loop_that_asks_for_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its training was not complete: it does not end as one that has nothing left to do."""
    breaks_after_it_trained(first := Watched(every_boundary(tmp_path / "run")))
    first.end()
    again = Watched(resume_only(only(tmp_path / "run", saved(tmp_path / "run")[2], tmp_path / "again")))
    again.track()
    again.end()
    assert "resumed at step 3, and the loop has trained on no batch" in caplog.text


def test_a_call_that_has_run_often_asks_from_the_same_place(tmp_path: Path) -> None:
    """Python 3.11 is at the first of its two instructions then, and each step counts all the same."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [DataLoader(torch.ones(40, 2), batch_size=2), DataLoader(torch.ones(40, 2), batch_size=2)]  # type: ignore[arg-type]

    def one(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    with Checkpointer(tmp_path, every_n_steps=10**6, at_end=False) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, first=loaders[0], second=loaders[1])
        fresh = compile("for step in range(30):\n    one(next(asked[step % 2]))\n", str(tmp_path / "loop.py"), "exec")
        exec(fresh, {"one": one, "asked": list(map(iter, loaders))})  # code that has not run before
    assert run.global_step == 30
