"""What many small tensors cost beside a copy and a file that are made by hand; and what a million of them cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.disk import warm
from benchmarks.engine import save_timed
from benchmarks.handmade import HandMade
from benchmarks.measure import CpuMeter, children, each_per, interleave, started_since, timed
from benchmarks.peers import DcpAsync
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, change_everything, flat_state, many_tensors_state, state_bytes, tensors
from ckpt_engine import Checkpointer

TITLE = "Many tensors: bookkeeping per tensor"
STALL_LIMIT, CPU_LIMIT, LOAD_LIMIT = 1.2, 1.3, 1.3
"""In one `_foreach_copy_`; in what the hand-made copy and write, and their load, take."""
MOST = {"stall": 1.0, "durable": 5.0, "load": 5.0}
"""Seconds of the large number of tensors."""
METADATA_LIMIT = 20.0
"""Bytes for each tensor that a snapshot of unchanged structure has beside its data."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure: two states of `tensors`, and one of so many that they are only stored in packs."""

    tensors: int
    nbytes: int
    rounds: int
    slow_rounds: int
    most: int
    most_rounds: int


SIZES = {
    Scale.FULL: Size(10_000, 200_000_000, 21, 5, 1_000_000, 5),
    Scale.QUICK: Size(10_000, 200_000_000, 7, 1, 1_000_000, 1),
    Scale.TINY: Size(400, 400_000, 2, 0, 5_000, 1),
}
_MOST_BYTES = 100


class _Side:
    """One state: its reference copy, the hand-made way to save and load it, and ours."""

    def __init__(self, name: str, state: State, folder: Path) -> None:
        self.name, self.state, self.gigabytes = name, state, state_bytes(state) / 1e9
        before = children()
        self._folder, self.ours = folder / "ours", Checkpointer(folder / "ours", keep={"last": 2})
        self.hand = HandMade(folder / "hand", state)
        self._hand_file, self._copy = folder / "hand" / "0", foreach_copy(state)
        self._steps = iter(range(1, 1_000_000))
        self.ours.prepare(state)
        self._writer = started_since(before)
        self.cpu: dict[str, list[float]] = {"ours": [], "hand": []}

    def candidates(self) -> dict[str, Callable[[], float]]:
        return {f"{self.name} {what}": call for what, call in self._calls()}

    def _calls(self) -> Iterator[tuple[str, Callable[[], float]]]:
        yield "copy", self._copy
        yield "save", self._save
        yield "hand save", self._save_by_hand
        yield "load", self._load
        yield "hand load", self._load_by_hand

    def _save(self) -> float:
        change_everything(self.state)  # what did not change would not be copied
        meter = CpuMeter(self._writer)
        began = meter.read()
        seconds, handle = save_timed(self.ours, self.state, next(self._steps))
        handle.wait()
        self.cpu["ours"].append(meter.read() - began)
        return seconds

    def _save_by_hand(self) -> float:
        change_everything(self.state)
        meter = CpuMeter()
        began = meter.read()
        seconds = timed(lambda: self.hand.save(self.state, 0))
        self.hand.finish()
        self.cpu["hand"].append(meter.read() - began)
        return seconds

    def _load(self) -> float:
        for file in (self._folder / "data").iterdir():
            warm(file)
        with Checkpointer(self._folder) as other:
            return timed(other.load)

    def _load_by_hand(self) -> float:
        """One read, and each tensor in memory of its own."""
        warm(self._hand_file)

        def load() -> list[torch.Tensor]:
            flat = torch.from_file(str(self._hand_file), size=self._hand_file.stat().st_size, dtype=torch.uint8)
            found, at = [], 0
            for tensor in tensors(self.state):
                nbytes = tensor.numel() * tensor.element_size()
                found.append(flat[at : at + nbytes].view(tensor.dtype).view(tensor.shape).clone())
                at += -(-nbytes // 64) * 64
            return found

        return timed(load)

    def checks(self, taken: dict[str, list[float]]) -> tuple[Check, ...]:
        def check(what: str, limit: float, ours: list[float], other: list[float]) -> Check:
            return Check(f"{self.name}: {what}", "x", "at most", limit, ratios(ours, other))

        seconds = {what: taken[f"{self.name} {what}"] for what, _ in self._calls()}
        return (
            check("stall / _foreach_copy_", STALL_LIMIT, seconds["save"], seconds["copy"]),
            check("processor time / by hand", CPU_LIMIT, self.cpu["ours"], self.cpu["hand"]),
            check("load / by hand", LOAD_LIMIT, seconds["load"], seconds["hand load"]),
        )

    def series(self, taken: dict[str, list[float]]) -> Iterator[Series]:
        labels = {
            "copy": "_foreach_copy_",
            "save": "eager save",
            "hand save": "copy by hand",
            "load": "load",
            "hand load": "load by hand",
        }
        for what, label in labels.items():
            yield Series(f"{self.name}: {label}", "ms", tuple(1e3 * s for s in taken[f"{self.name} {what}"]))
        for who, label in (("ours", "ours"), ("hand", "by hand")):
            samples = each_per(self.cpu[who], self.gigabytes)
            yield Series(f"{self.name}: processor time, {label}", "CPU-s/GB", samples, "trainer and writer, to durable")

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        for samples in self.cpu.values():
            samples.clear()

    def close(self) -> None:
        self.ours.close()
        self.hand.close()


def run(bench: Bench) -> BarResult:
    """Measure two states of 10,000 tensors, interleaved with their references, and then a million tensors."""
    size = SIZES[bench.scale]
    states = {
        "adam": many_tensors_state(size.tensors, size.nbytes),
        "flat": flat_state(size.tensors, size.nbytes),
    }
    with bench.scratch("many-tensors") as folder:
        sides = [_Side(name, state, folder / name) for name, state in states.items()]
        try:
            candidates = {name: call for side in sides for name, call in side.candidates().items()}
            for _ in range(2):
                for candidate in candidates.values():
                    candidate()
            for side in sides:
                side.forget()
            if size.slow_rounds:
                candidates["DCP"] = _dcp(folder / "dcp", states["adam"])
            taken = interleave(candidates, size.rounds, at_most={"DCP": size.slow_rounds}, tick=bench.say)
        finally:
            for side in sides:
                side.close()
        most = _most(size, folder / "most", bench.say)
    dcp = Series("adam: DCP async_save returns after", "ms", tuple(1e3 * s for s in taken.get("DCP", ())))
    return BarResult(
        "many-tensors",
        TITLE,
        {
            "adam": f"{_about(states['adam'])}: parameters, two moments and a step count each, as in `state_dict`",
            "flat": f"{_about(states['flat'])}: equal tensors in one dict",
            "most": f"{size.most:,} tensors of {_MOST_BYTES} bytes in one dict",
            "reference": "one `_foreach_copy_` into touched views of one flat buffer",
            "by hand": "a copy of each tensor into a buffer, one direct write of it; one read, and a copy for each",
            "snapshot": "eager, steady: the one before is durable, and every element has changed since",
            "load": "of a file in the page cache",
        },
        (*(check for side in sides for check in side.checks(taken)), *_most_checks(most)),
        tuple([one for side in sides for one in side.series(taken)] + ([dcp] if dcp.samples else [])),
    )


def _most(size: Size, folder: Path, say: Callable[[str], object]) -> dict[str, list[float]]:
    """Seconds of each part, and bytes of metadata for each tensor, of snapshots of unchanged structure."""
    state = flat_state(size.most, size.most * _MOST_BYTES)
    found: dict[str, list[float]] = {"stall": [], "durable": [], "load": [], "metadata": []}
    with Checkpointer(folder, keep={"last": 1_000}) as ckpt:
        for step in range(size.most_rounds + 3):
            say(f"{size.most:,} tensors · {step + 1}")
            torch._foreach_add_(list(tensors(state)), 1.0)
            before = _disk_bytes(folder)
            stall = durable = 0.0

            def save(step: int = step) -> Any:
                nonlocal stall
                stall, handle = save_timed(ckpt, state, step)
                return handle.wait()

            durable = timed(save)
            if step < 3:
                continue  # the first one plans, the second one fills a new slot, the third one learns what is the same
            found["stall"].append(stall)
            found["durable"].append(durable)
            found["metadata"].append((_disk_bytes(folder) - before - state_bytes(state)) / size.most)
    for _ in range(size.most_rounds):
        with Checkpointer(folder) as other:
            found["load"].append(timed(other.load))
    return found


def _most_checks(found: dict[str, list[float]]) -> Iterator[Check]:
    for what, limit in MOST.items():
        yield Check(f"most: {what}", "s", "at most", limit, tuple(found[what]))
    yield Check("most: metadata for each tensor", "B", "at most", METADATA_LIMIT, tuple(found["metadata"]))


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def foreach_copy(state: State) -> Callable[[], float]:
    """The reference: all tensors of `state` into warm preallocated views, in one call."""
    sources = list(tensors(state))
    buffer = torch.zeros(sum(t.numel() for t in sources))
    views, at = [], 0
    for source in sources:
        views.append(buffer[at : at + source.numel()].view(source.shape))
        at += source.numel()
    return lambda: timed(lambda: torch._foreach_copy_(views, sources))


def _dcp(folder: Path, state: State) -> Callable[[], float]:
    peer = DcpAsync(folder)

    def save() -> float:
        seconds = peer.save(state, 0)
        peer.finish()
        return seconds

    return save


def _about(state: State) -> str:
    return f"{sum(1 for _ in tensors(state)):,} tensors, {state_bytes(state) / 1e6:.0f} MB"
