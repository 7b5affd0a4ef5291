"""The run of a trainer that drives its loop itself and calls back: what it needs of the engine, in one object."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from ckpt_engine.audit.audit import Audit
from ckpt_engine.audit.roots import roots_of_loaders
from ckpt_engine.engine import Engine
from ckpt_engine.loop.boundary import RunInstant, TrainingRun, losses_of
from ckpt_engine.loop.capture import Capture
from ckpt_engine.loop.components import Components, made_by_script
from ckpt_engine.loop.diverging import Rollbacks, require_alike
from ckpt_engine.loop.failing_loop import FailingRun
from ckpt_engine.loop.halt import EXCEPTION_WAIT_SECONDS
from ckpt_engine.loop.untracked import unsaved_within
from ckpt_engine.preempt.stop_requests import EXIT_CODE_OF_NOTICES
from ckpt_engine.snapshot.arguments import numbers_among
from ckpt_engine.snapshot.save_request import SaveHandle
from ckpt_engine.snapshot.step_fence import StepFence

_MOST_METRICS = 64


class TrainerParts(Components, Protocol):
    """The components of a trainer, which wraps its model and makes its loaders later."""

    def loaders(self) -> Mapping[str, Any]:
        """The loaders, or any nesting of them, by the names that users know them by."""

    def wrappers(self) -> Iterable[torch.nn.Module]:
        """The models as DDP wraps them, once they train."""


class TrainerRun(TrainingRun):
    """A `TrainingRun` with what looks at the model, makes the state, and saves the last boundary of a run that fails.

    Args:
        engine: takes and restores the snapshots.
        trainer: the name of the adapter, for notes.
        device: where training computes.
        log: of the adapter.
        parts: the components, whose optimizers' steps are recorded.
        roots: the user's objects that take part in training, by name; not the loaders.
        ends_with: makes of an exit code the exception that ends the run.
        skipped: attributes of the trainer's own classes.
        replicas: ranks that have samples of their own.
        in_whole_steps: so many batches, or a few more, that no optimizer step is cut in two.

    Attributes:
        failing: saves the last boundary of a run that ends by an exception.
        step_fence: makes optimizer steps wait for lazy copies, once it is installed.

    Raises:
        ConfigError: the ranks have different options; on all of them.
    """

    exit_code = EXIT_CODE_OF_NOTICES
    """Of a process that a notice ends before training begins."""

    def __init__(
        self,
        engine: Engine,
        trainer: str,
        device: torch.device,
        log: logging.Logger,
        parts: TrainerParts,
        roots: Callable[[], Mapping[str, Any]],
        *,
        ends_with: Callable[[int], BaseException],
        skipped: Collection[str] = (),
        replicas: int = 1,
        in_whole_steps: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        require_alike(engine)
        audit = Audit(engine.config.hidden, lambda: {**roots(), **roots_of_loaders(parts.loaders())}, log, skipped)
        super().__init__(
            engine,
            trainer,
            device,
            Capture(parts, audit, engine.ranks, parts.wrappers),
            log,
            ends_with=ends_with,
            losses=losses_of(engine.config),
            rollbacks=None if engine.config.rollback is None else Rollbacks(engine, log, replicas, in_whole_steps),
        )
        self.failing = FailingRun(self)
        self.step_fence = StepFence(self.fence)

    def optimizers_made(self, schedulers: Mapping[str, Any]) -> None:
        """The script has made optimizers and schedulers, and nothing of the run has changed them yet."""
        self.capture.made = made_by_script(self.capture.parts.optimizers, schedulers)

    def fence(self) -> None:
        """Wait until lazily copied tensors may change."""
        self.failing.last.changes()
        self.complete_copies()

    def numbers(self, values: Mapping[str, Any]) -> dict[str, float]:
        """The numbers among the values that a trainer reports, for retention; a limited number of them."""
        return numbers_among(values, _MOST_METRICS)

    def entries(self) -> dict[str, Any]:
        """What a snapshot has of the run besides the trainer's counters."""
        return {"cadence": self.cadence.state(), "unsaved_within": unsaved_within(self.capture.parts.optimizers)}

    def take_last(self, instant: RunInstant, reason: str, *, accumulates: bool) -> SaveHandle | None:
        """A durable snapshot before the run stops, also where it accumulates gradients; None: there is none."""
        if accumulates and self.capture.parts.flat is not None:
            self.log.error("no snapshot of step %d: FSDP1 does not show the gradients of an accumulation", instant.step)
            self.engine.miss(instant.step, "accumulating")
            return None
        return self.take(instant, reason)

    def close_after(self, error: BaseException) -> None:
        """An exception has ended training: close the engine within the time that is left."""
        self.engine.close(self.stopping.halt.seconds_after(error, EXCEPTION_WAIT_SECONDS), failed=True)
