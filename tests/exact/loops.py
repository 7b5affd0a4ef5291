"""One process of a cell of the sweep: its launcher has set the environment and calls `main(job)`.

Each batch is a line of `<trace>.<rank>`, and the last line is a digest of where the run has ended.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import accelerate_ckpt
import lightning_ckpt
from ckpt_engine import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks
from tests.exact.parts import EPOCHS, Cell, Net, carry_of, collate_of, dataset_of, evaluation_of, loader_of, metric_of
from tests.lightning.runs import Journal
from tests.loop.runs import Augmented
from tests.support.digests import digest, seed_everything
from tests.support.trainers import TraceFile

PACE_SECONDS = 0.008


def main(job: dict[str, Any]) -> None:
    """Train to the end; without a root, without us."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if job["cell"]["ranks"] == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    cell = Cell(**job["cell"])
    rank = int(os.environ.get("RANK", "0"))
    trace = TraceFile(f"{job['trace']}.{rank}", PACE_SECONDS)
    options = None
    if job["root"]:
        options = {
            "tiers": job["root"],
            "every_n_steps": cell.every_n_steps,
            "keep": {"last": 3},
            "writer": cell.writer,
        }
    # A script seeds all of its ranks alike, then each draws its own numbers.
    seed_everything(job["seed"])
    train = {"lightning": with_lightning, "transformers": with_transformers}.get(cell.trainer, by_hand)
    trace.append(("digest", train(cell, job, options, trace, rank)))
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- loops by hand


class Plain:
    """A loop without a trainer."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        if cell.ranks > 1:
            dist.init_process_group("gloo")
        self.run: Any = None
        self.ckpt: Any = None

    def prepare(self, model: Any, optimizer: Any, schedule: Any, evaluation: Any) -> tuple[Any, ...]:
        sampler = {}
        if self.cell.ranks > 1:
            model = DistributedDataParallel(model)
            sampler = {"sampler": DistributedSampler(dataset_of(self.cell), seed=3)}
        return model, optimizer, loader_of(self.cell, **sampler), schedule, evaluation

    def track(self, options: dict[str, Any], objects: dict[str, Any], kept: dict[str, Any]) -> Any:
        ranks = ProcessGroupRanks() if dist.is_initialized() else None
        self.ckpt = Checkpointer(options, ranks=ranks)
        self.run = self.ckpt.track(**objects, **kept)
        return self.run

    def step(self, loss: Any, batch: int, optimizer: Any, schedule: Any) -> None:
        self.backward(loss)
        if (batch + 1) % self.cell.accumulate == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def backward(self, loss: Any) -> None:
        loss.backward()

    def close(self) -> None:
        if self.ckpt is not None:
            self.ckpt.close()


class WithFabric(Plain):
    """The same with Lightning Fabric."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(replace(cell, ranks=1))
        self.cell = cell
        strategy = "ddp" if cell.ranks > 1 else "auto"
        self.fabric = Fabric(accelerator="cpu", devices=cell.ranks, strategy=strategy)
        self.fabric.launch()

    def prepare(self, model: Any, optimizer: Any, schedule: Any, evaluation: Any) -> tuple[Any, ...]:
        model, optimizer = self.fabric.setup(model, optimizer)
        loader = self.fabric.setup_dataloaders(loader_of(self.cell))
        evaluation = None if evaluation is None else self.fabric.setup_dataloaders(evaluation)
        return model, optimizer, loader, schedule, evaluation

    def backward(self, loss: Any) -> None:
        self.fabric.backward(loss)


class WithAccelerate:
    """The same with Accelerate."""

    def __init__(self, cell: Cell) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=cell.accumulate)
        self.cell, self.model = cell, None

    def prepare(self, model: Any, optimizer: Any, schedule: Any, evaluation: Any) -> tuple[Any, ...]:
        made = self.accelerator.prepare(model, optimizer, loader_of(self.cell), schedule)
        self.model = made[0]
        return *made, None if evaluation is None else self.accelerator.prepare(evaluation)

    def track(self, options: dict[str, Any], objects: dict[str, Any], kept: dict[str, Any]) -> Any:
        for one in kept.values():
            self.accelerator.register_for_checkpointing(one)
        return accelerate_ckpt.AdaptiveCheckpoint(self.accelerator, options)

    def step(self, loss: Any, batch: int, optimizer: Any, schedule: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def close(self) -> None:
        self.accelerator.end_training()


def by_hand(cell: Cell, job: dict[str, Any], options: dict[str, Any] | None, trace: Any, rank: int) -> Any:
    """A loop that its user has written."""
    kit: Any = {"plain": Plain, "fabric": WithFabric, "accelerate": WithAccelerate}[cell.trainer](cell)
    net = Net(cell.hidden, job["seed"])
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    metric, carry = metric_of(cell), carry_of(cell)
    model, optimizer, loader, schedule, evaluation = kit.prepare(net, optimizer, schedule, evaluation_of(cell))
    kept = {name: one for name, one in (("metric", metric), ("carry", carry)) if one is not None}
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    if evaluation is not None:
        objects["evaluation"] = evaluation
    if cell.ranks > 1:
        seed_everything(job["seed"] + rank)
    run = None if options is None else kit.track(options, objects, kept)
    drift = 0.0
    for epoch in range(run.epoch if run is not None else 0, EPOCHS):
        if cell.hooks == "draw":
            torch.rand(1)
        if cell.trainer == "plain" and cell.ranks > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for batch, (x, y, ids) in enumerate(loader, run.resumed_batches if run is not None else 0):
            loss = ((model(x) - y) ** 2).mean()
            if cell.hidden == "local":
                loss = loss * (1 + drift)
                drift = 0.5 * drift + 0.1 * loss.item()
            elif carry is not None:
                loss = loss * (1 + carry.drift)
                carry.drift = 0.5 * carry.drift + 0.1 * loss.item()
            if metric is not None:
                metric.update(loss.detach())
            kit.step(loss, batch, optimizer, schedule)
            rates = tuple(group["lr"] for group in optimizer.param_groups)
            trace.append(("train", epoch, batch, tuple(ids.tolist()), loss.detach().item().hex(), rates))
            if "within" in cell.evaluation and batch % 2 == 1:
                evaluate(model, evaluation, trace)
        optimizer.zero_grad()
        if "per epoch" in cell.evaluation:
            evaluate(model, evaluation, trace)
        if metric is not None:
            trace.append(("metric", float(metric.compute()).hex()))
            metric.reset()
    found = digest(weights=net.state_dict(), optimizer=optimizer.state_dict(), schedule=schedule.state_dict())
    kit.close()
    return found


def evaluate(model: nn.Module, loader: Any, trace: Any) -> None:
    """Score the model; the noise of the data and the order are part of the trace."""
    model.eval()
    with torch.no_grad():
        for x, y, ids in loader:
            trace.append(("eval", tuple(ids.tolist()), ((model(x) - y) ** 2).mean().item().hex()))
    model.train()


# ---- Lightning


class Module(pl.LightningModule):
    """The same net in Lightning."""

    def __init__(self, cell: Cell, seed: int, trace: Any) -> None:
        super().__init__()
        self.net = Net(cell.hidden, seed)
        self.cell, self.journal = cell, Journal(trace)
        self.metric = metric_of(cell)
        self.scale = 1.0

    def on_train_start(self) -> None:
        if self.cell.hooks == "start":
            torch.rand(3)

    def on_train_epoch_start(self) -> None:
        if self.cell.metric == "tracker":
            self.metric.increment()
        if self.cell.hooks == "draw":
            torch.rand(1)
        if self.cell.hooks == "clear":
            self.optimizers().optimizer.state.clear()
        if self.cell.hooks == "schedule":
            self.lr_schedulers().step()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, ids = batch
        loss = ((self.net(x) - y) ** 2).mean() * self.scale
        rates = tuple(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        row = ("train", self.current_epoch, batch_idx, self.global_step, tuple(ids.tolist()))
        self.journal.append((*row, loss.detach().item().hex(), rates))
        if self.cell.metric == "tracker":
            self.metric.update(loss.detach())
            self.journal.append(("metric", float(self.metric.compute()).hex()))
        elif self.metric is not None:
            self.metric(loss.detach())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.metric is not None and self.cell.metric != "tracker":
            self.journal.append(("metric", float(self.trainer.callback_metrics["metric"]).hex()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, ids = batch
        if not self.trainer.sanity_checking:
            loss = ((self.net(x) - y) ** 2).mean()
            self.journal.append(("eval", self.global_step, tuple(ids.tolist()), loss.item().hex()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Counts(Callback):
    """Hidden state of a callback: it scales the loss by how many batches it has seen."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.batches += 1
        pl_module.scale = 1 / (1 + 0.1 * self.batches)


def with_lightning(cell: Cell, job: dict[str, Any], options: dict[str, Any] | None, trace: Any, rank: int) -> Any:
    """A `Trainer`."""
    module, evaluation = Module(cell, job["seed"], trace), evaluation_of(cell)
    callbacks = [Counts()] if cell.hidden == "callback" else []
    ours = [] if options is None else [lightning_ckpt.AdaptiveCheckpoint(options)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=cell.ranks,
        strategy="ddp" if cell.ranks > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[*callbacks, *ours],
        accumulate_grad_batches=cell.accumulate,
        val_check_interval=2 if "within" in cell.evaluation else None,
        limit_val_batches=0 if evaluation is None else 1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job["folder"],
    )
    seed_everything(job["seed"] + rank)
    trainer.fit(module, loader_of(cell), evaluation, ckpt_path="auto" if ours else None)
    return digest(
        weights=module.state_dict(),
        optimizer=trainer.optimizers[0].state_dict(),
        schedule=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )


# ---- transformers


class Wrapped(nn.Module):
    """The same net as transformers calls it."""

    def __init__(self, cell: Cell, seed: int) -> None:
        super().__init__()
        self.net = Net(cell.hidden, seed)
        self.scale = 1.0

    def forward(self, x: Any, y: Any, ids: Any = None, **more: Any) -> Any:
        out = self.net(x)
        return {"loss": ((out - y) ** 2).mean() * self.scale, "logits": out}


class Hooked(TrainerCallback):  # type: ignore[misc]
    """Hooks of the user; the model's scale is hidden state that a callback moves."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.batches = cell, 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.cell.hooks == "draw":
            torch.rand(1)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if self.cell.hidden == "callback":
            self.batches += 1
            getattr(model, "module", model).scale = 1 / (1 + 0.1 * self.batches)


def with_transformers(cell: Cell, job: dict[str, Any], options: dict[str, Any] | None, trace: Any, rank: int) -> Any:
    """A `transformers.Trainer`."""
    wrapped = Wrapped(cell, job["seed"])

    def seen(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        kind = "train" if module.training else "eval"
        trace.append((kind, tuple(kwargs["ids"].tolist()), output["loss"].detach().item().hex()))

    wrapped.register_forward_hook(seen, with_kwargs=True)
    ours = [] if options is None else [accelerate_ckpt.TransformersCallback(options)]
    streamed = cell.loader.endswith("stream")
    evaluates = {"none": "no", "within": "steps", "within, kept workers": "steps"}.get(cell.evaluation, "epoch")
    trainer = Trainer(
        model=wrapped,
        args=TrainingArguments(
            job["folder"],
            use_cpu=True,
            ddp_backend="gloo" if cell.ranks > 1 else None,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=cell.accumulate,
            num_train_epochs=EPOCHS,
            max_steps=18 // cell.accumulate if streamed else -1,
            eval_strategy=evaluates,
            eval_steps=2 if "within" in cell.evaluation else None,
            dataloader_num_workers=2 if "workers" in cell.loader else 0,
            dataloader_persistent_workers="kept" in cell.loader,
            dataloader_drop_last=cell.loader == "drop_last",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            save_strategy="no",
            logging_strategy="no",
            seed=job["seed"],
            remove_unused_columns=False,
            learning_rate=1e-2,
            label_names=["y"],
            dataloader_pin_memory=False,
        ),
        data_collator=collate_of(cell),
        train_dataset=dataset_of(cell),
        eval_dataset=None if cell.evaluation == "none" else Augmented(8),
        callbacks=[Hooked(cell), *ours],
    )
    seed_everything(job["seed"] + rank)
    trainer.train(resume_from_checkpoint=ours[0].resume_from(trainer) if ours else None)
    return digest(weights=wrapped.state_dict(), optimizer=trainer.optimizer.state_dict())
