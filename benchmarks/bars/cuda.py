"""What a snapshot of GPU tensors costs: host time, time of the training, and how fast the bytes cross."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import save_timed
from benchmarks.measure import interleave
from benchmarks.memory_saver import LINGER_SECONDS
from benchmarks.peers import DcpAsync, Peer, TorchSave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import (
    State,
    everything_lazy,
    gpt2_shapes,
    gpt2_state,
    many_tensors_state,
    state_bytes,
    tensors,
)
from ckpt_engine import Checkpointer
from ckpt_engine.snapshot.save_request import SaveHandle

TITLE = "GPU: what a snapshot of CUDA tensors costs"
NEEDS_GPU = True
STALL_LIMIT = 0.25
COST_LIMIT = 0.25
RATE_LIMIT = 0.9
MANY_LIMIT_MS = 30.0
FENCE_LIMIT_MS = 2.0
EVERY_LIMIT_PERCENT = 1.0
RESTORE_LIMIT = 0.8
STEP_COPIES = 3.0
"""Length of a step of training in pinned copies of the smaller state."""
STEP_SECONDS = 0.5
"""Length of a step with the larger state."""
CHILD_SECONDS = 300.0
ROOT = Path(__file__).resolve().parents[2]
NONE, LAZY, EAGER, PINNED = "no snapshot", "engine lazy", "engine eager", "hand-made pinned copy"


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure.

    Args:
        width, layers: of a GPT-2 in bf16 with fp32 weights and moments, whose snapshots stay in memory: writing them
            would take the time of a disk.
        steps: of it, with a snapshot after each but the last.
    """

    nbytes: int
    width: int
    layers: int
    steps: int
    many: int
    rounds: int
    peer_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 1600, 48, 6, 10_000, 7, 3),
    Scale.QUICK: Size(1_493_000_000, 1600, 48, 4, 10_000, 3, 1),
    Scale.TINY: Size(4_000_000, 32, 2, 2, 100, 2, 1),
}


def device() -> torch.device:
    """The GPU; without one the code of this bar can still be run, on host tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(bench: Bench) -> BarResult:
    """Measure steps of training with snapshots, interleaved with steps without any."""
    size, where = SIZES[bench.scale], device()
    checks: list[Check] = []
    series: list[Series] = []
    notes = ["Peers write to the disk; DCP goes on with that behind training."]
    with bench.scratch("cuda") as folder:
        for measure in (_one_snapshot, _every_step, _many):
            found = measure(folder / measure.__name__, where, size, bench, notes)
            checks += found[0]
            series += found[1]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "none: host tensors, no result"
    return BarResult(
        "cuda",
        TITLE,
        {
            "device": name,
            "smaller state": "GPT-2 with Adam on the device, fp32; step counts on the host; snapshots go to the disk",
            "larger state": "1.5 billion parameters in bf16, with fp32 weights and moments; snapshots stay in memory",
            "training": "matrix products, then an in-place change of every tensor, one call for each dtype, as "
            "optimizers do it; nothing waits for the device",
            "a step": f"{STEP_COPIES:g} pinned copies of the smaller state; {STEP_SECONDS:g} s with the larger one. "
            "An update that follows sooner than the bytes can cross waits for them",
            "cost": "time of steps with a snapshot between each two, less that of as many without in the same "
            "round, for each snapshot; in % of a step",
            "stall": "time that the call keeps the host from queueing more work",
        },
        tuple(checks),
        tuple(series),
        tuple(notes),
    )


Measured = tuple[list[Check], list[Series]]


def _one_snapshot(folder: Path, where: torch.device, size: Size, bench: Bench, notes: list[str]) -> Measured:
    """One snapshot between two steps, beside other ways to take it."""
    state = moved(gpt2_state(size.nbytes), where)
    label = f"{state_bytes(state) / 1e9:.3g} GB"
    with ExitStack() as stack:
        savers = dict(_savers(folder, stack, state, notes))
        pinned, engine = savers[PINNED], savers[LAZY].save.__self__  # type: ignore[attr-defined]
        pinned.save(0)
        training = Training(state, where, STEP_COPIES * min(pinned.save(0) for _ in range(3)))
        candidates: dict[str, Callable[[], float]] = {NONE: lambda: training.timed(2)}
        for name, way in savers.items():
            candidates[name] = lambda name=name, way=way: training.timed(2, way, name, saves=1)  # type: ignore[misc]
        for name in (NONE, PINNED, LAZY, LAZY, LAZY, EAGER):
            candidates[name]()
        training.forget()
        slow = {name: size.peer_rounds for name in savers if name not in (PINNED, LAZY, EAGER)}
        taken = interleave(candidates, size.rounds, at_most=slow, tick=bench.say)
        crossings = [engine.crossing(training.next_step()) for _ in range(size.rounds)]
        copies = [pinned.save(0) for _ in range(size.rounds)]
    costs = {name: [a - b for a, b in zip(taken[name], taken[NONE], strict=False)] for name in savers}
    stalls = training.stalls
    checks = [
        Check(
            f"{label}: host stall, lazy / pinned copy",
            "x",
            "at most",
            STALL_LIMIT,
            ratios(stalls[LAZY], stalls[PINNED]),
        ),
        Check(f"{label}: cost, lazy / pinned copy", "x", "at most", COST_LIMIT, ratios(costs[LAZY], costs[PINNED])),
        Check(
            f"{label}: rate of crossing, engine / pinned copy", "x", "at least", RATE_LIMIT, ratios(copies, crossings)
        ),
        Check(f"{label}: fence", "ms", "at most", FENCE_LIMIT_MS, _ms(training.fences[LAZY])),
    ]
    series = [
        Series(f"{label}: two steps", "ms", _ms(taken[NONE])),
        *_rates(label, state_bytes(state), crossings, copies),
    ]
    for name in savers:
        series.append(Series(f"{label}: {name}, host stall", "ms", _ms(stalls[name])))
        series.append(Series(f"{label}: {name}, cost of a snapshot", "ms", _ms(costs[name])))
    return checks, series


def _every_step(folder: Path, where: torch.device, size: Size, bench: Bench, notes: list[str]) -> Measured:
    """A snapshot in memory after every step, and its way back."""
    state = mixed_state(size, where)
    nbytes = state_bytes(state)
    label = f"{nbytes / 1e9:.3g} GB"
    pinned = Pinned(state)
    with Checkpointer({"tiers": ["memory", str(folder)]}) as checkpointer:
        engine = Engine(checkpointer, state, lazy=True, durable=False)
        way = Way(engine.save, checkpointer.before_update, engine.finish)
        training = Training(state, where, STEP_SECONDS)
        candidates: dict[str, Callable[[], float]] = {
            NONE: lambda: training.timed(size.steps),
            LAZY: lambda: training.timed(size.steps, way, LAZY, saves=size.steps - 1),
        }
        for name in (NONE, LAZY):
            candidates[name]()
        training.forget()
        taken = interleave(candidates, max(3, size.rounds // 2), tick=bench.say)
        crossings = [engine.crossing(training.next_step()) for _ in range(3)]
        copies = [pinned.save(0) for _ in range(3)]
    bench.say("restoring from the writer of a trainer that was killed")
    backs = [pinned.back() for _ in range(3)]
    loads = _loads_from_memory(folder / "killed", state, size, bench.scale, where)
    share = size.steps / (size.steps - 1)
    percent = tuple(100 * share * (a / b - 1) for a, b in zip(taken[LAZY], taken[NONE], strict=True))
    checks = [
        Check(f"{label}: a snapshot in memory every {STEP_SECONDS:g} s", "%", "at most", EVERY_LIMIT_PERCENT, percent),
        Check(f"{label}: fence", "ms", "at most", FENCE_LIMIT_MS, _ms(training.fences[LAZY])),
        Check(
            f"{label}: rate of crossing, engine / pinned copy", "x", "at least", RATE_LIMIT, ratios(copies, crossings)
        ),
        Check(
            f"{label}: restoring from memory / copy to the device", "x", "at least", RESTORE_LIMIT, ratios(backs, loads)
        ),
    ]
    return checks, [
        *_rates(label, nbytes, crossings, copies),
        Series(f"{label}: {LAZY}, host stall", "ms", _ms(training.stalls[LAZY])),
        Series(f"{label}: {size.steps} steps", "ms", _ms(taken[NONE])),
        Series(f"{label}: restoring from memory", "GB/s", tuple(nbytes / s / 1e9 for s in loads)),
        Series(f"{label}: copy to the device", "GB/s", tuple(nbytes / s / 1e9 for s in backs)),
    ]


def _loads_from_memory(folder: Path, state: State, size: Size, scale: Scale, where: torch.device) -> list[float]:
    """Seconds until the state that the writer of a killed trainer keeps is on the device, every byte verified."""
    command = [sys.executable, "-m", "benchmarks.bars.cuda", str(folder), scale.value]
    status = subprocess.run(command, cwd=ROOT, timeout=CHILD_SECONDS, check=False).returncode
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the trainer to be killed ended with status {status}")
    loads = []
    with Checkpointer(tiers=["memory", str(folder)], linger=LINGER_SECONDS) as checkpointer:
        for _ in range(3):
            for tensor in tensors(state):
                tensor.zero_()
            synchronize()
            began = time.perf_counter()
            checkpointer.load(into=state)
            synchronize()
            loads.append(time.perf_counter() - began)
            if checkpointer.loaded is None or not checkpointer.loaded.from_memory:
                raise RuntimeError("the state did not come from memory")
        expected = mixed_state(size, where)
        if not all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(expected), strict=True)):
            raise RuntimeError("the state that came back is not the one that was saved")
        checkpointer.engine.start()  # ends the writer that lingers
    return loads


def _die(folder: str, scale: str) -> None:
    """Keep the larger state in memory, and get killed."""
    checkpointer = Checkpointer(tiers=["memory", folder], linger=LINGER_SECONDS)
    state = mixed_state(SIZES[Scale(scale)], device())
    checkpointer.prepare(state)
    checkpointer.save(state, step=1, durable=False).wait(CHILD_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _many(folder: Path, where: torch.device, size: Size, bench: Bench, notes: list[str]) -> Measured:
    state = moved(many_tensors_state(size.many, 20_000 * size.many), where)
    count = sum(1 for _ in tensors(state))
    bench.say(f"{count:,} tensors")
    found = []
    with Checkpointer(folder) as checkpointer:
        for step in range(1, 3 * size.rounds + 3):
            seconds, handle = save_timed(checkpointer, state, step, lazy=everything_lazy)
            checkpointer.before_update()
            handle.wait(600.0)
            found.append(seconds)
    return [Check(f"{count:,} tensors: host stall", "ms", "at most", MANY_LIMIT_MS, _ms(found[2:]))], []


def mixed_state(size: Size, where: torch.device) -> State:
    """A model in bf16 with fp32 weights and moments, made on the device."""
    draw = torch.Generator(device=where).manual_seed(1)
    model: dict[str, torch.Tensor] = {}
    optimizer: dict[int, dict[str, torch.Tensor]] = {}
    for index, (name, shape) in enumerate(gpt2_shapes(layers=size.layers, width=size.width)):
        parts = [torch.randn(shape, generator=draw, device=where) for _ in range(3)]
        model[name] = parts[0].bfloat16()
        keys = ("weight", "exp_avg", "exp_avg_sq")
        optimizer[index] = {"step": torch.tensor(1.0), **dict(zip(keys, parts, strict=True))}
    return {"model": model, "optimizer": {"state": optimizer}}


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

    def back(self) -> float:
        """Seconds of the copies to where the tensors came from."""
        synchronize()
        began = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            source.copy_(target, non_blocking=True)
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
        self.checkpointer.engine._pipeline.stager.finish(600.0)
        seconds = time.perf_counter() - began
        self.finish()
        return seconds


def _savers(folder: Path, stack: ExitStack, state: State, notes: list[str]) -> Iterator[tuple[str, Way]]:
    yield PINNED, Way(Pinned(state).save)
    for name, lazy in ((LAZY, True), (EAGER, False)):
        checkpointer = stack.enter_context(Checkpointer(str(folder / name)))
        engine = Engine(checkpointer, state, lazy=lazy, durable=True)
        yield name, Way(engine.save, checkpointer.before_update, engine.finish)
    peers: tuple[tuple[str, Peer], ...] = (
        ("torch.save + fsync", TorchSave(folder / "torch")),
        ("DCP async_save, thread", DcpAsync(folder / "dcp")),
        ("DCP async_save, thread, kept staging memory", DcpAsync(folder / "dcp-kept", cached=True)),
    )
    for name, peer in peers:
        if not _saves_again(peer, state, name, notes):
            continue
        stack.callback(peer.close)
        yield name, Way(lambda step, peer=peer: peer.save(state, step), finish=peer.finish)  # type: ignore[misc]


def _saves_again(peer: Peer, state: State, name: str, notes: list[str]) -> bool:
    """Whether a peer saves twice with this torch; if not, the notes say so, and the others are measured."""
    try:
        for step in (1, 2):
            peer.save(state, step)
            peer.finish()
    except Exception as err:  # noqa: BLE001 - whatever a peer raises
        notes.append(f"{name} is left out: with this torch it raises {type(err).__name__}: {err}.")
        return False
    return True


class Training:
    """Steps of a chosen length: matrix products, the fence, and an in-place change of every tensor.

    Attributes:
        stalls, fences: seconds of the host in `save`, and in the fence after it, by way.
    """

    def __init__(self, state: State, where: torch.device, seconds: float) -> None:
        self._all: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors(state):
            if tensor.dim():
                self._all.setdefault(tensor.dtype, []).append(tensor)
        side = 8192 if where.type == "cuda" else 128
        self._matrix = torch.randn(side, side, device=where).bfloat16()
        self._out = torch.empty_like(self._matrix)
        self._counter = iter(range(1, 1_000_000))
        self.stalls: dict[str, list[float]] = {}
        self.fences: dict[str, list[float]] = {}
        # Two lengths, because a step takes the time of its update too.
        few, many = 16, 64
        self._products = few
        self.timed(1)
        short = self.timed(4) / 4
        self._products = many
        product = max(1e-7, (self.timed(4) / 4 - short) / (many - few))
        self._products = max(1, min(20_000, few + round((seconds - short) / product)))

    def next_step(self) -> int:
        return next(self._counter)

    def forget(self) -> None:
        """What was measured so far."""
        self.stalls.clear()
        self.fences.clear()

    def timed(self, count: int, way: Way | None = None, name: str = "", saves: int = 0) -> float:
        """Seconds of `count` steps, with a snapshot after each of the first `saves`."""
        if way is not None:
            way.finish()
        synchronize()
        began = time.perf_counter()
        for number in range(count):
            for _ in range(self._products):
                torch.mm(self._matrix, self._matrix, out=self._out)
            if way is not None:
                fenced = time.perf_counter()
                way.before_update()
                if number:
                    self.fences.setdefault(name, []).append(time.perf_counter() - fenced)
            for alike in self._all.values():
                torch._foreach_add_(alike, 1e-6)
            if way is not None and number < saves:
                self.stalls.setdefault(name, []).append(way.save(self.next_step()))
        synchronize()
        return time.perf_counter() - began


def _rates(label: str, nbytes: int, crossings: list[float], copies: list[float]) -> list[Series]:
    return [
        Series(f"{label}: crossing, engine", "GB/s", tuple(nbytes / s / 1e9 for s in crossings)),
        Series(f"{label}: crossing, pinned copy", "GB/s", tuple(nbytes / s / 1e9 for s in copies)),
    ]


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(1e3 * s for s in seconds)


def synchronize() -> None:
    """Wait until the device has nothing to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    _die(*sys.argv[1:])
