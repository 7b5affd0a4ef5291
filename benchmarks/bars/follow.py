"""How many bytes another process reads to follow bfloat16 weights that are trained with a small learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.coding import Coding, Ours, PlanesOnly, pieces_of
from benchmarks.counted import CountedReads
from benchmarks.measure import interleave, rate
from benchmarks.run import Bench, Scale
from benchmarks.trained import Model, bits, train
from benchmarks.values import BarResult, Check, Series
from ckpt_engine import Checkpointer
from ckpt_engine.restore import follower
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage

TITLE = "Following bfloat16 weights: bytes of one step at learning rate 3e-6"
LR, LEAST_RATIO = 3e-6, 45.0
PATIENCE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    model: Model
    snapshots: int
    rounds: int


_MODEL = Model(width=512, layers=4, vocabulary=4096, context=64, batch=4, steps=120, late_lr=LR)
SIZES = {
    Scale.FULL: Size(_MODEL, 31, 9),
    Scale.QUICK: Size(_MODEL, 11, 3),
    Scale.TINY: Size(Model(64, 1, 512, 16, 2, 8, late_lr=LR), 3, 1),
}
Weights = Mapping[str, torch.Tensor]


def run(bench: Bench) -> BarResult:
    """Train, save and follow; then encode and decode one step with both forms, interleaved."""
    size = SIZES[bench.scale]
    weights = [
        {name: torch.from_numpy(one).bfloat16() for name, one in moment.roles["p"].items()}
        for moment in train(size.model, tuple(range(1, size.snapshots)), say=bench.say)
    ]
    whole = sum(one.nbytes for one in weights[0].values())
    with bench.scratch("follow") as folder:
        read = _followed(folder, weights, bench)
    ratios = tuple(whole / nbytes for nbytes in read[1:])
    differences = tuple(ratio for ratio in ratios if ratio > 2)
    old, new = ({name: bits(one) for name, one in each.items()} for each in weights[-2:])
    pieces = pieces_of(new, "bfloat16", old)
    codings = {"changed words": Coding(Ours("delta-byteplane-zstd"), pieces), "planes": Coding(PlanesOnly(), pieces)}
    timed = {f"{verb} {name}": getattr(one, verb) for name, one in codings.items() for verb in ("encode", "decode")}
    taken = interleave(timed, size.rounds, tick=bench.say)
    series = [Series(f"one step: {name}", "x smaller", (one.ratio,)) for name, one in codings.items()]
    series += [Series(f"one step: {name}", "GB/s per core", rate(taken[name], whole / 1e9)) for name in timed]
    series += [
        Series("bytes read for a snapshot that begins a chain", "x smaller", ratios_of_whole(ratios) or (1.0,)),
        Series(f"mean of {len(ratios)} snapshots", "x smaller", (whole * len(ratios) / sum(read[1:]),)),
    ]
    return BarResult(
        "follow",
        TITLE,
        {
            "weights": f"transformer of {whole / 2e6:.1f} million parameters, {size.model.steps} steps on the source "
            f"of Python's library, the last quarter and all later ones at learning rate {LR:g}; float32 with AdamW "
            "(betas 0.9 and 0.95, clipped gradients), saved as bfloat16 after every step",
            "bytes": "those that `follow` reads from a tier with codec `delta`: manifests and data, each snapshot "
            "compared bit for bit; listings are not counted",
            "time": "processor seconds of one thread, per byte before encoding",
        },
        (Check("bytes read for one difference", "x smaller", "at least", LEAST_RATIO, differences or ratios),),
        tuple(series),
        (),
    )


def ratios_of_whole(ratios: tuple[float, ...]) -> tuple[float, ...]:
    """Those of snapshots that were written in full."""
    return tuple(ratio for ratio in ratios if ratio <= 2)


def _followed(folder: Path, weights: list[Weights], bench: Bench) -> list[int]:
    """The bytes that a follower reads for each snapshot."""
    storage, read = CountedReads(open_storage(folder)), list[int]()
    changes = follower._Follower([Repository(storage)], "model", 0.01, float("inf")).changes()
    has: dict[str, torch.Tensor] = {}
    with Checkpointer(tiers=[{"url": str(folder), "codec": "delta"}]) as ckpt:
        for step, model in enumerate(weights, 1):
            bench.say(f"following step {step} of {len(weights)}")
            ckpt.save({"model": dict(model)}, step=step).wait(PATIENCE_SECONDS)
            before = storage.nbytes
            found, changed = next(changes)
            has |= changed
            if found != step or any(not torch.equal(one, has[name]) for name, one in model.items()):
                raise AssertionError(f"the follower has other weights than those of step {step}")
            read.append(storage.nbytes - before)
    return read
