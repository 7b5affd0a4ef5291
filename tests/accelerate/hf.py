"""A tiny language model on Python's own source text, and `transformers.Trainer` training it with a trace."""

from __future__ import annotations

import string
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from accelerate_ckpt import TransformersCallback
from tests.lightning.runs import Journal
from tests.loop.runs import Outcome, digest, seed_everything

LENGTH = 16
SAMPLES = 22
_TIMED = ("runtime", "per_second")


class Text(Dataset[Any]):
    """Pieces of a module's source, a byte of each replaced at random."""

    def __init__(self, samples: int = SAMPLES) -> None:
        data = Path(string.__file__).read_bytes()
        self.pieces = [torch.tensor(list(data[i * LENGTH : (i + 1) * LENGTH])) for i in range(samples)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index].clone()
        piece[int(torch.randint(LENGTH, ()))] = 0
        return {"input_ids": piece, "labels": piece}


class Endless(IterableDataset[Any]):
    """The same samples as a stream of unknown length; `set_epoch` chooses their order, as for HF's streaming sets."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        text = Text()
        order = torch.randperm(len(text.pieces), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (text[index] for index in order)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Appends what is logged to the trace, and waits for snapshots, so that none is skipped."""

    def __init__(self, trace: Any, ours: list[TransformersCallback]) -> None:
        self._journal, self.ours = Journal(trace), ours

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        timeless = {name: value for name, value in logs.items() if not any(part in name for part in _TIMED)}
        self._journal.append(("log", state.global_step, repr(sorted(timeless.items()))))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for ckpt in self.ours:
            if ckpt.config.every_n_steps == 1 and ckpt.tracker is not None:
                ckpt.tracker.before_update()
                assert ckpt.tracker._engine.wait(30)


def train_hf(
    arguments: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    folder: Path,
    *,
    seed: int = 0,
    trace: Any = None,
    overflows: int = 0,
    asks: bool = True,
    late: bool = False,
    data: Callable[[], Any] | None = None,
    samples: int = SAMPLES,
    more: Sequence[TrainerCallback] = (),
) -> Outcome:
    """One process; without options there is no callback of ours.

    Args:
        asks: the script passes `resume_from`.
        late: the callback is added to a trainer that was made without it.
        overflows: with so many steps at first that a GradScaler skips.
        data: makes the training data.
        samples: of the training data.
        more: callbacks before ours.
    """
    seed_everything(seed)
    transformers.logging.set_verbosity_error()
    trace = [] if trace is None else trace
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2))

    def seen(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        ids = hash(tuple(kwargs["input_ids"].flatten().tolist()))
        trace.append(("train" if module.training else "eval", ids, output.loss.detach().item().hex()))
        if trainer.state.global_step < overflows:
            output.loss = output.loss * float("inf")

    model.register_forward_hook(seen, with_kwargs=True)
    ours = [] if options is None else [TransformersCallback(options)]
    recorder = Recorder(trace, ours)
    patience = [EarlyStoppingCallback(50)] if arguments.get("load_best_model_at_end") else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice that is not about us
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                str(folder),
                **{
                    "use_cpu": True,
                    "per_device_train_batch_size": 4,
                    "num_train_epochs": 3,
                    "report_to": [],
                    "disable_tqdm": True,
                    "log_level": "error",
                    "save_strategy": "no",
                    "logging_strategy": "steps",
                    "logging_steps": 3,
                    "logging_nan_inf_filter": False,
                    "seed": seed,
                    "remove_unused_columns": False,
                    "learning_rate": 1e-2,
                    "dataloader_pin_memory": False,
                    **arguments,
                },
            ),
            train_dataset=Text(samples) if data is None else data(),
            eval_dataset=Text(8),
            callbacks=[*more, *([] if late else ours), recorder, *patience],
        )
        for one in ours if late else ():
            trainer.add_callback(one)
        if overflows:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        seed_everything(seed)
        trainer.train(resume_from_checkpoint=ours[0].resume_from(trainer) if ours and asks else None)
    found = digest(weights=trainer.model.state_dict(), optimizer=trainer.optimizer.state_dict())
    history = [{k: v for k, v in e.items() if not any(t in k for t in _TIMED)} for e in trainer.state.log_history]
    found["history"] = repr(history)
    return Outcome(trace, found)
