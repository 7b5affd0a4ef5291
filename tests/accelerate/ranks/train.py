"""One rank of a transformers `Trainer`: its launcher has set the environment and calls `main(job)`.

Appends a line of JSON per forward pass in training to `<trace>.<rank>`: samples, a draw of the random streams, and the
loss; a line per log too. The end of a rank is in `<trace>.end.<rank>`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckpt_engine.engine
from accelerate_ckpt import TransformersCallback
from tests.ranks.launch import PATIENCE_SECONDS
from tests.support.digests import digest, seed_everything
from tests.support.trainers import wait_for_the_arena

_TIMED = ("runtime", "per_second")
SAMPLES = 64


class Samples(Dataset[Any]):
    """Samples of different lengths that an augmentation changes by the global random stream."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(16, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        plain = self.plain(index)
        return {**plain, "x": plain["x"] + 0.1 * torch.rand(())}

    def plain(self, index: int) -> dict[str, Any]:
        labels = self.y[index].clone()
        labels[: index % 5] = -100
        return {"index": index, "x": self.x[index], "labels": labels, "input_ids": [0] * (1 + index % 7)}


class Stream(IterableDataset[Any]):
    """The same samples without a length and without an augmentation, which no position of such a dataset repeats."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(self._count)
        return (samples.plain(index) for index in range(len(samples)))


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("index", "x", "labels")}


class Net(nn.Module):
    """Batch norm, dropout, and a loss that is a mean over what all ranks have in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8))

    def forward(self, index: Any, x: Any, labels: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        wrong = (self.net(x) - labels).square()[labels != -100]
        items = wrong.numel() if num_items_in_batch is None else num_items_in_batch
        return {"loss": wrong.sum() / items, "logits": x}


class Language(GPT2LMHeadModel):  # type: ignore[misc]
    """Tied weights and a configuration."""

    def __init__(self, *, ties: bool = True) -> None:
        size = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        super().__init__(GPT2Config(**size, tie_word_embeddings=ties))

    def forward(self, index: Any, x: Any, labels: Any, **more: Any) -> Any:
        return super().forward(input_ids=labels.clamp(min=0), labels=labels, **more)


MODELS = {"net": Net, "language": Language, "untied": partial(Language, ties=False)}


class Trace:
    """The lines of one rank."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._fd = os.open(f"{job['trace']}.{rank_of()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **values: Any) -> None:
        os.write(self._fd, (json.dumps(values) + "\n").encode())


def rank_of() -> int:
    return int(os.environ.get("RANK", "0"))


def timeless(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if not any(part in name for part in _TIMED)}


def make_trainer(job: Mapping[str, Any], trace: Trace, callbacks: list[Any]) -> Trainer:
    """A trainer whose model writes the trace."""
    model = MODELS[job.get("model", "net")]()

    def seen(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if module.training:
            draw, loss = torch.rand(()).item().hex(), output["loss"].detach().item().hex()
            step = trainer.state.global_step
            trace.write(step=step, epoch=trainer.state.epoch, samples=kwargs["index"].tolist(), draw=draw, loss=loss)
            if step == job.get("stops_in"):
                os.kill(os.getpid(), signal.SIGTERM)
            if "stands_at" in job and callbacks[0]._engine is not None:
                wait_for_the_arena(callbacks[0]._engine)  # what is due before it stands is taken, and not later
            if step == job.get("stands_at"):
                time.sleep(PATIENCE_SECONDS)  # until somebody kills it
            time.sleep(job.get("pace", 0.0))

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if not job.get("together"):
                seed_everything(job["seed"] + rank_of())  # after the sampler was made, which is the same on all ranks

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            trace.write(log=state.global_step, **timeless(logs))

    model.register_forward_hook(seen, with_kwargs=True)
    arguments = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "no",
        "logging_steps": 3,
        "seed": job["seed"],
        "remove_unused_columns": False,
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
        **job.get("arguments", {}),
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(f"{job['root']}-out", **arguments),
        train_dataset=(Stream if job.get("stream") else Samples)(job.get("samples", SAMPLES)),
        eval_dataset=Samples(13),
        data_collator=collate,
        callbacks=[*callbacks, Recorder()],
    )
    return trainer


def shard(trainer: Trainer) -> None:
    """Accelerate turns FSDP on for accelerators only; what it then does works on CPUs, and so it is set here."""
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    kind = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(kind)
    AcceleratorState._shared_state.update(kind, fsdp_plugin=plugin)
    trainer.is_fsdp_enabled = True


def main(job: dict[str, Any]) -> None:
    """Train to the end, or until somebody stops the run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.basicConfig(level=logging.INFO, force=True, handlers=[logging.StreamHandler(sys.stderr)])
    ckpt_engine.engine.AGREE_SECONDS = job.get("agree_seconds", ckpt_engine.engine.AGREE_SECONDS)
    if job.get("alone"):  # a process that knows of no other rank
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    trace = Trace(job)
    trace.write(pid=os.getpid())
    try:
        train(job, trace)
    except BaseException as err:
        trace.write(exit=err.code if isinstance(err, SystemExit) else f"{type(err).__name__}: {err}")
        raise


def train(job: dict[str, Any], trace: Trace) -> None:
    """As a script does."""
    mine = job.get("ranks", {}).get(str(rank_of()), {})
    job = {**job, **mine}
    seed_everything(job["seed"])
    options = {
        "tiers": job["root"] + job.get("subfolder", ""),
        "every_n_steps": 2,
        "keep": {"last": 3},
        **job.get("options", {}),
    }
    ours = [] if job.get("without") else [TransformersCallback(options)]
    trainer = make_trainer(job, trace, ours)
    if trainer.args.fsdp:
        shard(trainer)
    resumes = ours and not job.get("forgets")
    trainer.train(resume_from_checkpoint=ours[0].resume_from(trainer) if resumes else None)
    if trainer.args.fsdp and trainer.args.fsdp_config["version"] == 2:
        assert any(isinstance(one, DTensor) for one in trainer.model.parameters())
    found = digest(
        **tree_map(_local, {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})
    )
    found["scheduler"] = repr(trainer.lr_scheduler.state_dict())
    found["history"] = repr([timeless(entry) for entry in trainer.state.log_history])
    Path(f"{job['trace']}.end.{rank_of()}").write_text(json.dumps(found))


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
