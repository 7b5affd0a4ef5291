"""What a script keeps in variables, attributes, closures, files and objects of Python that hide their state."""

from __future__ import annotations

import array
import contextvars
import hashlib
import heapq
import itertools
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.exact.silent.lab import STEPS, at, by_epochs, checkpoints, end, learn, parts, shuffled

Fed = tuple[torch.Tensor, float]


def dict_that_has_the_model() -> None:
    model, optimizer = parts()
    loader = shuffled()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scale": 1.0, "seen": 0}
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(state["model"], state["optimizer"], x, state["scale"])
                state["seen"] += 1
                state["scale"] = 1 + 0.1 * state["seen"]
    end(model, optimizer)


def namespace_that_has_the_model() -> None:
    model, optimizer = parts()
    loader = shuffled()
    state = Namespace(model=model, mean=torch.zeros(4), seen=0)
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                state.seen += 1
                state.mean = 0.9 * state.mean + 0.1 * x.mean(0)
                learn(state.model, optimizer, x - state.mean, 1 + 1 / state.seen)
    end(model, optimizer)


class OfTheClass:
    """All of it belongs to the class."""

    calls = 0
    mean = torch.zeros(4)
    table: ClassVar[dict[str, float]] = {"scale": 1.0}

    @classmethod
    def blend(cls, x: torch.Tensor) -> Fed:
        cls.calls += 1
        cls.mean = 0.9 * cls.mean + 0.1 * x.mean(0)
        cls.table["scale"] *= 1.1
        return x - cls.mean / cls.calls, cls.table["scale"]


def attributes_of_a_class() -> None:
    by_epochs(OfTheClass.blend)


def counted(x: torch.Tensor) -> Fed:
    """Counts its calls."""
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return x, 1 + 0.1 * counted.calls  # type: ignore[attr-defined]


def attribute_of_a_function() -> None:
    by_epochs(counted)


SEEN, MEAN = 0, torch.zeros(4)


def centred(x: torch.Tensor) -> Fed:
    """Counts in a global variable, and averages in another one."""
    global SEEN
    SEEN += 1
    MEAN.lerp_(x.mean(0), 0.2)
    return x - MEAN, 1 + 0.1 * SEEN


def globals_of_a_module() -> None:
    by_epochs(centred)


def damped(x: torch.Tensor, window: list[float] = []) -> Fed:  # noqa: B006 - scripts do that
    """Keeps a window in its default."""
    window.append(float(x.mean()))
    del window[:-5]
    return x, 1 / (1.5 + sum(window))


def window_in_a_default() -> None:
    by_epochs(damped)


def ramp_in_a_coroutine() -> None:
    def ramp() -> Generator[float, float, None]:
        scale = 1.0
        while True:
            loss = yield scale
            scale = 0.9 * scale + 0.1 * min(loss, 2.0)

    scales = ramp()
    scale = next(scales)
    model, optimizer = parts()
    loader = shuffled()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                scale = scales.send(learn(model, optimizer, x, scale))
    end(model, optimizer)


@dataclass(frozen=True)
class Damping:
    """Another one after each step."""

    scale: float = 1.0

    def after(self, loss: float) -> Damping:
        return replace(self, scale=self.scale * (1.2 - min(loss, 0.5)))


def object_that_is_replaced() -> None:
    model, optimizer = parts()
    loader, damping = shuffled(), Damping()
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                damping = damping.after(learn(model, optimizer, x, damping.scale))
    end(model, optimizer)


def batch_before_in_a_local() -> None:
    model, optimizer = parts()
    loader, before = shuffled(), None
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                learn(model, optimizer, x if before is None else x + before)
                before = x
    end(model, optimizer)


def iterator_of_itertools() -> None:
    scales = itertools.accumulate(itertools.repeat(1.0), lambda a, _: 1.1 * a)
    by_epochs(lambda x: (x, next(scales)))


def heap_of_losses() -> None:
    model, optimizer = parts()
    loader, best = shuffled(), [1.0, 2.0, 3.0]
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                heapq.heappushpop(best, learn(model, optimizer, x, best[0]))
    end(model, optimizer)


def array_of_numbers() -> None:
    kept = array.array("d", [1.0, 1.0])

    def scaled(x: torch.Tensor) -> Fed:
        kept[0], kept[1] = kept[1], 0.5 * kept[0] + float(x.abs().mean())
        return x, kept[0]

    by_epochs(scaled)


def hash_of_all_batches() -> None:
    seen = hashlib.sha256()

    def scaled(x: torch.Tensor) -> Fed:
        seen.update(x.numpy().tobytes())
        return x, 1 + seen.digest()[0] / 255

    by_epochs(scaled)


SCALE = contextvars.ContextVar("SCALE", default=1.0)


def variable_of_a_context() -> None:
    def scaled(x: torch.Tensor) -> Fed:
        SCALE.set(SCALE.get() * 1.1)
        return x, SCALE.get()

    by_epochs(scaled)


LOCAL = threading.local()


def variable_of_a_thread() -> None:
    LOCAL.scale = 1.0

    def scaled(x: torch.Tensor) -> Fed:
        LOCAL.scale *= 1.1
        return x, LOCAL.scale

    by_epochs(scaled)


def variable_of_the_environment() -> None:
    def scaled(x: torch.Tensor) -> Fed:
        os.environ["SCALE"] = str(1.1 * float(os.environ.get("SCALE", "1.0")))
        return x, float(os.environ["SCALE"])

    by_epochs(scaled)


def number_in_a_file() -> None:
    path = Path("scale.txt")

    def scaled(x: torch.Tensor) -> Fed:
        path.write_text(str(1.1 * float(path.read_text() if path.exists() else "1.0")))
        return x, float(path.read_text())

    by_epochs(scaled)


def statistics_in_a_closure() -> None:
    def normalizer() -> Callable[[torch.Tensor], Fed]:
        count, mean, apart = 0, torch.zeros(4), torch.ones(4)

        def of(x: torch.Tensor) -> Fed:
            nonlocal count, mean
            count += 1
            mean = mean + (x.mean(0) - mean) / count
            apart.lerp_((x - mean).square().mean(0), 0.1)
            return (x - mean) / apart.sqrt(), 1.0

        return of

    by_epochs(normalizer())


def layers_that_are_freed_by_a_flag() -> None:
    model, optimizer = parts()
    loader, frozen = shuffled(), {"layers": 2}
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(run.epoch, 2):
            for number, x in enumerate(loader, run.resumed_batches):
                at(epoch * 12 + number, model, optimizer)
                if number == 4:
                    frozen["layers"] -= 1
                for place, one in enumerate(model.parameters()):
                    one.requires_grad_(place >= frozen["layers"])
                learn(model, optimizer, x)
    end(model, optimizer)


def steps_of_the_loop_itself() -> None:
    model, optimizer = parts()
    done = 0
    with checkpoints() as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer)
        while run.global_step < STEPS:
            at(run.global_step, model, optimizer)
            learn(model, optimizer, torch.randn(2, 4), 1 + 0.1 * done)
            done += 1
            run.step()
    end(model, optimizer)
