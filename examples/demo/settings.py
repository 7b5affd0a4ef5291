"""What one demo does, and where its files are."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from demo.s3 import Remote

EXAMPLES = Path(__file__).resolve().parent.parent

OWN_NAMES = (
    "reference",
    "killed",
    "snapshots",
    "overhead",
    "ckpt.yaml",
    "result.json",
    "demo.png",
    "demo.svg",
    "s3.log",
)
"""Everything a demo makes in its output folder."""
MARK = ".ckpt-demo"


@dataclass(frozen=True, slots=True)
class Settings:
    """One demo.

    Args:
        out: folder of everything it makes.
        seed: of the training and of the moments to kill at.
        kills: how often the run is killed.
        steps: optimizer steps of a whole run.
        epoch_batches: batches of one epoch.
        width: of the model.
        threads: of torch, in every run alike.
        budget: share of training time that snapshots may cost ("1%").
        max_lost_work: work that a crash may cost at worst ("5 s").
        pairs: runs with and without the callback that are compared; 0: do not measure.
        pair_steps: measured steps of each of them.
        flip_bit_at: spoil the killed run at this step, to see the comparison fail.
        tier: a second tier, "s3": the local folder is removed with the last kill; None: there is only that folder.
    """

    out: Path
    seed: int
    kills: int
    steps: int
    epoch_batches: int
    width: int
    threads: int
    budget: str
    max_lost_work: str
    pairs: int
    pair_steps: int
    flip_bit_at: int | None
    tier: str | None = None

    @property
    def reference(self) -> Path:
        return self.out / "reference"

    @property
    def killed(self) -> Path:
        return self.out / "killed"

    @property
    def snapshots(self) -> Path:
        return self.out / "snapshots"

    @property
    def yaml(self) -> Path:
        return self.out / "ckpt.yaml"

    def yaml_text(self, remote: Remote | None = None) -> str:
        """The options of the checkpoint callback, with a second tier if there is one."""
        near = json.dumps(str(self.snapshots))
        tiers = f"{near}\n"
        if remote is not None:
            far = {"url": remote.url, "storage_options": remote.options}
            tiers = f"\n  - {near}\n  - {json.dumps(far)}\n"  # JSON is YAML
        return f"overhead: {self.budget}\nmax_lost_work: {self.max_lost_work}\nkeep: {{last: 2}}\ntiers: {tiers}"

    def training(self, out: Path, *options: str | Path) -> Sequence[str]:
        """The command line of a training run."""
        values = {
            "--out": out,
            "--steps": self.steps,
            "--epoch-batches": self.epoch_batches,
            "--width": self.width,
            "--threads": self.threads,
            "--seed": self.seed,
        }
        words = [str(word) for pair in values.items() for word in pair]
        return [sys.executable, str(EXAMPLES / "demo_train.py"), *words, *map(str, options)]

    def mid_epoch(self, step: int) -> bool:
        """Whether neither the first nor the last batch of an epoch is near."""
        return 2 <= step % self.epoch_batches <= self.epoch_batches - 2


def claim(out: Path) -> None:
    """Make the output folder, empty of what an earlier demo left there; nothing else in it is touched.

    Raises:
        FileExistsError: the folder has files and no demo made it.
    """
    if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and was not made by this demo: give another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).write_text("made by examples/demo.py, which empties this folder when it starts\n")
    for name in OWN_NAMES:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
