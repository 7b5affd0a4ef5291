"""The measuring process: short trainings with and without the callback, in turns, one line of `blocks.jsonl` each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import lightning.pytorch as pl
import torch
from demo_train import ByteTransformer, StandardLibraryData, make_trainer

from demo.overhead import BLOCKS, Block
from demo.recorder import KeepNumbers, StepTimer
from lightning_ckpt import AdaptiveCheckpoint

WARM_UP_STEPS = 5
"""Not measured: first allocations, and loader workers that start."""


def measure_block(args: argparse.Namespace, data: pl.LightningDataModule, *, saving: bool) -> Block:
    """One short training from scratch, always the same one."""
    pl.seed_everything(args.seed, workers=True, verbose=False)
    timer, numbers = StepTimer(WARM_UP_STEPS, args.steps), KeepNumbers()
    callbacks: list[pl.Callback] = [timer]
    folder = args.out / "snapshots"
    if saving:
        callbacks.append(AdaptiveCheckpoint(args.ckpt, tiers=str(folder), log={"loggers": "full"}))
    steps = WARM_UP_STEPS + args.steps
    trainer = make_trainer(steps, callbacks, numbers)
    trainer.fit(ByteTransformer(steps, args.width), data, ckpt_path="auto" if saving else None)
    if not saving:
        return Block(timer.seconds, timer.cpu_seconds, 0, None)
    shutil.rmtree(folder)
    newest = numbers.newest
    snapshots = int(newest.get("ckpt/committed", 0))
    return Block(timer.seconds, timer.cpu_seconds, snapshots, newest["ckpt/overhead_percent"])


def main() -> None:
    """The measuring process; appends a line per block to `blocks.jsonl`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path, required=True)
    for name in ("--pairs", "--steps", "--width", "--threads", "--seed"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(args.threads)
    # One epoch and no more: loader workers start in the warm-up, and nothing is validated.
    data = StandardLibraryData(epoch_batches=2 * (WARM_UP_STEPS + args.steps))
    for pair in range(args.pairs):
        for saving in (pair % 2 == 1, pair % 2 == 0):
            block = measure_block(args, data, saving=saving)
            with (args.out / BLOCKS).open("a") as file:
                file.write(json.dumps(dataclasses.asdict(block)) + "\n")


if __name__ == "__main__":
    main()
