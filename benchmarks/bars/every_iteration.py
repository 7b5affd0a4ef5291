"""What a durable snapshot after every step costs, and every fifth, against the other ways to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from benchmarks.handmade import HandMade
from benchmarks.lightning_loop import Fit, Module, seeded_data
from benchmarks.measure import each_per, interleave
from benchmarks.peers import DcpAsync, TorchSave
from benchmarks.plain_loop import INPUTS, EngineSaver, NoSaver, PeerSaver, PlainLoop, Saver
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from lightning_ckpt import AdaptiveCheckpoint

TITLE = "Every iteration: a durable snapshot after every step"
LIMITS = {1: 1.15, 5: 1.03}
LIGHTNING_LIMIT = 1.05
"""Of Lightning with the callback, against the hand-made way without Lightning."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    parameters: int
    step_seconds: float
    iterations: int
    rounds: int
    peer_rounds: int


SIZES = {
    Scale.FULL: Size(33_000_000, 0.3, 20, 3, 1),
    Scale.QUICK: Size(33_000_000, 0.3, 17, 3, 1),
    Scale.TINY: Size(20_000, 0.002, 5, 1, 1),
}
PLAIN, LIGHTNING = "no snapshots", "Lightning, no snapshots"
HAND_MADE = "hand-made copy and direct write"


def run(bench: Bench) -> BarResult:
    """Measure loops with the engine and loops with every peer, interleaved with loops without snapshots."""
    size = SIZES[bench.scale]
    loop = PlainLoop(size.parameters, size.step_seconds)
    with bench.scratch("every-iteration") as folder, ExitStack() as stack:
        candidates = {PLAIN: lambda: loop.train(size.iterations, NoSaver(), 1)}
        for name, saver in _savers(folder, stack, loop):
            for every in LIMITS:
                candidates[_label(name, every)] = _train(loop, size, saver, every)
        lightning = _Lightning(folder, size, loop.batch_size)
        candidates[LIGHTNING] = lightning.without
        for every in LIMITS:
            candidates[_label("Lightning ModelCheckpoint", every)] = lightning.model_checkpoint(every)
            candidates[_label("Lightning AsyncCheckpointIO", every)] = lightning.asynchronous(every)
            candidates[_label("AdaptiveCheckpoint", every)] = lightning.adaptive(every)
        ours = ("engine eager", "engine lazy", HAND_MADE, "AdaptiveCheckpoint")
        often = (PLAIN, LIGHTNING, *(_label(name, every) for name in ours for every in LIMITS))
        for name in often:
            candidates[name]()
        slow = {name: size.peer_rounds for name in candidates if name not in often}
        taken = interleave(candidates, size.rounds, at_most=slow, tick=bench.say)
    checks = []
    for every, limit in LIMITS.items():
        engine = ratios(taken[_label("engine eager", every)], taken[PLAIN])
        checks.append(Check(_label("engine", every) + " / none", "x", "at most", limit, engine))
    for every in LIMITS:
        adaptive = ratios(taken[_label("AdaptiveCheckpoint", every)], taken[LIGHTNING])
        floor = ratios(taken[_label(HAND_MADE, every)], taken[PLAIN])
        what = _label("AdaptiveCheckpoint / none, by that of the hand-made way", every)
        checks.append(Check(what, "x", "at most", LIGHTNING_LIMIT, ratios(adaptive, floor)))
    series = []
    for name, samples in taken.items():
        base = LIGHTNING if "Lightning" in name or "Adaptive" in name else PLAIN
        if name != base:
            series.append(Series(name, "x", ratios(samples, taken[base][: len(samples)]), _note(name)))
    series += [Series(f"{b}, one step", "s", each_per(taken[b], size.iterations)) for b in (PLAIN, LIGHTNING)]
    return BarResult(
        "every-iteration",
        TITLE,
        {
            "state": f"{loop.state_bytes / 1e6:.0f} MB: perceptron with fused Adam, batch of {loop.batch_size}",
            "loop": f"{size.iterations} steps: forward, backward and update on {torch.get_num_threads()} threads",
            "wall time": "until every snapshot is durable, divided by that of the loop without any in the same round",
            "kept": "the two newest snapshots (ModelCheckpoint: the newest)",
        },
        tuple(checks),
        tuple(series),
        (
            "The engine copies host memory before training continues (decision 0130).",
            "The hand-made way is the floor: one copy and one thread that writes it, without digests, manifest or "
            "retention.",
            "Where the engine would skip a snapshot because both slots are in use, this loop waits for one instead.",
            "ModelCheckpoint and AsyncCheckpointIO do not sync: a power cut can lose what they have written.",
            "AsyncCheckpointIO queues without bound: its snapshots are written long after their step.",
            "AdaptiveCheckpoint skips a snapshot rather than let training wait.",
        ),
    )


def _savers(folder: Path, stack: ExitStack, loop: PlainLoop) -> Iterator[tuple[str, Saver]]:
    floor = HandMade(folder / "hand-made", loop.state(0))
    stack.callback(floor.close)
    yield HAND_MADE, floor
    for kind in ("eager", "lazy"):
        engine = EngineSaver(folder / kind, lazy=kind == "lazy")
        stack.enter_context(engine.checkpointer)
        yield f"engine {kind}", engine
    yield "torch.save + fsync", PeerSaver(TorchSave(folder / "torch"))
    for name, peer in (
        ("DCP async_save, thread", DcpAsync(folder / "dcp-thread")),
        ("DCP async_save, thread, kept staging memory", DcpAsync(folder / "dcp-stager", cached=True)),
        ("DCP async_save, process", DcpAsync(folder / "dcp-process", process=True)),
    ):
        stack.callback(peer.close)
        yield name, PeerSaver(peer)


def _train(loop: PlainLoop, size: Size, saver: Saver, every: int) -> Callable[[], float]:
    return lambda: loop.train(size.iterations, saver, every)


def _label(name: str, every: int) -> str:
    return f"{name}, every step" if every == 1 else f"{name}, every {every}"


def _note(name: str) -> str:
    if "Lightning" in name:
        return "not synced"
    return ""


class _Lightning:
    """Fits of the same model; every one starts from scratch."""

    def __init__(self, folder: Path, size: Size, batch_size: int) -> None:
        self._folder = folder
        self._size = size
        self._batch_size = batch_size
        self._data = seeded_data(batch_size * size.iterations, INPUTS)
        self._runs = 0

    def without(self) -> float:
        return self._fit("none", lambda _: {})

    def model_checkpoint(self, every: int) -> Callable[[], float]:
        return lambda: self._fit("lightning", lambda folder: {"callbacks": [_model_checkpoint(folder, every)]})

    def asynchronous(self, every: int) -> Callable[[], float]:
        return lambda: self._fit(
            "async",
            lambda folder: {"callbacks": [_model_checkpoint(folder, every)], "plugins": [AsyncCheckpointIO()]},
        )

    def adaptive(self, every: int) -> Callable[[], float]:
        return lambda: self._fit(
            "adaptive",
            lambda folder: {"callbacks": [AdaptiveCheckpoint(str(folder), every_n_steps=every, at_end=False)]},
        )

    def _fit(self, name: str, options: Callable[[Path], dict[str, list[Any]]]) -> float:
        self._runs += 1
        folder = self._folder / f"{name}-{self._runs}"
        module = Module(self._size.parameters, INPUTS)
        fit = Fit(str(folder), module, self._data, self._batch_size, self._size.iterations, **options(folder))
        fit.run()
        return fit.seconds_until_written


def _model_checkpoint(folder: Path, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=1)
