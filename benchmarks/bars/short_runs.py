"""What a first trial of the engine costs: the first snapshot of a process, and a training of a few steps."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from benchmarks.disk import SharedBuffer
from benchmarks.engine import save_timed
from benchmarks.lightning_loop import Fit, Module, seeded_data
from benchmarks.measure import interleave, timed
from benchmarks.peers import DcpAsync
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, gpt2_state, state_bytes, tensors
from ckpt_engine import Checkpointer
from lightning_ckpt import AdaptiveCheckpoint

TITLE = "Short runs: the first snapshot of a process, and a fit of a few steps"
FIRST_LIMIT = 1.0
FIXED_LIMIT_SECONDS = 1.0
INPUTS = 256
REST_SECONDS = 3.0
"""A virtual machine gives memory back that was freed for so long: the next one to touch it pays for it again."""
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure. `parameters`, `batch` and `steps` are of the fit.

    Args:
        beside_rounds: of what no target is about.
    """

    nbytes: int
    parameters: int
    batch: int
    steps: int
    rounds: int
    beside_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 33_600_000, 128, 20, 5, 2),
    Scale.QUICK: Size(1_493_000_000, 33_600_000, 128, 20, 3, 1),
    Scale.TINY: Size(4_000_000, 20_000, 8, 6, 1, 1),
}


def _ours(folder: Path, state: State) -> float:
    checkpointer = Checkpointer(folder)
    checkpointer.engine.start()
    seconds, handle = save_timed(checkpointer, state, 1)
    handle.wait()
    checkpointer.close()
    return seconds


def _dcp(folder: Path, state: State) -> float:
    peer = DcpAsync(folder, cached=True)
    seconds = peer.save(state, 1)
    peer.close()
    return seconds


def _by_hand(_: Path, state: State) -> float:
    def copy() -> SharedBuffer:
        at, buffer = 0, SharedBuffer(state_bytes(state))
        for tensor in tensors(state):
            buffer.tensor[at : at + tensor.nbytes].copy_(tensor.reshape(-1).view(buffer.tensor.dtype))
            at += tensor.nbytes
        return buffer

    return timed(copy)


FIRST: Mapping[str, Callable[[Path, State], float]] = {
    "engine": _ours,
    "DCP async_save, kept staging memory": _dcp,
    "copy into new shared memory": _by_hand,
}
SAVING: Mapping[str, Callable[[Path, int], list[Callback]]] = {
    "no snapshots": lambda _, __: [],
    "AdaptiveCheckpoint": lambda folder, every: [AdaptiveCheckpoint(str(folder), every_n_steps=every, at_end=False)],
    "AdaptiveCheckpoint, defaults": lambda folder, _: [AdaptiveCheckpoint(str(folder))],
    "ModelCheckpoint": lambda folder, every: [ModelCheckpoint(folder, every_n_train_steps=every)],
}


BESIDE = ("copy into new shared memory", "AdaptiveCheckpoint, defaults", "ModelCheckpoint")
"""What no target is about."""


def run(bench: Bench) -> BarResult:
    """Each sample is of a process of its own, which has touched none of the memory that it saves into."""
    size = SIZES[bench.scale]
    with bench.scratch("short-runs") as folder:
        candidates = {
            name: partial(_in_a_process, bench.scale, name, folder / f"{number}")
            for number, name in enumerate((*FIRST, *SAVING))
        }
        at_most = dict.fromkeys(BESIDE, size.beside_rounds)
        taken = interleave(candidates, size.rounds, at_most=at_most, tick=bench.say)
    plain = taken["no snapshots"]
    longer = {name: tuple(map(float.__sub__, taken[name], plain)) for name in SAVING}  # as many as the shorter has
    return BarResult(
        "short-runs",
        TITLE,
        {
            "first snapshot": f"{size.nbytes / 1e9:.2f} GB fp32 (GPT-2 with Adam), a new process, nothing prepared; "
            "the writer has started",
            "fit": f"Lightning, perceptron of {size.parameters / 1e6:.1f} million parameters with fused Adam, "
            f"{12 * size.parameters / 1e6:.0f} MB of state, {size.steps} steps, one snapshot after three quarters of "
            "them; from `fit` to its return",
            "defaults": "a snapshot at the end, and before that whatever the budget allows",
            "processes": f"a new one for each sample, and {REST_SECONDS:g} s of rest before it; {size.rounds} rounds, "
            f"what no target is about in {size.beside_rounds} of them",
        },
        (
            Check(
                "first snapshot / DCP's",
                "x",
                "at most",
                FIRST_LIMIT,
                ratios(taken["engine"], taken["DCP async_save, kept staging memory"]),
            ),
            Check("a fit takes longer by", "s", "at most", FIXED_LIMIT_SECONDS, longer["AdaptiveCheckpoint"]),
        ),
        (
            *(Series(f"first snapshot: {name}", "s", tuple(taken[name])) for name in FIRST),
            Series("fit: no snapshots", "s", tuple(plain)),
            *(Series(f"fit longer by: {name}", "s", longer[name]) for name in SAVING if name != "no snapshots"),
        ),
        ("ModelCheckpoint does not sync: a power cut can lose what it has written.",),
    )


def _in_a_process(scale: Scale, name: str, folder: Path) -> float:
    if scale is Scale.TINY:  # only the code is tested
        folder.mkdir()
        return _measure(scale, name, folder)
    time.sleep(REST_SECONDS)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.bars.short_runs", scale.value, name, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _measure(scale: Scale, name: str, folder: Path) -> float:
    size = SIZES[scale]
    if name in FIRST:
        return FIRST[name](folder, gpt2_state(size.nbytes))
    logging.disable(logging.INFO)
    callbacks = SAVING[name](folder, size.steps * 3 // 4)
    module, data = Module(size.parameters, INPUTS), seeded_data(size.batch * size.steps, INPUTS)
    return timed(Fit(str(folder), module, data, size.batch, size.steps, callbacks=callbacks).run)


if __name__ == "__main__":
    with_folder = Path(sys.argv[3])
    with_folder.mkdir(parents=True, exist_ok=True)
    seconds = _measure(Scale(sys.argv[1]), sys.argv[2], with_folder)
    shutil.rmtree(with_folder)
    print(json.dumps(seconds))
