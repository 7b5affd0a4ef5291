"""Lightning with the options in a file: the training of `lightning_fit.py`, with `lightning_yaml.yaml`.

python examples/lightning_yaml.py            # start, kill it, start it again
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
from lightning_fit import Digits, DigitsData

from lightning_ckpt import AdaptiveCheckpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options = Path(__file__).with_name("lightning_yaml.yaml")
    parser.add_argument("--ckpt", default=options, help="options of the snapshots")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[AdaptiveCheckpoint(arguments.ckpt)],
    )
    trainer.fit(Digits(), DigitsData(), ckpt_path="auto")


if __name__ == "__main__":
    main()
