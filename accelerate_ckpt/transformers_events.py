"""Snapshots of a transformers `Trainer`, driven by its events: what a `TransformersCallback` does.

Of several ranks, `meet` makes sure before the first snapshot that all are there and keep their snapshots in one place.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from typing_extensions import override

from accelerate_ckpt.adaptive import AcceleratedParts, ranks_of
from accelerate_ckpt.private import AcceleratorInternals, source_of
from accelerate_ckpt.private_trainer import TrainerInternals, trainer_above
from accelerate_ckpt.transformers_state import (
    NOTE,
    PACE,
    SHIFT,
    WHOLE,
    TrainerSurroundings,
    as_file,
    counts,
    pace_of,
    require_same_batch,
    require_same_epoch,
    steps_before,
)
from ckpt_engine.adapter import (
    CkptError,
    Config,
    ConfigError,
    Curves,
    Engine,
    LoaderSource,
    OnChange,
    Options,
    ResumeError,
    Tracker,
    TrainerResume,
    load_config,
    write_streams,
)

_log = logging.getLogger("ckpt_engine.transformers")

_FILE = "trainer_state.json"
_RESUME = "trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer))"
_LOADER = "loader"
_NOT_EXACT = {
    "ignore_data_skip": ("begins the epoch's data again after a resume", "leave it out"),
    "auto_find_batch_size": (
        "begins again at step 0 with smaller batches and the weights of then, when memory runs out",
        "leave it out, and set per_device_train_batch_size to what it finds in a run without this callback",
    ),
}
_CALLS = (
    "on every rank: trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer)), with the callback in the trainer"
)


class TrainerEvents(TrainerCallback):
    """What a `TransformersCallback` becomes when it is made; see there."""

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, **options: Unpack[Options]
    ) -> None:
        self.config: Config = load_config(config, **options)
        self._internals: TrainerInternals | None = None
        self._engine: Engine | None = None
        self.tracker: Tracker | None = None
        """Where the loop is, while it trains."""
        self._folder: Path | None = None
        self._asked = False
        """`resume_from` was called for the training that begins next."""
        self._imported = False
        self._unchecked = False
        """transformers has counted where it resumes, and that is not compared yet."""
        self._evaluations: dict[str, Any] = {}
        self._step = self._saved_step = 0
        """From which transformers counts on, and that of the snapshot: others where the loader has changed."""
        self._shift = 0
        """By how many steps it counts more than were trained, since the run began."""
        self._begun = 0
        """The epoch that the tracker was in when training began."""
        self._saved_epoch = 0
        """In which the loader continues. The tracker counts no epoch whose steps a GradScaler has all skipped."""
        self._idle = dict(vars(self))

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the options, and has not begun: a run belongs to one trainer and one process."""
        return {**vars(self), **self._idle}

    def resume_from(self, trainer: Trainer) -> str | None:
        """See `TransformersCallback.resume_from`."""
        engine, internals = self._open(trainer)
        self._hear(trainer)  # of a trainer that has got this callback later
        self._asked = True
        if self.config.resume_word == "off":
            return None
        candidate = engine.choose()
        if candidate is None or TrainerResume.restarts(self.config.resume, candidate.manifest.notes):
            return None
        state = candidate.manifest.notes.get(NOTE)
        if state is None:
            raise ResumeError(
                f"snapshot {candidate.info.id} was not taken in a run of transformers.Trainer",
                hint="give this run its own folder",
            )
        self._imported = TrainerSurroundings.IMPORTED in candidate.manifest.notes
        if not self._imported:
            # transformers 4 takes the saved one instead of the argument; what follows of another one is checked later.
            state = {**state, "train_batch_size": trainer.args.train_batch_size}
        self._folder = Path(tempfile.mkdtemp(prefix="ckpt-resume-"))
        (self._folder / _FILE).write_text(as_file(state), encoding="utf-8")
        self._step = self._saved_step = int(state["global_step"])
        batches = int(candidate.manifest.notes.get("batch") or 0)
        if not self._imported:
            at = candidate.info.epoch or 0, batches
            internals.recount_with(lambda loader, steps: self._recount(state, at, loader, steps))
        internals.keep_weights()
        internals.open_runs(Curves.runs_of(candidate.manifest.notes, engine.root_url))
        if not self._imported and not has_length(trainer.train_dataset):
            # Where passes are too short for a boundary within, that is at the start of the next one.
            begins = state["global_step"] > 0 and not batches
            internals.count_from(int(state["epoch"] or 0) + begins, batches)
        return str(self._folder)

    def _open(self, trainer: Trainer) -> tuple[Engine, TrainerInternals]:
        """The run's lease, taken for this trainer, on all of its ranks."""
        self._release()
        internals = TrainerInternals(trainer)

        def check() -> None:
            _require(self, trainer)
            internals.probe()

        engine = Engine(self.config, ranks=ranks_of(trainer.accelerator))
        meet(engine, check)
        self._internals, self._engine = internals, engine
        engine.start()
        return engine, internals

    def _open_unasked(self, step: int) -> None:
        """As `_open`, where training has begun without a word about resuming, or by transformers at a later step.

        Raises:
            ConfigError: it is too late to resume.
        """
        trainer = trainer_above()
        if trainer is None:
            raise ConfigError("the trainer that calls this callback cannot be found", hint=_RESUME)
        engine, _ = self._open(trainer)
        there = getattr(self.config.resume, "from", None) or engine.snapshots(nearest=True)
        if self.config.resume_word == "auto" and not step and there:
            self._release()
            raise ConfigError(
                "resume='auto' needs a callback that the trainer is made with, and this one was added later",
                hint=f"Trainer(..., callbacks=[ckpt]), or {_RESUME}",
            )
        engine.start_fresh(f"{_RESUME}, or TransformersCallback(..., resume='auto')")

    # ---- events

    @override
    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """With `resume: auto`, `train` asks for the newest snapshot; what it raises is reported in any case."""
        if (trainer := trainer_above()) is not None:
            self._hear(trainer)

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Everything is prepared: put the snapshot back, and take snapshots from here on."""
        unasked, self._asked = not self._asked, False
        if unasked:
            self._open_unasked(state.global_step)
        internals, engine = self._internals, self._engine
        assert internals is not None
        assert engine is not None
        resumed = self._folder is not None
        if not self._imported:
            self._remove_folder()
        internals.unwrap()
        internals.follow_running_loss()
        private = AcceleratorInternals(internals.trainer.accelerator)
        private.probe()
        source = source_of(objects["train_dataloader"])
        source.reset()
        more = {"scheduler": objects["lr_scheduler"]}
        if resumed and args.max_steps > 0:
            state.max_steps += self._shift  # as many steps are left as the user has asked for
        shift = self._shift = self._shift if resumed else 0
        audits = self.config.hidden != "off"
        surroundings = TrainerSurroundings(internals.trainer, internals, self, shift, self._counted, audits=audits)
        self.tracker = tracker = Tracker(
            engine,
            AcceleratedParts(internals.trainer.accelerator, private, more, grows=True),
            {_LOADER: source},
            surroundings,
            trainer="transformers",
            folder=Path(args.output_dir or "."),
            begins_at=state.global_step if unasked else None,
        )
        self._evaluations.clear()
        internals.around(internals.trainer, "get_eval_dataloader", self._get_eval_dataloader)
        foreign = self._imported or (unasked and state.global_step > 0)  # a checkpoint of transformers' own continues
        self._unchecked = resumed and not self._imported
        self._begun, self._saved_epoch = tracker.epoch, _saved_epoch(engine, int(getattr(source.outer, source.counter)))
        if resumed or foreign:
            internals.skip_with(self._skip_foreign if foreign else self._skip)
        _require_same_step(tracker, engine, self._saved_step, self._step, state, resumed=resumed)
        if resumed:
            surroundings.share_history(engine.agree)
        if foreign:
            tracker.continue_after(_LOADER, int(state.epoch or 0), 0)
        if self._folder is not None and surroundings.streams is not None:
            write_streams(surroundings.streams, self._folder)
        tracker.continue_curves(internals.curves)

    @override
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """The first batches are fetched, and nothing is trained yet."""
        if self._internals is not None and self.tracker is not None:
            self.tracker.continue_curves(self._internals.curves)  # callbacks behind this one have begun, too
            self._internals.forget_runs()
            if self._internals.unskip():
                self._skip(objects["train_dataloader"], 0)
        if self._unchecked:
            self._unchecked = False
            loader = objects["train_dataloader"]
            # Before 5.0 the last step of a resumed epoch asks for more batches than there are, which ends the pass.
            ended = tracker.epoch - self._begun if (tracker := self.tracker) is not None else 0
            require_same_epoch(int(getattr(loader, source_of(loader).counter)) - ended, self._saved_epoch)
        self._remove_folder()  # an imported run has its random streams from there by now

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """The numbers that retention may rank by; and evaluation is not training."""
        if self.tracker is not None and metrics:
            self.tracker.report(metrics)
            if not self._evaluations:  # passes over a followed loader announce themselves
                self.tracker.evaluated(self.tracker.metrics.get("eval_runtime", 0.0))

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Reports get our numbers whenever they get the trainer's; its own history and what it prints do not."""
        if self.tracker is not None and self._internals is not None and self.config.log.loggers != "off":
            for report in self._internals.reports:
                report.on_log(args, state, control, logs=self.tracker.numbers(), **objects)

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Take the final snapshot, unless the weights are those of an earlier step now; wait until all are durable."""
        try:
            if self.tracker is not None:
                best = args.load_best_model_at_end and state.best_model_checkpoint is not None
                # Resumed in an epoch that is not the last one's end, transformers would train one more step before it
                # sees that it is done.
                step, epoch = counts(state, self._counted)
                over = step >= state.max_steps and epoch >= state.num_train_epochs
                assert self._engine is not None
                if self._unchecked and self._saved_epoch < state.num_train_epochs:
                    require_same_epoch(state.num_train_epochs, self._saved_epoch)  # no step was left for transformers
                # A machine that does not see the best checkpoint has no other weights: then the ranks differ.
                self.tracker.finish(complete=self._engine.meet(lambda: over and not best, all))
        finally:
            self._release()

    # ---- private

    def _counted(self) -> tuple[int, float]:
        tracker = self.tracker
        return (0, 0.0) if tracker is None else (tracker.global_step + self._shift, float(tracker.epoch))

    def _hear(self, trainer: Trainer) -> None:
        auto = self.config.resume_word == "auto"
        TrainerInternals(trainer).train_with(
            lambda: self.resume_from(trainer) if auto and not self._asked else None, self._failed
        )

    def _failed(self, error: BaseException) -> None:
        """`train` ends by this: leave the process as it was found. Never raises."""
        if self.tracker is not None:
            self.tracker.failed_with(error)
        try:
            self._release(Tracker.exception_wait_seconds, failed=True)
        except CkptError as err:
            _log.error("while handling %s: %s", type(error).__name__, err)

    def _get_eval_dataloader(self, original: Callable[[Any], Any], eval_dataset: Any = None) -> Any:
        """A loader that the trainer keeps for the next evaluation, because its workers stay, has a position."""
        loader = original(eval_dataset)
        source = source_of(loader)
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if self.tracker is not None and source.base.persistent_workers and self._evaluations.get(name) is not loader:
            self._evaluations[name] = loader
            self.tracker.follow(f"evaluation {name}", source)
        return loader

    def _recount(self, state: Mapping[str, Any], at: tuple[int, int], loader: Any, steps: int) -> int:
        """transformers computes epoch and batch from a number of steps: that of the loader as it is now.

        Args:
            at: epoch and batch of the snapshot.
        """
        if self._internals is None or self._folder is None:
            return 0
        epoch, batches = at
        on_change = OnChange(self.config.data)
        length, pace = LoaderSource.length_of(loader) or 0, state.get(PACE) or {}
        trained = length - (int(pace[WHOLE]) - batches) if WHOLE in pace else batches
        if 0 <= trained < length and pace_of(self._internals.trainer).items() <= pace.items():
            self._internals.count_from(max(epoch, int(state["epoch"] or 0)), trained)
        self._step = (
            steps_before(state, batches, self._internals.trainer, length, steps, on_change) if length else self._step
        )
        (self._folder / _FILE).write_text(as_file({**state, "global_step": self._step}), encoding="utf-8")
        self._shift = int(pace.get(SHIFT, 0)) + self._step - self._saved_step
        return self._shift

    def _skip(self, loader: Any, batches: int) -> Any:
        """Instead of `skip_first_batches`: the loader itself stands after these batches."""
        assert self.tracker is not None
        require_same_batch(loader, batches, self.tracker.resumed_batches)
        return loader

    def _skip_foreign(self, loader: Any, batches: int) -> Any:
        """The loader itself, so that it is followed, after as many batches of the epoch as transformers has counted."""
        assert self.tracker is not None
        assert self._internals is not None
        epoch = int(self._internals.trainer.state.epoch or 0)
        loader.set_epoch(epoch)
        self.tracker.continue_after(_LOADER, epoch, batches)
        return loader

    def _release(self, timeout: float | None = None, *, failed: bool = False) -> None:
        tracker, self.tracker = self.tracker, None
        self._evaluations.clear()
        engine, self._engine = self._engine, None
        internals, self._internals = self._internals, None
        self._remove_folder()
        if internals is not None:
            internals.unwrap()
            internals.forget_runs()
        if tracker is not None:
            tracker.release()
        if engine is not None:
            engine.close(timeout, failed=failed)

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _require(callback: TrainerEvents, trainer: Trainer) -> None:
    """Raises ConfigError where there is no exact resume."""
    arguments = trainer.args
    rows = (
        (
            not any(one is callback for one in trainer.callback_handler.callbacks),
            "the trainer does not know this callback",
            "Trainer(..., callbacks=[ckpt]) or trainer.add_callback(ckpt)",
        ),
        (
            trainer.accelerator.distributed_type is DistributedType.DEEPSPEED,
            "DeepSpeed keeps its state to itself",
            "use the Trainer's own checkpoints, or TrainingArguments(fsdp=...)",
        ),
        (
            arguments.n_gpu > 1,
            f"this trainer spreads its model over {arguments.n_gpu} GPUs with DataParallel, which is not supported",
            "make one of them visible: CUDA_VISIBLE_DEVICES=0",
        ),
        *(
            (getattr(arguments, name), f"{name}=True {why}, so no resume is exact", hint)
            for name, (why, hint) in _NOT_EXACT.items()
        ),
    )
    for holds, why, hint in rows:
        if holds:
            raise ConfigError(why, hint=hint)


def _saved_epoch(engine: Engine, counted: int) -> int:
    """In which the snapshot continues; the loader has not counted an epoch whose end was not asked for."""
    notes = {} if engine.loaded is None else engine.loaded.manifest.notes
    return max(counted, int(notes[NOTE]["epoch"] or 0)) if NOTE in notes else counted


def _require_same_step(
    tracker: Tracker, engine: Engine, saved: int, counted: int, state: TrainerState, *, resumed: bool
) -> None:
    """Raises ResumeError if the state that was put back is not the one that transformers counts from.

    Args:
        saved: the step of the snapshot that was chosen.
        counted: the step that stands for it with this loader.
    """
    notes = {} if engine.loaded is None else engine.loaded.manifest.notes
    there = (notes[NOTE]["global_step"], counted) if NOTE in notes else None
    if there == ((saved, state.global_step) if resumed else None):
        return
    tracker.release()
    raise ResumeError(
        f"transformers resumes at step {state.global_step}, but the newest readable snapshot has another step",
        hint="trainer.train(resume_from_checkpoint=ckpt.resume_from(trainer)), once more if a snapshot was damaged",
    )


def meet(engine: Engine, check: Callable[[], None]) -> None:
    """All ranks are here and want the same, or each of them raises. Nothing is started or written before that.

    `train` has collectives from its beginning on: a rank that went there alone would wait until the group gives up.

    Args:
        engine: of this rank.
        check: raises what is wrong with this rank.

    Raises:
        ConfigError: a rank has not come within minutes, or ranks have their snapshots in different places.
        CkptError: what `check` has raised on some rank.
    """

    def say() -> list[tuple[str, str]]:
        check()
        node = engine.ranks.node if engine.ranks is not None else ""
        return [(node if tier.is_folder else "", tier.url) for tier in engine.config.tiers]

    try:
        engine.meet(say, _require_one_run)
    except TimeoutError as err:
        raise ConfigError("rank 0 has not called resume_from()", hint=_CALLS) from err


def _require_one_run(said: list[list[tuple[str, str]] | None]) -> None:
    missing = [rank for rank, one in enumerate(said) if one is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(said)} ranks have not called resume_from(): {', '.join(map(str, missing))}",
            hint=_CALLS,
        )
    # Machines may have disks of their own at different paths; the ranks of one machine share what it has.
    first: dict[tuple[int, str], tuple[int, Any]] = {}
    for rank, places in enumerate(said):
        for number, (machine, url) in enumerate(places or ()):
            other, known = first.setdefault((number, machine), (rank, url))
            if url != known:
                raise ConfigError(
                    f"rank {rank} has its snapshots in {url}, and rank {other} in {known}",
                    hint="give all ranks the same folder: a name with a time or a process number in it differs",
                )
