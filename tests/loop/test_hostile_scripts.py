"""Scripts whose resume was silently another run once: each is exact now, or says what is not as it was."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.loop.test_hidden import report
from tests.loop.test_scripts import Rows, Script, live

MEAN = torch.zeros(3)
AVERAGES: dict[str, torch.Tensor] = {}
TABLE: list[float] = []


@pytest.fixture(autouse=True)
def _a_new_process() -> None:
    _forget()


def _forget() -> None:
    MEAN.zero_()
    AVERAGES.clear()
    TABLE.clear()
    damped.__defaults__[0].clear()  # type: ignore[index]
    OfAll.calls, OfAll.mean = 0, torch.zeros(3)


@dataclass
class Progress:
    """Damps the step when the mean of the last losses is above the best one."""

    best: float = float("inf")
    window: list[float] = field(default_factory=list)
    scale: float = 1.0

    def update(self, loss: float) -> None:
        self.window.append(loss)
        self.window = self.window[-4:]
        mean = sum(self.window) / len(self.window)
        self.scale *= 1.0 if mean < self.best else 0.9
        self.best = min(mean, self.best)


class Pool:
    """Gives back an older batch now and then."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def query(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.kept) < 6:
            self.kept.append(x)
            return x
        place = random.randrange(6)
        older = self.kept[place].clone()
        self.kept[place] = x
        return older


def keeps_a_window_in_an_object(script: Script) -> None:
    progress = Progress()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            progress.update(script.step(x, progress.scale))


def keeps_a_pool_in_an_object(script: Script) -> None:
    pool = Pool()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(pool.query(x))


def noisy() -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook of a gradient, with a random stream and a count of its own."""
    stream, calls = torch.Generator().manual_seed(4), 0

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient + torch.randn(gradient.shape, generator=stream) / calls

    return hook


def adds_noise_in_hooks(script: Script) -> None:
    for one in script.net.parameters():
        one.register_hook(noisy())
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def stepper(script: Script) -> Callable[[torch.Tensor], None]:
    """A step with a sum in its closure that is a tensor."""
    total = torch.zeros(())

    def step(x: torch.Tensor) -> None:
        total.add_(script.step(x, 1 / (1 + total.item())))

    return step


def sums_up_in_a_closure(script: Script) -> None:
    steps = {"only": stepper(script)}
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            steps["only"](x)


def normalised(x: torch.Tensor) -> torch.Tensor:
    MEAN.lerp_(x.mean(0), 0.2)
    return x - MEAN


def averages_in_a_global_tensor(script: Script) -> None:
    _forget()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(normalised(x))


def average(script: Script) -> float:
    for name, one in script.net.state_dict().items():
        AVERAGES[name] = AVERAGES[name] * 0.8 + one * 0.2 if name in AVERAGES else one.clone()
    return float(AVERAGES["bias"])


def fills_a_global_dict_of_tensors(script: Script) -> None:
    _forget()
    script.track()
    weight = 0.0
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + (float(AVERAGES["bias"]) if AVERAGES else weight))
            average(script)


def draws_from_a_list_of_streams(script: Script) -> None:
    streams = {"train": [random.Random(1), random.Random(2)]}["train"]
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, 1 + streams[1].random())


class Mixes:
    """With the batch before; and a mean that is a tensor."""

    def __init__(self) -> None:
        self.last: tuple[torch.Tensor, float] | None = None
        self.mean = torch.zeros(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        before, _ = self.last or (x, 0.0)
        self.last, self.mean = (x, 1.0), 0.9 * self.mean + 0.1 * x.mean(0)
        return x + 0.1 * before - self.mean


def mixes_with_the_batch_before(script: Script) -> None:
    mix = Mixes()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(mix(x))


def damped(value: float, window: list[float] = []) -> float:  # noqa: B006 - scripts do that
    window.append(value)
    del window[:-5]
    return 1 / (1 + sum(window) / len(window))


def keeps_a_window_in_a_default(script: Script) -> None:
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, damped(float(x.sum())))


def median() -> Callable[[float], float]:
    seen: list[float] = []

    def of(value: float) -> float:
        seen.append(value)
        return sorted(seen)[len(seen) // 2]

    return of


def keeps_all_values_in_a_closure(script: Script) -> None:
    of = median()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, of(float(x.sum())))


def centred(means: dict[str, dict[str, Any]], name: str, module: Any, inputs: Any, output: torch.Tensor) -> Any:
    mean = means.setdefault(name, {"sum": torch.zeros(1), "n": 0})
    mean["n"] += 1
    mean["sum"] += output.detach().mean(0)
    return output - mean["sum"] / mean["n"]


def centres_in_a_hook(script: Script) -> None:
    script.net.register_forward_hook(functools.partial(centred, {}, "net"))
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)


def shrinks_by_a_global_list(script: Script) -> None:
    TABLE[:] = [1.0]
    weight = lambda: TABLE[len(TABLE) // 2]  # noqa: E731 - scripts do that
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, weight())
            shrink()


def shrink() -> None:
    TABLE.append(TABLE[-1] * 0.9)


class OfAll:
    """All of it belongs to the class."""

    calls = 0
    mean = torch.zeros(3)

    @classmethod
    def blend(cls, x: torch.Tensor) -> torch.Tensor:
        cls.calls += 1
        cls.mean = 0.9 * cls.mean + 0.1 * x.mean(0)
        return x - cls.mean / cls.calls


def blended(x: torch.Tensor) -> torch.Tensor:
    return OfAll.blend(x)


def keeps_it_in_a_class(script: Script) -> None:
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(blended(x))


class Buffered(IterableDataset[Any]):
    """Shuffles with a stream of its own, and counts its passes."""

    def __init__(self) -> None:
        self.dice, self.passes = random.Random(4), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        rows = [torch.full((3,), float(number)) / (10 + self.passes) for number in range(8)]
        self.dice.shuffle(rows)
        yield from rows


def shuffles_a_stream_of_rows(script: Script) -> None:
    loader = DataLoader(Buffered(), batch_size=2)
    script.track_loader(loader)
    for _ in script.epochs():
        for x in loader:
            script.step(x)


class Easy(Sampler[list[int]]):
    """Batches of the rows up to a limit, which the loop moves."""

    def __init__(self) -> None:
        self.limit = 6

    def __iter__(self) -> Iterator[list[int]]:
        rows = [row % 8 for row in torch.randperm(self.limit).tolist()]
        return iter([rows[place : place + 2] for place in range(0, self.limit, 2)])

    def __len__(self) -> int:
        return self.limit // 2


def trains_on_more_rows_each_epoch(script: Script) -> None:
    sampler = Easy()
    loader = DataLoader(Rows(), batch_sampler=sampler)
    script.track_loader(loader)
    for _ in script.epochs():
        for x in loader:
            script.step(x)
        sampler.limit += 6


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    "loop",
    [
        draws_from_a_list_of_streams,
        mixes_with_the_batch_before,
        keeps_a_window_in_a_default,
        keeps_all_values_in_a_closure,
        centres_in_a_hook,
        shrinks_by_a_global_list,
        keeps_it_in_a_class,
        shuffles_a_stream_of_rows,
        trains_on_more_rows_each_epoch,
        keeps_a_window_in_an_object,
        keeps_a_pool_in_an_object,
        adds_noise_in_hooks,
        sums_up_in_a_closure,
        averages_in_a_global_tensor,
        fills_a_global_dict_of_tensors,
    ],
    ids=lambda loop: loop.__name__,
)
def test_it_goes_on_where_it_was(loop: Callable[[Script], None], tmp_path: Path) -> None:
    """Over three processes, each with another seed."""
    wanted = live_alone(tmp_path / "whole", loop)
    got = live_alone(tmp_path / "killed", loop, 1, 5) + live_alone(tmp_path / "killed", loop, 2, 7)
    assert got + live_alone(tmp_path / "killed", loop, 3) == wanted


def live_alone(folder: Path, loop: Callable[[Script], None], seed: int = 1, die_at: int | None = None) -> list[str]:
    """As `live`, with the variables of this file too as they are in a new process."""
    _forget()
    return live(folder, loop, seed, die_at)


@dataclass(frozen=True)
class Damping:
    """A new one after each step."""

    scale: float = 1.0

    def after(self, loss: float) -> Damping:
        return replace(self, scale=self.scale * (1 - min(loss, 0.5)))


def replaces_an_object(script: Script) -> None:
    damping = Damping()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            damping = damping.after(script.step(x, damping.scale))


class Cooled:
    """Takes its temperature from an endless iterator."""

    def __init__(self) -> None:
        self.temperatures = itertools.cycle([1.0, 1.5, 2.0])

    def __call__(self) -> float:
        return next(self.temperatures)


def cycles_in_an_object(script: Script) -> None:
    temperature = Cooled()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, temperature())


class Deques:
    """The last values of each kind, in a container that needs a function to be made again."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = collections.defaultdict(lambda: collections.deque(maxlen=3))

    def __call__(self, kind: str, value: float) -> float:
        self.last[kind].append(value)
        mean = sum(self.last[kind]) / len(self.last[kind])
        return 1 / (1 + mean)


def keeps_the_last_of_each_kind(script: Script) -> None:
    last = Deques()
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x, last("sum", float(x.sum())))


def forgets_the_scheduler(script: Script) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 3, 0.5)
    script.track()
    for _ in script.epochs():
        for x in script.loader:
            script.step(x)
            scheduler.step()


class OfAClass:
    """Has the loop and all that it needs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 3, 0.5)

    def run(self) -> None:
        for _ in self.script.epochs():
            for x in self.script.loader:
                self.script.step(x)
                self.scheduler.step()


def forgets_the_scheduler_of_a_class(script: Script) -> None:
    script.track()
    OfAClass(script).run()


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (replaces_an_object, "damping"),
        (cycles_in_an_object, "temperature.temperatures"),
        (keeps_the_last_of_each_kind, "last.last"),
    ],
)
def test_what_no_snapshot_has_is_named(loop: Callable[[Script], None], name: str, tmp_path: Path) -> None:
    """The run goes on otherwise, and the report says by what."""
    live(tmp_path, loop, 1, 5)
    live(tmp_path, loop, 2, 7)
    said = [f"{row['name']} {row['why']}" for row in report(tmp_path)["not_restored"]]
    assert any(name in one for one in said), said


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "loop",
    [
        *(averages_in_a_global_tensor, fills_a_global_dict_of_tensors),
        *(forgets_the_scheduler, forgets_the_scheduler_of_a_class),
    ],
)
def test_what_is_restored_is_not_named(
    loop: Callable[[Script], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A list that is empty at first and grows in the first step of a run is not named either."""
    live(tmp_path, loop, 1, 5)
    live(tmp_path, loop, 2, 7)
    assert report(tmp_path)["not_restored"] == []
    assert [one for one in caplog.messages if "carried from step to step" in one] == []


def draws_before_it_asks(script: Script) -> None:
    script.track()
    batches = iter(script.loader)
    for _ in range(script.run.global_step, 12):
        noise = torch.randn(2, 3)
        try:
            x = next(batches)
        except StopIteration:
            batches = iter(script.loader)
            x = next(batches)
        script.step(x + noise)


def test_what_a_loop_draws_before_it_asks_is_named(tmp_path: Path) -> None:
    """The loop begins the step again after a resume, and draws again."""
    live(tmp_path, draws_before_it_asks, 1, 3)
    live(tmp_path, draws_before_it_asks, 2)
    said = [row["why"] for row in report(tmp_path)["not_restored"]]
    assert any(one.startswith("noise is another one in draws_before_it_asks (") for one in said), said


class Prefetcher:
    """Reads ahead on a thread of its own."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, queue.Queue[Any](2)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for x in self.loader:
            self.batches.put(x)
        self.batches.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (x := self.batches.get(timeout=60)) is not None:
            yield x


def reads_ahead_on_a_thread(script: Script) -> None:
    script.track()
    for _ in script.epochs():
        for x in Prefetcher(script.loader):
            script.step(x)


def test_no_snapshot_is_taken_on_a_thread_that_does_not_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights change while it asks for the next batch: a copy of them could be torn. It is said once."""
    with caplog.at_level(logging.WARNING):
        live(tmp_path, reads_ahead_on_a_thread)
    said = [one for one in caplog.messages if "another thread than the one that trains" in one]
    assert len(said) == 1
    assert not list((tmp_path / "snapshots").glob("[!.]*.json"))
