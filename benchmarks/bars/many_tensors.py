"""What many small tensors cost: bookkeeping per tensor, against one `_foreach_copy_` of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine import save_timed
from benchmarks.measure import interleave, timed
from benchmarks.peers import DcpAsync
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, change_everything, flat_state, many_tensors_state, state_bytes, tensors
from ckpt_engine import Checkpointer

TITLE = "Many tensors: bookkeeping per tensor"
LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    tensors: int
    nbytes: int
    rounds: int
    slow_rounds: int


SIZES = {
    Scale.FULL: Size(10_000, 200_000_000, 21, 5),
    Scale.QUICK: Size(10_000, 200_000_000, 7, 1),
    Scale.TINY: Size(400, 400_000, 2, 0),
}


def run(bench: Bench) -> BarResult:
    """Measure `save` of 10,000 tensors in two shapes, interleaved with the reference copies of the same tensors."""
    size = SIZES[bench.scale]
    adam, flat = many_tensors_state(size.tensors, size.nbytes), flat_state(size.tensors, size.nbytes)
    with bench.scratch("many-tensors") as folder:
        one, two = Checkpointer(folder / "adam"), Checkpointer(folder / "flat")
        with one, two:
            candidates: dict[str, Callable[[], float]] = {
                "adam copy": foreach_copy(adam),
                "adam save": _saver(one, adam),
                "flat copy": foreach_copy(flat),
                "flat save": _saver(two, flat),
            }
            for _ in range(3):
                for candidate in candidates.values():
                    candidate()
            if size.slow_rounds:
                candidates["DCP"] = _dcp(folder / "dcp", adam)
            taken = interleave(candidates, size.rounds, at_most={"DCP": size.slow_rounds}, tick=bench.say)
    return BarResult(
        "many-tensors",
        TITLE,
        {
            "adam": f"{_about(adam)}: parameters, two moments and a step count each, nested as in `state_dict`",
            "flat": f"{_about(flat)}: equal tensors in one dict",
            "reference": "one `_foreach_copy_` into touched views of one flat buffer",
            "snapshot": "eager, steady: the one before is durable, and every element has changed since",
        },
        (
            Check(
                "adam: stall / _foreach_copy_", "x", "at most", LIMIT, ratios(taken["adam save"], taken["adam copy"])
            ),
            Check(
                "flat: stall / _foreach_copy_", "x", "at most", LIMIT, ratios(taken["flat save"], taken["flat copy"])
            ),
        ),
        tuple(
            Series(label, "ms", tuple(1e3 * s for s in taken[key]))
            for key, label in (
                ("adam copy", "adam: _foreach_copy_"),
                ("adam save", "adam: eager save"),
                ("flat copy", "flat: _foreach_copy_"),
                ("flat save", "flat: eager save"),
                ("DCP", "adam: DCP async_save returns after"),
            )
            if taken.get(key)
        ),
    )


def foreach_copy(state: State) -> Callable[[], float]:
    """The reference: all tensors of `state` into warm preallocated views, in one call."""
    sources = list(tensors(state))
    buffer = torch.zeros(sum(t.numel() for t in sources))
    views, at = [], 0
    for source in sources:
        views.append(buffer[at : at + source.numel()].view(source.shape))
        at += source.numel()
    return lambda: timed(lambda: torch._foreach_copy_(views, sources))


def _saver(checkpointer: Checkpointer, state: State) -> Callable[[], float]:
    steps = iter(range(1, 1_000_000))

    def save() -> float:
        change_everything(state)  # what did not change would not be copied
        seconds, handle = save_timed(checkpointer, state, next(steps))
        handle.wait()
        return seconds

    return save


def _dcp(folder: Path, state: State) -> Callable[[], float]:
    peer = DcpAsync(folder)

    def save() -> float:
        seconds = peer.save(state, 0)
        peer.finish()
        return seconds

    return save


def _about(state: State) -> str:
    return f"{sum(1 for _ in tensors(state)):,} tensors, {state_bytes(state) / 1e6:.0f} MB"
