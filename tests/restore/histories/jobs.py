"""One job of a schedule, in a process of its own: trains a tiny model in some trainer, a step each time it is asked.

The other end of `Link` asks (`save`, `load`, `end`) and hears: `ready`, what was loaded, what is durable where, errors.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_engine import Checkpointer
from ckpt_engine.engine import Engine
from ckpt_engine.errors import CkptError, OvertakenError
from ckpt_engine.observe.events import Event, SnapshotCommitted, SnapshotReplicated

WAIT_SECONDS = 120.0
ENDLESS = 1000
Options = Mapping[str, Any]


class Link:
    """What a job says and hears; an event sink, too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loaded = False

    def emit(self, event: Event) -> None:
        if isinstance(event, SnapshotCommitted | SnapshotReplicated):
            self.say("durable", event.tier, event.snapshot)

    def say(self, *what: Any) -> None:
        self._connection.send(what)

    def asked(self) -> Any:
        """The next request."""
        self.say("ready")
        return self._connection.recv()

    def began(self, engine: Engine) -> None:
        """Of a trainer: it has the lease, and has loaded what it goes on from, if anything."""
        if not self._loaded:
            self._loaded = True
            engine.events.add(self)  # type: ignore[attr-defined]
            self.say("began", engine.attempt, None if engine.loaded is None else engine.loaded.info.id)

    def step(self, engine: Engine) -> bool:
        """Between two steps: everything is durable; whether to train on."""
        self.began(engine)
        assert engine.wait(WAIT_SECONDS)
        engine.poll()
        return bool(self.asked() != "end")


def plain(link: Link, options: Options, *, resume: bool) -> None:
    """A loop that loads, or not, before it has the lease."""
    ckpt, step = Checkpointer(**{name: value for name, value in options.items() if name != "every_n_steps"}), 0
    ckpt.engine.events = link
    while (request := link.asked()) != "end":
        try:
            if request == "load":
                state = ckpt.load()
                step = 0 if state is None else state["step"]
                link.say("loaded", None if ckpt.loaded is None else ckpt.loaded.info.id)
                continue
            step += 1
            handle = ckpt.save({"w": torch.full((8,), float(step)), "step": step}, step=step)
            while handle.skipped is not None:  # the writer waits for the one before it
                assert ckpt.wait(WAIT_SECONDS)
                handle = ckpt.save({"w": torch.full((8,), float(step)), "step": step}, step=step)
            handle.wait(WAIT_SECONDS)
            link.say("began", ckpt.engine.attempt, None if ckpt.loaded is None else ckpt.loaded.info.id)
        except OvertakenError:
            link.say("overtaken")
    ckpt.close()


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(TensorDataset(torch.ones(5, 2)))


def _loop(link: Link, engine: Engine, epochs: range, model: Any, optimizer: Any, batches: Any) -> None:
    for _ in epochs:
        for (x,) in batches:
            if not link.step(engine):
                return
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def tracked(link: Link, options: Options, *, resume: bool) -> None:
    """`track`."""
    with Checkpointer(**options, resume="auto" if resume else "off") as ckpt:
        model, optimizer, batches = _parts()
        tracker = ckpt.track(model=model, optimizer=optimizer, loader=batches)
        _loop(link, ckpt.engine, range(tracker.epoch, ENDLESS), model, optimizer, batches)


def accelerated(link: Link, options: Options, *, resume: bool) -> None:
    """Accelerate."""
    from accelerate import Accelerator

    from accelerate_ckpt import AdaptiveCheckpoint

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(*_parts())
    with AdaptiveCheckpoint(accelerator, **options, resume="auto" if resume else "off") as ckpt:
        engine: Any = ckpt._engine
        _loop(link, engine, range(ckpt.epoch, ENDLESS), model, optimizer, batches)


def lightning(link: Link, options: Options, *, resume: bool) -> None:
    """Lightning; without a resume as if `ckpt_path` was forgotten."""
    import lightning.pytorch as pl

    from lightning_ckpt import AdaptiveCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Gate(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            assert adaptive._run is not None
            trainer.should_stop = not link.step(adaptive._run.engine)

    adaptive = AdaptiveCheckpoint(dict(options))
    trainer = pl.Trainer(
        max_epochs=ENDLESS,
        min_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[adaptive, Gate()],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(5, 2))), ckpt_path="auto" if resume else None)


def transformers(link: Link, options: Options, *, resume: bool) -> None:
    """transformers; without a resume as if `resume_from` was forgotten."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from accelerate_ckpt import TransformersCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).sum()}

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert ckpt._engine is not None
            self.over = not link.step(ckpt._engine)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.over

    ckpt = TransformersCallback(dict(options), **({"resume": "auto"} if resume else {}))
    arguments = TrainingArguments(
        str(Path(str(options["tiers"][-1])) / ".." / "out"),
        use_cpu=True,
        per_device_train_batch_size=1,
        num_train_epochs=ENDLESS,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    data: Any = [{"x": torch.ones(2)} for _ in range(5)]
    Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[ckpt, Gate()]).train()


KINDS: Mapping[str, Callable[..., None]] = {
    "plain": plain,
    "track": tracked,
    "accelerate": accelerated,
    "lightning": lightning,
    "transformers": transformers,
}


def main(kind: str, options: Options, resume: bool, connection: Connection, log: str) -> None:
    """The job's process."""
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, force=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    link = Link(connection)
    try:
        KINDS[kind](link, options, resume=resume)
    except CkptError as err:
        link.say("error", err.code, str(err))
    except BaseException as err:
        logging.exception("the job broke down")
        link.say("broken", repr(err))
    else:
        link.say("ended")
    connection.close()
