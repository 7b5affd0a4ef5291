"""The loop of `tests.loop.runs` as an Accelerate script."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration

from accelerate_ckpt import AdaptiveCheckpoint
from tests.loop.runs import Average, Case, Net, Outcome, digest, evaluate, lr, patient, seed_everything


def make_accelerator(case: Case, **more: Any) -> Accelerator:
    """A new accelerator in a process that may have had one."""
    PartialState._reset_state()  # type: ignore[no-untyped-call]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()  # type: ignore[no-untyped-call]
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(**case.extra),
        **more,
    )


def train_accelerate(case: Case, options: Mapping[str, Any] | None, *, seed: int = 0, trace: Any = None) -> Outcome:
    """One process of an Accelerate loop; without options, it is not tracked."""
    seed_everything(seed)
    trace = [] if trace is None else trace
    accelerator = make_accelerator(case)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    average = Average(model)
    loader = case.loader()
    evaluation = None if case.evaluation is None else case.evaluation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        evaluation = None if evaluation is None else accelerator.prepare(evaluation)
    accelerator.register_for_checkpointing(average)
    ckpt = None if options is None else AdaptiveCheckpoint(accelerator, options)
    for epoch in range(ckpt.epoch if ckpt is not None else 0, case.epochs):
        model.train()
        for batch, (x, y, ids) in enumerate(loader, ckpt.resumed_batches if ckpt is not None else 0):
            durable(ckpt)
            with accelerator.accumulate(model):
                loss = ((model(x) - y) ** 2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update(model)
            trace.append(("train", epoch, batch, tuple(ids.tolist()), loss.detach().item().hex(), lr(optimizer)))
            if case.evaluate_every and batch % case.evaluate_every == 1:
                evaluate(model, evaluation, trace)
                model.train()
        if not case.evaluate_every and evaluation is not None:
            evaluate(model, evaluation, trace)
    found = digest(weights=model.state_dict(), optimizer=optimizer.state_dict(), average=average.weights)
    accelerator.end_training()
    # An Accelerator is part of a cycle: found by the garbage collector, its loaders can no longer tell their workers to
    # end, and wait five seconds for each of them; workers that are forked meanwhile inherit all that.
    accelerator._dataloaders.clear()
    return Outcome(trace, found)


def durable(ckpt: AdaptiveCheckpoint | None) -> None:
    """Wait for the last snapshot, so that none is skipped because the writer is busy."""
    if ckpt is not None and ckpt._run.config.every_n_steps == 1:
        ckpt.before_update()
        assert ckpt._engine.wait(30)
    elif ckpt is not None and ckpt._run.config.memory is not None:
        patient(ckpt._engine)
