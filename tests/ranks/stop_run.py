"""A run of several ranks that somebody stops: `python -m tests.ranks.stop_run JOB`, alone or under a launcher.

The job is JSON: `loop` (lightning, accelerate or plain), `root`, `trace`, `size`, `epochs`, `pace` and `options`. Each
rank appends a line per batch to `<trace>.<rank>`, which begins with its process id: see `Lines`. What happens in some
batch of some rank: `events` maps `rank/number of the batch` to `hang`, `raise`, `stop and raise`,
`kill`, or `raise late`, which is after its optimizer step.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ckpt_engine.loop import failing_loop
from tests.support.trainers import wait_for_the_arena

HANG_SECONDS = 600.0


class Samples(Dataset[Any]):
    """Samples that an augmentation changes by the global random stream."""

    def __init__(self, count: int) -> None:
        self.data = torch.randn(count, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index, self.data[index] + 0.1 * torch.rand(())


def _hang() -> None:
    """In the middle of a step, until SIGUSR1 comes."""
    awake: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: awake.append(number))
    deadline = time.monotonic() + HANG_SECONDS
    while not awake and time.monotonic() < deadline:
        time.sleep(0.05)


class Failure(RuntimeError):
    """What ends a rank in the middle of a step."""


class Lines:
    """The trace of one rank: its process id, then a line per batch, written before it is trained."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self._fd = os.open(f"{job['trace']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._job, self._rank, self._count = job, rank, 0
        os.write(self._fd, f"pid {os.getpid()}\n".encode())

    def batch(self, epoch: int, ids: torch.Tensor, loss: torch.Tensor) -> None:
        os.write(self._fd, f"{epoch} {ids.tolist()} {torch.rand(()).item()!r} {loss.item()!r}\n".encode())
        self._count += 1
        time.sleep(self._job["pace"])
        event = self._job.get("events", {}).get(f"{self._rank}/{self._count}")
        if event == "hang":
            self.say("hangs")
            _hang()
        elif event in ("raise", "stop and raise"):
            if event != "raise":
                os.kill(os.getpid(), signal.SIGTERM)
            raise Failure
        elif event == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self) -> None:
        """The optimizer has made its step."""
        if self._job.get("events", {}).get(f"{self._rank}/{self._count}") == "raise late":
            raise Failure

    def say(self, what: str) -> None:
        os.write(self._fd, f"{what}\n".encode())

    def end(self, weights: dict[str, torch.Tensor]) -> None:
        self.say("end " + json.dumps({name: value.flatten().tolist() for name, value in weights.items()}))


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


def lightning(job: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_ckpt import AdaptiveCheckpoint

    ckpt = AdaptiveCheckpoint(_options(job))

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def on_fit_start(self) -> None:
            self.lines = Lines(job, self.global_rank)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            ids, x = batch
            loss: torch.Tensor = self.net(x).square().mean()
            if job.get("calibrates"):
                self.lines.say(f"mean {self.net[1].running_mean.tolist()}")  # type: ignore[operator,union-attr]
            if job.get("patient") and ckpt._run is not None:
                wait_for_the_arena(ckpt._run.engine)
            self.lines.batch(self.current_epoch, ids, loss)
            return loss

        def on_train_batch_end(self, _: Any, batch: Any, batch_idx: int) -> None:
            self.lines.stepped()
            if job.get("calibrates"):
                with torch.no_grad():
                    self.trainer.strategy.model(batch[1])  # type: ignore[misc]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if hasattr(self, "lines"):
                self.lines.say(f"validates {batch_idx}")
                time.sleep(job["pace"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    pl.seed_everything(5, verbose=False)  # of the sampler, which is the same on all ranks
    torch.manual_seed(job["seed"] + 10 * _rank())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["size"],
        strategy=DDPStrategy(timeout=datetime.timedelta(seconds=job.get("timeout", 1800))),
        max_epochs=job["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ckpt],
        default_root_dir=job["root"] + "-lightning",
        **job.get("arguments", {}),
    )
    loader = DataLoader(Samples(64), batch_size=4, shuffle=True, num_workers=job.get("workers", 0))
    validation = DataLoader(Samples(40), batch_size=4) if job.get("validates") else None
    model = Model()
    try:
        trainer.fit(model, loader, validation, ckpt_path="auto")
    finally:
        logging.info("received_sigterm: %s", trainer.received_sigterm)
    model.lines.end(model.net.state_dict())


def accelerate(job: dict[str, Any]) -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import set_seed

    from accelerate_ckpt import AdaptiveCheckpoint

    set_seed(5)
    timeout = datetime.timedelta(seconds=job.get("timeout", 1800))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(Samples(64), batch_size=4, shuffle=True, num_workers=job.get("workers", 0))
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    set_seed(job["seed"] + 10 * _rank())
    ckpt = AdaptiveCheckpoint(accelerator, _options(job))
    lines = Lines(job, _rank())
    for epoch in range(ckpt.epoch, job["epochs"]):
        for ids, x in loader:
            loss = net(x).square().mean()
            if job.get("patient"):
                wait_for_the_arena(ckpt._engine)
            lines.batch(epoch, ids, loss)
            accelerator.backward(loss)
            optimizer.step()
            lines.stepped()
            optimizer.zero_grad()
    lines.end(accelerator.unwrap_model(net).state_dict())
    accelerator.end_training()


def plain(job: dict[str, Any]) -> None:
    from ckpt_engine import Checkpointer
    from ckpt_engine.ranks.process_group import ProcessGroupRanks

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job.get("timeout", 1800)))
    rank, samples = _rank(), Samples(64)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, job["size"], rank)
    loader = DataLoader(samples, batch_size=4, sampler=sampler, num_workers=job.get("workers", 0))
    model = make_net()
    model.register_buffer("table", torch.zeros(2), persistent=False)
    net = nn.parallel.DistributedDataParallel(model) if not job.get("wraps late") else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(job["seed"] + 10 * rank)
    with Checkpointer(_options(job), ranks=ProcessGroupRanks()) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        if job.get("wraps late"):
            model.register_buffer("table", torch.zeros(3), persistent=False)  # for longer samples
        net = net or nn.parallel.DistributedDataParallel(model)
        lines = Lines(job, rank)
        for epoch in range(run.epoch, job["epochs"]):
            sampler.set_epoch(epoch)
            for ids, x in loader:
                loss = net(x).square().mean()
                if job.get("calibrates"):
                    lines.say(f"mean {model[1].running_mean.tolist()}")  # type: ignore[operator,union-attr]
                if job.get("patient"):
                    wait_for_the_arena(ckpt.engine)
                lines.batch(epoch, ids, loss)
                loss.backward()
                optimizer.step()
                lines.stepped()
                optimizer.zero_grad()
                if job.get("calibrates"):
                    with torch.no_grad():
                        net(x)
        lines.end(model.state_dict())
    dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def _options(job: dict[str, Any]) -> dict[str, Any]:
    return {"tiers": job["root"], "every_n_steps": 10**9, "keep": {"last": 100}, **job.get("options", {})}


def main(job: dict[str, Any]) -> None:
    """Train to the end, or until somebody stops the run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    form = f"[{_rank()}] %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True, handlers=[logging.StreamHandler(sys.stderr)])
    if job.get("records"):  # steps of these models take no longer than a record of one
        failing_loop.affordable = lambda *_: True
    if "interrupts" in job:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs beside itself
    try:
        {"lightning": lightning, "accelerate": accelerate, "plain": plain}[job["loop"]](job)
    except BaseException as err:
        with open(f"{job['trace']}.{_rank()}", "a") as file:  # noqa: PTH123
            file.write(f"exit {err.code if isinstance(err, SystemExit) else type(err).__name__}\n")
        if _rank() == 0:
            time.sleep(job.get("ends_late", 0.0))
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
