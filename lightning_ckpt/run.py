"""One `fit` with snapshots: connects trainer, cadence, loaders and engine, and takes a snapshot at due boundaries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from signal import SIGTERM
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_engine.adapter import CkptError, Config, Engine, OnChange, TrainerRun, hook_time
from lightning_ckpt import run_state, sharded
from lightning_ckpt.callback import FenceGuard
from lightning_ckpt.compat import LightningInternals, callbacks_of
from lightning_ckpt.compat_data import both
from lightning_ckpt.early_stop import EarlyStopWatch
from lightning_ckpt.fit_instants import FitInstants
from lightning_ckpt.fit_resume import FitResume
from lightning_ckpt.loaders import FitLoaders
from lightning_ckpt.loggers import hide_numbers, show_numbers
from lightning_ckpt.run_state import OF_LIGHTNING, BoundaryKind, FitParts, audited
from lightning_ckpt.sharded import ranks_of, replicas_of

_log = logging.getLogger("lightning_ckpt")


class FitRun:
    """Everything that lives from `setup("fit")` to `teardown` or `on_exception`.

    Args:
        trainer: that fits.
        module: what it fits.
        config: options.
        owner: the callback of the user; snapshots are taken only while it is in `trainer.callbacks`.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, config: Config, owner: Callback) -> None:
        self._trainer = trainer
        self._module = module
        self._owner = owner
        self._internals = LightningInternals(trainer)
        self._internals.probe()
        self.engine = Engine(config, ranks=ranks_of(trainer))
        self._loaders = FitLoaders(self._internals, trainer, OnChange(config.data))
        self._begun = self._announced_optimizers = self._is_over = False
        self._skip_batches = 0
        parts = FitParts(self._internals, trainer, module)
        self.guard = FenceGuard(self._guarded())
        self._stop = EarlyStopWatch(trainer)
        self._run = TrainerRun(
            self.engine,
            "lightning",
            trainer.strategy.root_device,
            _log,
            parts,
            lambda: audited(trainer, module, (owner, self.guard)),
            ends_with=SIGTERMException,
            skipped=OF_LIGHTNING,
            replicas=replicas_of(trainer),
            in_whole_steps=self._internals.in_whole_steps,
        )
        self.resume = FitResume(self._internals, trainer, module, self.engine, self._loaders, self._run)
        self._instants = FitInstants(trainer, self._internals, self._loaders, parts, self._stop, self._run, self.resume)
        self._given: int | None = None
        self._sanity_steps = trainer.num_sanity_val_steps
        self._validation_began = time.monotonic()

    # ---- connecting

    def connect(self) -> None:
        """Hook into the trainer; undone by `disconnect`."""
        internals = self._internals
        internals.wrap(
            {
                "resume_start": self.resume.resolve,
                "load_optimizer_state_dict": self.resume.restore_optimizers,
                "restore_training_state": partial(internals.restore_training, lambda: self.resume.to_restore),
                "process_dataloader": self._loaders.follow,
                "setup_data": self._loaders.make_validation,
                "on_advance_start": self._start_epoch,
                "reset": partial(internals.reset_silently, lambda: self.resume.pending),
                "advance": self._advance,
                "convert_input": self._convert_input,
            }
        )
        relays = self._run.stopping.halt.shared is not None and SIGTERM in self.engine.config.preemption.numbers()
        internals.defer_sigterm(lambda: self._run.stopping.watch.stop is not None, relays=relays)
        self._run.step_fence.install()
        others = [callback for callback in callbacks_of(self._trainer) if callback is not self._owner]
        # Weights must be whole before any other callback changes them, and callbacks' states final when captured.
        self._trainer.callbacks = [self.guard, *others, self._owner]  # type: ignore[attr-defined]
        self._internals.skip_idle_hooks(self.guard, self._owner)

    def disconnect(self) -> None:
        """Leave the trainer as it was found."""
        self._run.stopping.close()
        self._internals.unwrap()
        hide_numbers(self._internals.metric_tables["progress_bar"])
        self._run.step_fence.remove()
        self._loaders.release()
        # Another list: a loop over the old one that is under way is not disturbed.
        self._trainer.callbacks = [one for one in callbacks_of(self._trainer) if one is not self.guard]  # type: ignore[attr-defined]
        self._trainer.num_sanity_val_steps = self._sanity_steps

    @property
    def _active(self) -> bool:
        # Tuner callbacks run the same loops with the callbacks taken out.
        return self._owner in callbacks_of(self._trainer) and not self._trainer.sanity_checking

    # ---- what the callback's hooks call

    def optimizers_made(self) -> None:
        """Nothing of the run has changed them yet."""
        self._run.optimizers_made(run_state.named_schedulers(self._trainer))

    def train_started(self) -> None:
        """Lightning has restored its part; loaders exist."""
        sharded.require_trained(self._trainer)
        self.engine.start()
        self.engine.tenure.release = self.disconnect
        self.resume.go_on_beside()
        self._instants.flags_at_start = sharded.model_of(self._trainer).entries()["flags"]
        self._run.capture.audit.begin("start")
        if self.resume.pending:
            self._stop.by_early_stopping = self.resume.resume_run()
        self._announce()
        self._run.cadence.start(self._instants.step)
        self.engine.times.begin()
        self._run.stopping.start(self._instants.step)

    def validation_started(self) -> None:
        """Time from here to `validation_ended` is not training. A resumed run has no sanity check."""
        if self._trainer.sanity_checking:
            self._run.capture.audit.begin("unrepeated")
        self._validation_began = time.monotonic()

    def validation_ended(self) -> None:
        """A validation inside of training is over."""
        if self._trainer.sanity_checking:
            return
        self._instants.validated = True
        self._stop.after()
        self._run.evaluated(time.monotonic() - self._validation_began)

    @hook_time.counted
    def batch_ended(self, outputs: Any) -> None:
        """The loss for the guard; numbers for loggers and the progress bar."""
        self._instants.validated = False
        if self._run.stopping.losses is not None:
            self._run.stopping.losses.add(self._instants.step + self._internals.accumulating, outputs)
        show_numbers(self._run, self._trainer, self._internals)

    def close(self) -> None:
        """Training ended by itself: wait until everything is durable."""
        self._run.stopping.halt.complete = True
        if self.resume.pending:
            self.resume.publish()
        try:
            self.engine.close()
        finally:
            self.disconnect()
        if (stop := self._run.stopping.watch.stop) is not None:
            _log.warning("%s: it came when training was complete", stop.notice.who)
            raise self._run.stopping.halt.exit_of(stop)

    def abort(self, exception: BaseException) -> None:
        """Training failed: no collective, a deadline; what could be saved of it was, see `failed`."""
        try:
            if (
                isinstance(exception, both(SIGTERMException))
                and self._trainer.world_size == 1
                and not self._run.stopping.halt.done
            ):
                self._take_on_signal()
            self._run.close_after(exception)
        except CkptError as err:
            # The user must see the exception that stopped training, not this one.
            _log.error("while handling %s: %s", type(exception).__name__, err)
        finally:
            self.disconnect()
        if isinstance(exception, both(SIGTERMException)) and exception.code is None:
            # It came before training began: Lightning ends with 0, which says that the job is complete.
            exception.code = self._run.exit_code
            _log.warning("SIGTERM before the first step: training stops; %s", self._run.stopping.watch.run.durable())
        if (end := self._run.stopping.halt.end_of(exception)) is not exception:
            raise end  # it came meanwhile

    # ---- the loops

    def _start_epoch(self, original: Callable[[], None]) -> None:
        """Runs where Lightning starts an epoch."""
        self._internals.reset_epoch_length()
        if self.resume.pending or (self.resume.report.is_open and not self.guard.waits_for_batch):
            self.resume.before_epoch()
            self.guard.first_batch(self.resume.publish)
        original()
        self._loaders.measure()
        if self.resume.pending:
            self.resume.after_epoch_start()

    def _advance(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        """Runs where Lightning asks for a training batch and trains on it: the one before is finished.

        A stop that ended loader workers too may show as a batch that never comes: it is still the boundary then.
        """
        self._boundary()
        try:
            original(data_fetcher)
        except StopIteration:
            raise
        except Exception as err:
            still_there = self._nothing_came and self._loaders.one_with_workers
            where = str(self._internals.batches_in_total) if still_there else None
            if (stop := self._run.stopping.no_batch(err, where)) is not None:
                raise self.end(stop) from err
            raise

    def _convert_input(self, original: Callable[[Any], Any], batch: Any) -> Any:
        """Runs where the precision converts a batch, which is as its loader made it."""
        if self._trainer.training:
            self._run.took(batch)
        return original(batch)

    @hook_time.counted
    def _boundary(self) -> None:
        """The fetch boundary."""
        self._given = None
        if self._owner not in self._trainer.callbacks:  # type: ignore[attr-defined]
            return
        if self._begun:
            self._run.capture.audit.hidden.stepped()
        else:
            self._begun = True
            self._run.capture.audit.begin("batch")
        if self.resume.pending:
            self._skip_batches = self._internals.in_whole_steps(self.resume.skip_batches)
            self.resume.at_first_fetch()
            self._run.begins(0)
        if self._skip_batches:
            self._skip_batches -= self._internals.skip_batches(self._skip_batches)
        self._given, step = self._internals.batches_given, self._instants.step
        self._run.boundary(step, self)
        # In the middle of an accumulation ranks may be at different batches of one step.
        if self._run.stopping.halt.shared is None or (
            self._module.automatic_optimization and not self._internals.accumulating
        ):
            self._run.failing.reached(step, self._instants.record)
        else:
            self._run.failing.missed(step, "ranks may be at different batches of one step")

    # ---- boundary.Here

    def end(self, stop: Any) -> BaseException:
        """See `Here.end`."""
        return self._run.stopping.halt.end(
            stop,
            lambda reason: self._run.take_last(
                self._instants.at(self._instants.kind()), reason, accumulates=self._internals.accumulating
            ),
        )

    def decided(self, *, due: bool) -> None:
        if not (due or self._announced_optimizers):
            self._announce()

    def obstacle(self) -> str | None:
        # The gradients of an accumulation would make the state larger by a whole model, for a place a few batches away.
        return "accumulating" if self._instants.kind() is BoundaryKind.ACCUMULATING else None

    def take(self, reason: str, *, durable: bool) -> None:
        handle = self._run.take(self._instants.at(self._instants.kind()), reason, durable=durable)
        if handle is not None and durable:
            self._announced_optimizers |= self._optimizers_have_state

    @property
    def _nothing_came(self) -> bool:
        """No batch since the last boundary: no code but the loaders' has run, not even hooks that get the batch."""
        return self._given is not None and self._given == self._internals.batches_given

    # ---- before any other callback

    def _guarded(self) -> dict[str, Callable[..., object]]:
        """What `FenceGuard` does in its hooks."""
        fences = ("on_before_optimizer_step", "on_validation_start", "on_train_epoch_start")
        return {
            **dict.fromkeys(fences, lambda *_: self._run.fence()),
            "on_train_start": lambda *_: self.resume.before_train_start(),
            "on_validation_end": lambda *_: self._stop.before(),
            "on_train_epoch_end": lambda *_: self._epoch_over(),
            "on_train_end": lambda *_: self._training_over(),
            "on_fit_end": lambda *_: self.resume.fit_over(),
            "on_exception": lambda _trainer, _module, error: self._failed(error),
        }

    def _epoch_over(self) -> None:
        self._run.fence()
        self._stop.before()
        if self._active and self._internals.ends_mid_epoch:
            # A longer run would go on in this epoch, so this must be captured before anything sees its end.
            self._end_training(BoundaryKind.STOPPED)

    def _training_over(self) -> None:
        self._run.fence()
        self._stop.after()
        if self._active and not self._is_over:
            # Weight averaging has not replaced the weights yet; a longer run would go on with these.
            self._end_training(BoundaryKind.FINISHED)

    def _failed(self, exception: BaseException) -> None:
        if self._active and not isinstance(exception, both(SIGTERMException)):
            self._run.failing.waits = self._nothing_came and not self._internals.user_fetches
            self._run.failing.end(exception)
        self._run.fence()

    # ---- taking

    def _end_training(self, kind: BoundaryKind) -> None:
        self._is_over = True
        self._run.stopping.training_over(self._instants.step)
        if self._run.config.at_end:
            reason = self._run.cadence.ended(self._instants.step) or "end"
            # Other callbacks may replace the weights right after this.
            self._run.take_at_end(self._instants.at(kind), reason)

    def _take_on_signal(self) -> None:
        # Lightning also raises in the middle of a validation, where averaged weights may stand in for the real ones.
        if not (self._active and self._trainer.training and self._internals.between_batches):
            return
        if not self.engine.ready() and not self.engine.wait(0.0):
            return
        kind = self._instants.kind() if self._internals.in_epoch else BoundaryKind.FINISHED
        self._run.take(self._instants.at(kind), "signal")
        self._run.complete_copies()

    def _announce(self) -> None:
        """Make the arena ready in the background; again once the optimizers have their state."""
        if self._optimizers_have_state or self._internals.batches_in_total == 1 or self.resume.pending:
            self._announced_optimizers = self._optimizers_have_state
            self._run.prepare(self._instants.state(BoundaryKind.PLAIN))

    @property
    def _optimizers_have_state(self) -> bool:
        return any(optimizer.state for optimizer in self._trainer.optimizers)
