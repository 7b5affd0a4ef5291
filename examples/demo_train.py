"""Trains a byte-level transformer on Python's own standard library with adaptive checkpoints: a usual Lightning script.

What the checkpoints need is the callback and `ckpt_path="auto"` in `main`. Start the script, kill it, start it again
with the same arguments: `examples/demo.py` does that, and compares the result with a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from demo.recorder import FlipOneBit, KeepNumbers, Recorder, save_final_state
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 64
BATCH = 8
EPOCH_BATCHES = 80
VALIDATION_BATCHES = 8

Sample = tuple[Tensor, Tensor, Tensor]


class StandardLibrary(Dataset[Sample]):
    """Random windows of the standard library's source, with typos: where a window starts and what is wrong in it is
    drawn in the loader's workers from all three random streams that people use.

    Args:
        text: what to read from.
        samples: how many windows one epoch has; sample `i` starts somewhere in the i-th part of the text.
        typos: share of the input bytes that are replaced.
    """

    def __init__(self, text: bytes, samples: int, typos: float) -> None:
        self._text = np.frombuffer(text, dtype=np.uint8)
        self._samples = samples
        self._typos = typos
        self._part = (len(text) - CONTEXT - 1) // samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        start = index * self._part + (random.randrange(self._part) if self._typos else 0)
        window = torch.from_numpy(self._text[start : start + CONTEXT + 1].astype(np.int64))
        source, target = window[:-1].clone(), window[1:].clone()
        if self._typos:
            wrong = torch.from_numpy(np.random.random(CONTEXT) < self._typos)
            source[wrong] = torch.randint(0, 256, (int(wrong.sum()),))
        return source, target, torch.tensor([index, start])


class StandardLibraryData(pl.LightningDataModule):
    """The standard library, one file in ten kept for validation."""

    def __init__(self, epoch_batches: int = EPOCH_BATCHES) -> None:
        super().__init__()
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [file.read_bytes() for file in files]
        self._train = b"".join(text for i, text in enumerate(texts) if i % 10)
        self._validation = b"".join(text for i, text in enumerate(texts) if i % 10 == 0)
        self._epoch_batches = epoch_batches

    def train_dataloader(self) -> DataLoader[Sample]:
        dataset = StandardLibrary(self._train, self._epoch_batches * BATCH, typos=0.02)
        return DataLoader(dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(StandardLibrary(self._validation, VALIDATION_BATCHES * BATCH, typos=0.0), BATCH)


class ByteTransformer(pl.LightningModule):
    """A small causal transformer with dropout: 3.3 million parameters, 40 MB of state with AdamW.

    Args:
        steps: length of the training, for the learning rate schedule.
        width: of the residual stream.
        layers: how many.
    """

    def __init__(self, steps: int, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self._steps = steps
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def loss(self, batch: Sample) -> Tensor:
        source, target, _ = batch
        hidden = self.layers(self.bytes(source) + self.places, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        warmup = max(1, self._steps // 10)

        def scale(step: int) -> float:
            return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self._steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(steps: int, callbacks: list[pl.Callback], logger: KeepNumbers) -> pl.Trainer:
    """A Trainer that validates in the middle of every epoch and at its end."""
    return pl.Trainer(
        max_steps=steps,
        val_check_interval=0.5,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        accelerator="cpu",
        deterministic=True,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ckpt", type=Path, help="options of AdaptiveCheckpoint (YAML); absent: no checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder for the record and the final state")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--epoch-batches", type=int, default=EPOCH_BATCHES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than one suffers when cores are shared")
    parser.add_argument("--flip-bit-at", type=int, metavar="STEP", help="spoil the run: flip one bit of one weight")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    torch.set_num_threads(args.threads)
    pl.seed_everything(args.seed, workers=True, verbose=False)
    callbacks: list[pl.Callback] = [Recorder(args.out / "record.jsonl")]
    if args.flip_bit_at is not None:
        callbacks.append(FlipOneBit(args.flip_bit_at))
    if args.ckpt is not None:
        from lightning_ckpt import AdaptiveCheckpoint

        callbacks.append(AdaptiveCheckpoint(args.ckpt))

    model = ByteTransformer(args.steps, args.width)
    trainer = make_trainer(args.steps, callbacks, KeepNumbers())
    trainer.fit(model, StandardLibraryData(args.epoch_batches), ckpt_path="auto" if args.ckpt else None)
    save_final_state(args.out / "final.pt", trainer)


if __name__ == "__main__":
    main()
