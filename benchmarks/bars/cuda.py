"""What a snapshot of GPU tensors costs: host time, time of the training, and how fast the bytes cross."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import save_timed
from benchmarks.measure import interleave
from benchmarks.peers import DcpAsync, Peer, TorchSave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, everything_lazy, gpt2_state, many_tensors_state, state_bytes, tensors
from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.save_request import SaveHandle

TITLE = "GPU: what a snapshot of CUDA tensors costs"
NEEDS_GPU = True
STALL_LIMIT = 0.25
COST_LIMIT = 0.25
RATE_LIMIT = 0.8
MANY_LIMIT_MS = 30.0
WINDOW_COPIES = 3.0
"""Length of the training that is measured around a snapshot, in copies of the state."""
NONE, LAZY, EAGER, PINNED = "no snapshot", "engine lazy", "engine eager", "hand-made pinned copy"


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        large_bytes: of a second state, whose snapshots stay in memory: writing them would take the time of a disk.
    """

    nbytes: int
    large_bytes: int
    many: int
    rounds: int
    peer_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 20_000_000_000, 10_000, 9, 3),
    Scale.QUICK: Size(1_493_000_000, 20_000_000_000, 10_000, 3, 1),
    Scale.TINY: Size(4_000_000, 8_000_000, 100, 2, 1),
}


def device() -> torch.device:
    """The GPU; without one the code of this bar can still be run, on host tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(bench: Bench) -> BarResult:
    """Measure windows of training with one snapshot each, interleaved with windows without any."""
    size, where = SIZES[bench.scale], device()
    checks: list[Check] = []
    series: list[Series] = []
    with bench.scratch("cuda") as folder:
        for nbytes, durable in ((size.nbytes, True), (size.large_bytes, False)):
            state = moved(gpt2_state(nbytes), where)
            label = f"{state_bytes(state) / 1e9:.3g} GB"
            with ExitStack() as stack:
                savers = dict(_savers(folder / label, stack, state, durable=durable))
                window = Window(state, where, next(iter(savers.values())))
                found = window.measure(savers, size, bench)
            checks += found.checks(label)
            series += found.series(label)
            del state, savers, window, found
        many = moved(many_tensors_state(size.many, 20_000 * size.many), where)
        stalls = _stalls(folder / "many", many, 3 * size.rounds)
        count = sum(1 for _ in tensors(many))
        checks.append(Check(f"{count:,} tensors: host stall", "ms", "at most", MANY_LIMIT_MS, stalls))
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "none: host tensors, no result"
    return BarResult(
        "cuda",
        TITLE,
        {
            "device": name,
            "state": "GPT-2 with Adam on the device, fp32; step counts on the host",
            "training": "matrix products and an in-place change of every tensor; nothing waits for the device",
            "window": f"the steps of {WINDOW_COPIES:g} pinned copies of the state, one snapshot after the first",
            "cost": "time of a window with a snapshot, less that of one without in the same round",
            "stall": "time that the call keeps the host from queueing more work",
            "larger state": "its snapshots go to the memory tier, not to a disk",
        },
        tuple(checks),
        tuple(series),
        ("Peers write to the disk; DCP goes on with that behind training.",),
    )


def moved(node: Any, where: torch.device) -> Any:
    """A state on a device; scalars stay where Adam keeps them, on the host."""
    if isinstance(node, torch.Tensor):
        return node.to(where) if node.dim() else node
    if isinstance(node, dict):
        return {key: moved(value, where) for key, value in node.items()}
    return node


@dataclass(slots=True)
class Way:
    """One way to save.

    Args:
        save: seconds of the host until training may go on.
        before_update: the fence.
        finish: waits until the next save is as the first.
    """

    save: Callable[[int], float]
    before_update: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None


class Pinned:
    """One asynchronous copy per tensor into page-locked memory, and a wait for all of them."""

    def __init__(self, state: State) -> None:
        self._sources = list(tensors(state))
        pin = torch.cuda.is_available()
        self._targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for t in self._sources]

    def save(self, step: int) -> float:
        began = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
        return time.perf_counter() - began


class Engine:
    """The engine, with the time until a snapshot is in the arena."""

    def __init__(self, checkpointer: Checkpointer, state: State, *, lazy: bool, durable: bool) -> None:
        self.checkpointer = checkpointer
        self._state = state
        self._lazy = everything_lazy if lazy else None
        self._durable = durable
        self._handle: SaveHandle | None = None
        checkpointer.prepare(state, lazy=self._lazy)

    def save(self, step: int) -> float:
        began = time.perf_counter()
        handle = self.checkpointer.save(self._state, step=step, lazy=self._lazy, durable=self._durable)
        seconds = time.perf_counter() - began
        if handle.skipped is not None:
            raise RuntimeError(f"the snapshot of step {step} was skipped: {handle.skipped}")
        self._handle = handle
        return seconds

    def finish(self) -> None:
        if self._handle is not None:
            self._handle.wait(600.0)

    def crossing(self, step: int) -> float:
        """Seconds from `save` until every byte is in host memory, with an idle device."""
        synchronize()
        began = time.perf_counter()
        self.save(step)
        self.checkpointer.before_update()
        self.checkpointer.engine._pipeline._hand_over(600.0)
        seconds = time.perf_counter() - began
        self.finish()
        return seconds


def _savers(folder: Path, stack: ExitStack, state: State, *, durable: bool) -> Iterator[tuple[str, Way]]:
    pinned = Pinned(state)
    yield PINNED, Way(pinned.save)
    for name, lazy in ((LAZY, True), (EAGER, False)) if durable else ((LAZY, True),):
        tiers = [str(folder / name)] if durable else ["memory", str(folder / name)]
        engine = Engine(stack.enter_context(Checkpointer({"tiers": tiers})), state, lazy=lazy, durable=durable)
        yield name, Way(engine.save, engine.checkpointer.before_update, engine.finish)
    if durable:
        folder.mkdir(parents=True, exist_ok=True)
        peers: tuple[tuple[str, Peer], ...] = (
            ("torch.save + fsync", TorchSave(folder / "torch")),
            ("DCP async_save, thread", DcpAsync(folder / "dcp")),
            ("DCP async_save, thread, kept staging memory", DcpAsync(folder / "dcp-kept", cached=True)),
        )
        for name, peer in peers:
            stack.callback(peer.close)
            yield name, Way(lambda step, peer=peer: peer.save(state, step), finish=peer.finish)  # type: ignore[misc]


class Window:
    """Steps of training of a chosen length in all, with a snapshot after the first."""

    def __init__(self, state: State, where: torch.device, pinned: Way) -> None:
        self._all = [t for t in tensors(state) if t.dim()]
        self._nbytes = state_bytes(state)
        side = 8192 if where.type == "cuda" else 128
        self._matrix = torch.randn(side, side, device=where).bfloat16()
        self._out = torch.empty_like(self._matrix)
        self._counter = iter(range(1, 1_000_000))
        self._stalls: dict[str, list[float]] = {}
        pinned.save(0)
        copy = min(pinned.save(0) for _ in range(3))
        self.steps = 4
        self._steps(1)
        self.steps = max(2, min(2000, round(WINDOW_COPIES * copy / (self._timed(4) / 4))))

    def measure(self, savers: dict[str, Way], size: Size, bench: Bench) -> Found:
        """Interleaved windows, and bare crossings."""
        candidates: dict[str, Callable[[], float]] = {NONE: lambda: self._timed(self.steps)}
        for name, way in savers.items():
            candidates[name] = lambda name=name, way=way: self._with(name, way)  # type: ignore[misc]
        for name in (NONE, PINNED, LAZY):
            candidates[name]()
        self._stalls.clear()
        slow = {name: size.peer_rounds for name in savers if name not in (PINNED, LAZY, EAGER)}
        taken = interleave(candidates, size.rounds, at_most=slow, tick=bench.say)
        engine = savers[LAZY].save.__self__  # type: ignore[attr-defined]
        crossings = [engine.crossing(next(self._counter)) for _ in range(size.rounds)]
        copies = [savers[PINNED].save(0) for _ in range(size.rounds)]
        return Found(self._nbytes, taken, self._stalls, crossings, copies)

    def _steps(self, count: int, way: Way | None = None, name: str = "") -> None:
        for number in range(count):
            torch.mm(self._matrix, self._matrix, out=self._out)
            if way is not None:
                way.before_update()
            torch._foreach_add_(self._all, 1e-6)
            if way is not None and number == 0:
                self._stalls.setdefault(name, []).append(way.save(next(self._counter)))

    def _timed(self, count: int, way: Way | None = None, name: str = "") -> float:
        synchronize()
        began = time.perf_counter()
        self._steps(count, way, name)
        synchronize()
        return time.perf_counter() - began

    def _with(self, name: str, way: Way) -> float:
        seconds = self._timed(self.steps, way, name)
        way.before_update()
        way.finish()
        return seconds


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of one state."""

    nbytes: int
    windows: dict[str, list[float]]
    stalls: dict[str, list[float]]
    crossings: list[float]
    copies: list[float]

    def checks(self, label: str) -> list[Check]:
        return [
            Check(
                f"{label}: host stall, lazy / pinned copy",
                "x",
                "at most",
                STALL_LIMIT,
                ratios(self.stalls[LAZY], self.stalls[PINNED]),
            ),
            Check(
                f"{label}: cost, lazy / pinned copy",
                "x",
                "at most",
                COST_LIMIT,
                ratios(self._costs(LAZY), self._costs(PINNED)),
            ),
            Check(
                f"{label}: rate of crossing, engine / pinned copy",
                "x",
                "at least",
                RATE_LIMIT,
                ratios(self.copies, self.crossings),
            ),
        ]

    def series(self, label: str) -> list[Series]:
        found = [
            Series(f"{label}: window without a snapshot", "ms", _ms(self.windows[NONE])),
            Series(f"{label}: crossing, engine", "GB/s", tuple(self.nbytes / s / 1e9 for s in self.crossings)),
            Series(f"{label}: crossing, pinned copy", "GB/s", tuple(self.nbytes / s / 1e9 for s in self.copies)),
        ]
        for name, stalls in self.stalls.items():
            found.append(Series(f"{label}: {name}, host stall", "ms", _ms(stalls)))
            found.append(Series(f"{label}: {name}, cost of a snapshot", "ms", _ms(self._costs(name))))
        return found

    def _costs(self, name: str) -> list[float]:
        return [a - b for a, b in zip(self.windows[name], self.windows[NONE], strict=False)]


def _stalls(folder: Path, state: State, rounds: int) -> tuple[float, ...]:
    """Milliseconds of host time of lazy saves of many tensors."""
    with Checkpointer(folder) as checkpointer:
        found = []
        for step in range(1, rounds + 3):
            seconds, handle = save_timed(checkpointer, state, step, lazy=everything_lazy)
            checkpointer.before_update()
            handle.wait(600.0)
            found.append(seconds)
    return _ms(found[2:])


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(1e3 * s for s in seconds)


def synchronize() -> None:
    """Wait until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
