"""How small codecs make really trained states, and what that costs one processor core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.coding import AdamCoding, Coding, Ours, ShuffledGzip, Way, ZipNN, Zstd, pieces_of, zipnn_installed
from benchmarks.measure import interleave, rate
from benchmarks.run import Bench, Scale
from benchmarks.trained import Model, Moment, train
from benchmarks.values import BarResult, Check, Series

TITLE = "Codecs: bytes of really trained states, and their price"
LAGS = (1, 10, 100)
BF16_RATIO, BF16_ENCODE, BF16_DECODE = 1.45, 0.5, 1.0
STATE_RATIO, STATE_ENCODE = 1.20, 0.7
STATE_DELTA_RATIO, ADAM_RATIO, BF16_DELTA_RATIO = 1.38, 3.0, 4.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    model: Model
    lags: tuple[int, ...]
    rounds: int
    slow_rounds: int


_MODEL = Model(width=512, layers=6, vocabulary=8192, context=64, batch=4, steps=160)
SIZES = {
    Scale.FULL: Size(_MODEL, LAGS, 9, 1),
    Scale.QUICK: Size(_MODEL, LAGS, 3, 1),
    Scale.TINY: Size(Model(width=64, layers=1, vocabulary=512, context=16, batch=2, steps=6), (1, 2), 2, 1),
}

Arrays = Mapping[str, NDArray[Any]]


def run(bench: Bench) -> BarResult:
    """Train, then encode and decode with every way, interleaved."""
    size = SIZES[bench.scale]
    first, *later = train(size.model, size.lags, say=bench.say)
    lags = {moment.step - first.step: moment for moment in later}
    codings = _codings(first, lags)
    adam = AdamCoding(lags[1].roles, first.roles, lags[1].hyper)
    pure = _pure_bf16(size, bench)
    timed: dict[str, Callable[[], float]] = {}
    for name, coding in codings.items():
        timed[f"encode {name}"], timed[f"decode {name}"] = coding.encode, coding.decode
    timed["encode adam"], timed["decode adam"] = adam.encode, adam.decode
    slow = {f"{verb} {name}": size.slow_rounds for verb in ("encode", "decode") for name in codings if "gzip" in name}
    taken = interleave(timed, size.rounds, at_most=slow, tick=bench.say)
    every = {**codings, "adam": adam}

    def speed(verb: str, name: str) -> tuple[float, ...]:
        return rate(taken[f"{verb} {name}"], every[name].nbytes / 1e9)

    def ratio(name: str) -> tuple[float, ...]:
        return (every[name].ratio,)

    bf16, state = "bf16 weights: byteplane-zstd", "fp32 state: byteplane-zstd"
    series = [Series(name, "x smaller", (coding.ratio,)) for name, coding in every.items()]
    series += [Series(name, "x smaller", (value,)) for name, value in pure.items()]
    series += [
        Series(f"{name}, {verb}", "GB/s per core", speed(verb, name)) for name in every for verb in ("encode", "decode")
    ]
    roles = ", ".join(f"{role} {3 * n / adam.nbytes:.4f}" for role, n in adam.bytes_by_role.items())
    notes = [f"Bytes left by the adam codec, per byte of each role: {roles}."]
    if not zipnn_installed():
        notes.append("ZipNN is not installed, so it did not take part.")
    return BarResult(
        "codecs",
        TITLE,
        {
            "state": f"transformer of {sum(a.size for a in first.roles['p'].values()) / 1e6:.1f} million parameters, "
            f"trained for {first.step} steps on the source of Python's library; float32 with AdamW (betas 0.9 and "
            "0.95, clipped gradients), matrix products in bfloat16",
            "bf16 weights": "the same weights rounded to bfloat16; 'trained in bf16': a second run in bfloat16",
            "time": "processor seconds of one thread, per byte before encoding; pieces as the store cuts them",
            "gzip": "as HDF5's filters shuffle and gzip (level 4), without its container",
        },
        (
            Check("bf16 weights, full", "x smaller", "at least", BF16_RATIO, ratio(bf16)),
            Check("bf16 weights, encode", "GB/s per core", "at least", BF16_ENCODE, speed("encode", bf16)),
            Check("bf16 weights, decode", "GB/s per core", "at least", BF16_DECODE, speed("decode", bf16)),
            Check("fp32 AdamW state, full", "x smaller", "at least", STATE_RATIO, ratio(state)),
            Check("fp32 AdamW state, encode", "GB/s per core", "at least", STATE_ENCODE, speed("encode", state)),
            Check(
                "fp32 AdamW state, one step, difference",
                "x smaller",
                "at least",
                STATE_DELTA_RATIO,
                ratio("fp32 state, 1 apart: delta"),
            ),
            Check("fp32 AdamW state, one step, predicted", "x smaller", "at least", ADAM_RATIO, ratio("adam")),
            Check(
                "bf16 weights, one step",
                "x smaller",
                "at least",
                BF16_DELTA_RATIO,
                ratio("bf16 weights, 1 apart: delta"),
            ),
        ),
        tuple(series),
        tuple(notes),
    )


def _codings(first: Moment, lags: Mapping[int, Moment]) -> dict[str, Coding]:
    """Every way on every state, by what is shown of it."""
    full = {
        "bf16 weights": pieces_of(_bf16(first.roles["p"]), "bfloat16"),
        "fp32 state": pieces_of(_state(first), "float32"),
    }
    ways: dict[str, Way] = {"byteplane-zstd": Ours("byteplane-zstd"), "zstd 1": Zstd(1), "zstd 3": Zstd(3)}
    if zipnn_installed():
        ways["ZipNN"] = ZipNN()
    codings = {f"{what}: {name}": Coding(way, pieces) for what, pieces in full.items() for name, way in ways.items()}
    for what, pieces in full.items():
        few = pieces[:: max(1, len(pieces) // 6)]
        codings[f"{what}: shuffle + gzip"] = Coding(ShuffledGzip(), few)
    delta = Ours("delta-byteplane-zstd")
    for lag, moment in lags.items():
        apart = pieces_of(_state(moment), "float32", _state(first))
        codings[f"fp32 state, {lag} apart: delta"] = Coding(delta, apart)
        apart = pieces_of(_bf16(moment.roles["p"]), "bfloat16", _bf16(first.roles["p"]))
        codings[f"bf16 weights, {lag} apart: delta"] = Coding(delta, apart)
    return codings


def _pure_bf16(size: Size, bench: Bench) -> dict[str, float]:
    """Ratios of a run in bfloat16, weights and moments."""
    first, *later = train(size.model, size.lags, dtype=torch.bfloat16, say=bench.say)
    planes, delta = Ours("byteplane-zstd"), Ours("delta-byteplane-zstd")
    found = {"trained in bf16, state: byteplane-zstd": Coding(planes, pieces_of(_state(first), "bfloat16")).ratio}
    for moment in later:
        lag = moment.step - first.step
        for what, new, old in (
            ("weights", moment.roles["p"], first.roles["p"]),
            ("state", _state(moment), _state(first)),
        ):
            found[f"trained in bf16, {what}, {lag} apart: delta"] = Coding(delta, pieces_of(new, "bfloat16", old)).ratio
    return found


def _state(moment: Moment) -> Arrays:
    return {f"{role}/{name}": array for role, arrays in moment.roles.items() for name, array in arrays.items()}


def _bf16(arrays: Arrays) -> Arrays:
    return {
        name: torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, array in arrays.items()
    }
