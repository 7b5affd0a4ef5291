"""One training of the campaign: a trainer of one kind on a folder and perhaps a far tier; says when what happens.

`python -m tests.restore.far_tiers.trainer JOB`, where JOB is `{"kind": "plain", "near": …, "far": {…} | null, "steps":
60, "resume": true}`, prints JSON lines. `ready`: everything is imported, and it waits for a line on its standard input.
`built`: the engine has made nothing yet. `step`: with its number. `last`: before the end; it waits for a line.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

EVERY = 10
MODULES = {
    "plain": ["ckpt_engine"],
    "accelerate": ["accelerate", "accelerate_ckpt"],
    "lightning": ["lightning.pytorch", "lightning_ckpt"],
}
SIZE = 256
_STEP_SECONDS = 0.02


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, SIZE), torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))


def loader(steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(4 * steps, 8, generator=generator)), batch_size=4)


def options(job: dict[str, Any]) -> dict[str, Any]:
    tiers = [job["near"], *([job["far"]] if job["far"] else [])]
    return {"tiers": tiers, "every_n_steps": EVERY, "keep": {"last": 3}, "lazy": "off", **job.get("options", {})}


def wait_for_leave() -> None:
    say("last")
    sys.stdin.readline()
    say("leaves")


def plain(job: dict[str, Any]) -> None:
    from ckpt_engine import Checkpointer

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    say("built")
    with Checkpointer(options(job)) as ckpt:
        state = ckpt.load()
        first = 0 if state is None else int(state["step"])
        if state is not None:
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first + 1, first + job["steps"] + 1):
            train(net, optimizer, torch.randn(4, 8))
            whole = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if step % EVERY == 0:
                ckpt.before_update()
                ckpt.save(whole, step=step)
            say("step", step=step)
        handle = ckpt.save(whole, step=step) if ckpt.wait(60) else None
        wait_for_leave()
        del handle


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    time.sleep(_STEP_SECONDS)
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def accelerate(job: dict[str, Any]) -> None:
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint

    accelerator = Accelerator(cpu=True)
    net = model()
    parts = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader(job["steps"]))
    net, optimizer, batches = parts
    say("built")
    ckpt = AdaptiveCheckpoint(accelerator, options(job))
    for _ in range(ckpt.epoch, ckpt.epoch + 1):
        for (batch,) in batches:
            time.sleep(_STEP_SECONDS)
            accelerator.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            say("step", step=ckpt.global_step)
    wait_for_leave()
    ckpt.close()


def lightning(job: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback

    from lightning_ckpt import AdaptiveCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            time.sleep(_STEP_SECONDS)
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Says(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            say("step", step=trainer.global_step)

        def on_train_end(self, *_: Any) -> None:
            wait_for_leave()

    epochs = job.get("epochs", 1)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AdaptiveCheckpoint(options(job)), Says()],
    )
    say("built")
    trainer.fit(Module(), loader(job["steps"]), ckpt_path="auto" if job["resume"] else None)


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    for module in MODULES[job["kind"]]:
        import_module(module)
    say("ready")
    sys.stdin.readline()
    {"plain": plain, "accelerate": accelerate, "lightning": lightning}[job["kind"]](job)
    say("done")


if __name__ == "__main__":
    main()
