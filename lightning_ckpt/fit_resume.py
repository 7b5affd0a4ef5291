"""Resuming: `ckpt_path="auto"` becomes the newest usable snapshot, and what Lightning does not restore is put back.

The order in which a resumed `fit` calls this: `resolve` (instead of the connector's `resume_start`), Lightning restores
its own part, `before_epoch` and `after_epoch_start` around the first epoch start, `at_first_fetch` right before the
first batch is asked for.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ckpt_engine.adapter import (
    Engine,
    Manifest,
    NotRestored,
    Replaced,
    Restored,
    ResumeError,
    TrainerRun,
)
from lightning_ckpt import restart, run_state, sharded
from lightning_ckpt.compat import LightningInternals, callbacks_of
from lightning_ckpt.compat_data import both, is_overridden
from lightning_ckpt.loaders import FitLoaders
from lightning_ckpt.loggers import FitLoggers
from lightning_ckpt.restart import AUTO, FreshStart, Kept, calls_the_users
from lightning_ckpt.run_state import MODEL, BoundaryKind

_log = logging.getLogger("lightning_ckpt")

TRAIN_START = "on_train_start"
_OPTIMIZERS, _SCHEDULERS = "optimizer_states", "lr_schedulers"
_NOT_IN_A_FILE = {
    "random streams": "a file of Lightning has none: they go on as this process has seeded them",
    "data position": "a file of Lightning has none: the loaders start again at their beginning",
    "running means": "a file of Lightning has none: logged means start again at zero",
}


class FitResume(FreshStart):
    """One resolution of `ckpt_path`, and the rest of the restore if it found a snapshot.

    Args:
        internals: of the trainer.
        trainer: that resumes.
        module: the LightningModule.
        engine: opens the run's folder.
        loaders: of this fit; none come outside of `fit`.
        run: that resumes; None outside of `fit`.
    """

    def __init__(
        self,
        internals: LightningInternals,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        engine: Engine,
        loaders: FitLoaders,
        run: TrainerRun | None = None,
    ) -> None:
        super().__init__(trainer, module, engine)
        self._internals = internals
        self._loaders = loaders
        self._run = run
        self._weights: Mapping[str, Any] = {}
        self._loaded_as: Mapping[str, torch.dtype] = {}
        self._unchanged: dict[str, Any] = {}
        """What Lightning has been handed whose optimizers are still to be changed."""
        self.to_restore: dict[str, Any] | None = None
        """What Lightning has been handed and has not put back yet."""
        self._callbacks: Mapping[str, Any] = {}
        self._kept: Kept | None = None
        self._regrouped: list[tuple[torch.optim.Optimizer, run_state.Groups]] = []
        self.loggers: FitLoggers | None = None

    @staticmethod
    @override
    def _component(name: str) -> str:
        kind, _, number = name.rstrip("]").partition("[")
        base = {"optimizers": "optimizer", _SCHEDULERS: "scheduler"}.get(kind, name)
        return base if number in ("", "0") else f"{base}_{number}"

    @property
    def pending(self) -> bool:
        """A snapshot of a `fit` was loaded, and not all of it is put back yet."""
        return "kind" in self._own

    @property
    def _rollbacks(self) -> Any:
        return None if self._run is None else self._run.stopping.rollbacks

    @property
    def _back(self) -> Any:
        """Where the run goes back to because it has diverged, or None."""
        return None if self._rollbacks is None else self._rollbacks.back

    # ---- choosing

    def resolve(self, original: Callable[..., None], checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Runs instead of the connector's `resume_start`.

        Raises:
            ResumeError: outside of `fit` there is nothing to load.
            NoUsableSnapshotError: there are snapshots, and none is usable.
            MismatchError: the snapshot is of another model; names the keys, before any data is read.
        """
        if self._run is not None and not self.pending:
            checkpoint_path = self.path_of(checkpoint_path)
        if checkpoint_path != AUTO:
            original(checkpoint_path, *args, **kwargs)
            return
        root = self._engine.root_url
        if self._run is not None:
            self._engine.start(resumes=True)
        candidate = self._engine.choose(check=self._fits)
        hpc = self._newer_hpc(candidate.manifest if candidate else None)
        if hpc is not None:
            _log.info("ckpt_path='auto': %s is newer than the newest snapshot in %s", hpc, root)
            if candidate is not None:
                self._engine.go_on_after(candidate.info)
            original(hpc, *args, **kwargs)
        elif candidate is None and Replaced.is_ours(original):
            original(AUTO, *args, **kwargs)  # a second callback with a folder of its own
        elif candidate is None:
            if self._run is None:
                raise ResumeError(
                    f"ckpt_path='auto': there is no snapshot in {root}, and untrained weights are not worth scoring",
                    hint="train first, or pass the path of a checkpoint",
                )
            self.report.announce(f"ckpt_path='auto': no snapshot in {root} yet, starting fresh; {self._engine.rhythm}")
            original(None, *args, **kwargs)
        else:
            if self._rollbacks is not None:
                self._rollbacks.pending(candidate.info.id)
            self._load()

    def _load(self) -> None:
        back = self._back
        model, live = sharded.model_of(self._trainer), sharded.live_of(self._trainer)
        step = None if back is None else back.step
        state = self._engine.load(step, live=live, check=self._fits, back=back is not None)
        loaded = self._engine.loaded
        assert state is not None
        assert loaded is not None
        own = self._open(state, loaded)
        if self._run is not None and self._engine.changes:
            own = self._change(own, state, divided=live is not None)
        if live is not None:
            model.load(state["state_dict"], self._trainer.optimizers, state.get("optimizer_states", []))
        model.prepare(own or {}, state, ("state_dict", "current_model_state"))
        self._internals.hand_over(state, f"{self._engine.root_url}#{loaded.info.id}")
        self.to_restore = state if self._run is not None and own is not None else None
        if self._run is None:
            _log.info("loaded the weights of snapshot %s (step %d)", loaded.info.id, loaded.info.step)
            return
        if own is None:
            self._resume_imported(loaded.manifest)
            return
        self._weights = state.get("current_model_state", state["state_dict"])
        if calls_the_users(self._trainer, self._module, TRAIN_START, restart.HOOK):
            self._callbacks = self.own_copy(
                state.get("callbacks", {})
            )  # they may keep, and change, what they are given
        self._loaded_as = {} if model.flat is not None else restart.dtypes_of(self._module)
        self._own = own
        self._set_teams(*sharded.team_sizes(loaded.manifest, self._trainer))
        if self._run is not None and self._elastic is None:
            self._run.capture.audit.resumes(own.get("audit", {}), own["hidden"])
        self._note_place(own, own["epoch"] if self.finished else None)
        if back is not None:
            self.report.notes.append(back.text())
            if self.report.rank == 0:
                _log.warning("%s; training goes on at step %d", back.text(), back.step)
            if self._internals.user_fetches:
                self.report.add([], [NotRestored("skipped batches", "training_step fetches itself")])
        self.report.notes += self._internals.skip_searches(lambda: self.pending, own.get("batch_sizes", {}))
        if self.loggers is not None:
            self.loggers.wait(loaded.manifest.notes)
        self._trainer.should_stop = self._should_stop()
        # A resumed run has been past its sanity check; its validation must not run at other places than it did.
        self._trainer.num_sanity_val_steps = 0
        others = None if self._elastic is None else self._elastic.saved_size
        self._loaders.expect(own["loaders"], own.get("validation", ()), others, self._resplit, self.report.announce)
        if self._elastic is not None:
            self._own = {**own, "rng": self._elastic.streams}
            if own["gradients"]:
                self._own["gradients"] = self._merged_gradients(self._module, model.root)

    def _change(self, own: dict[str, Any] | None, state: dict[str, Any], *, divided: bool) -> dict[str, Any] | None:
        """Make the changes of the option `resume`, but for those of optimizers, which are not made yet.

        Raises:
            MismatchError: the model does not have what is left then.
        """
        changes, model = self._engine.changes, sharded.model_of(self._trainer)
        weights = {} if divided else model.state()
        others = (key for key in tuple(state) if key not in (_OPTIMIZERS, _SCHEDULERS))
        changes.change(state, {"state_dict": weights, "current_model_state": weights}, *others)
        self._require_whole(MODEL, divided=divided)
        state.setdefault("state_dict", weights)
        if not divided:
            assert self._engine.loaded is not None
            shapes = model.shapes_in(state["state_dict"])
            model.require_fits(shapes, self._engine.loaded.info.id, strict=self._module.strict_loading)
        self._unchanged = state
        if own is None or not changes.touches(MODEL):
            return own
        gradients = {
            name: one for name, one in (own["gradients"] or {}).items() if not changes.leaves(f"{MODEL}.{name}")
        }
        return {**own, "flags": own["flags_at_start"], "gradients": gradients}

    def _change_optimizers(self, checkpoint: dict[str, Any]) -> None:
        """The same for optimizers and schedulers."""
        live = {
            _OPTIMIZERS: [one.state_dict() for one in self._trainer.optimizers],
            _SCHEDULERS: [one.scheduler.state_dict() for one in self._trainer.lr_scheduler_configs],
        }
        self._engine.changes.change(checkpoint, live, _OPTIMIZERS, _SCHEDULERS)
        parts = run_state.FitParts(self._internals, self._trainer, self._module)
        states = dict(zip(parts.optimizers, checkpoint[_OPTIMIZERS], strict=False))
        self._fit_optimizers(parts, states, self._own["parameters"])
        checkpoint[_OPTIMIZERS] = list(states.values())
        self._engine.changes.require_used()
        self._unchanged = {}

    def _resume_imported(self, manifest: Manifest) -> None:
        """A file of Lightning's own: Lightning restores all that it has, and the report says what it has not."""
        if self._engine.changes.restarts:
            return
        imported = manifest.notes.get("imported", {"from": "a state that was saved by hand"})
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._trainer.optimizers)
        self.report.notes.append(f"imported from {imported['from']}: from its step on the run is not an exact repeat")
        restored = [Restored("weights"), Restored("optimizers", optimizers), Restored("loop counters")]
        self.report.add(restored, [NotRestored(name, why) for name, why in _NOT_IN_A_FILE.items()])

    def _fits(self, manifest: Manifest) -> None:
        """Raises where the weights of the snapshot are not those of this model."""
        module = self._module
        if not {"state_dict", *(["loops"] if self._run is not None else [])} <= manifest.tree.keys():
            raise ResumeError(
                f"snapshot {manifest.info.id} was not taken in a Lightning run", hint="give this run its own folder"
            )
        if self._run is not None:
            self._require_ranks(manifest)
            sharded.require_layout(manifest, self._trainer)
        if is_overridden("on_load_checkpoint", module) or self._changes_are_due(manifest):
            return  # the user's hook may well convert the old weights
        model = sharded.model_of(self._trainer)
        shapes = model.saved_shapes(manifest, "state_dict")
        model.require_fits(shapes, manifest.info.id, strict=module.strict_loading)

    def _newer_hpc(self, manifest: Manifest | None) -> str | None:
        """The Slurm requeue file if it is newer than our snapshot."""
        if not SLURMEnvironment.detect():
            return None
        path = self._internals.hpc_path
        if path is None or manifest is None:
            return path
        try:
            step = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        except (pickle.UnpicklingError, RuntimeError, KeyError):
            return path if Path(path).stat().st_mtime > manifest.info.created else None
        return path if step > manifest.info.step else None

    def _should_stop(self) -> bool:
        """Whether `trainer.should_stop` was set for good.

        A stop by EarlyStopping is part of the run: it must hold after a restart too. A timer, a signal handler or the
        user's own code may have stopped the process only to start it again.
        """
        if not self._own["should_stop"] or BoundaryKind(self._own["kind"]) not in (
            BoundaryKind.STOPPED,
            BoundaryKind.FINISHED,
        ):
            return bool(self._own["should_stop"])
        if (
            any(isinstance(callback, both(EarlyStopping)) for callback in callbacks_of(self._trainer))
            and self._own["stopped_early"]
        ):
            return True
        self.report.notes.append("training was stopped through trainer.should_stop, not by EarlyStopping: it continues")
        return False

    # ---- restoring

    def resume_run(self) -> bool:
        """What the earlier run had learned about its snapshots counts; whether EarlyStopping has stopped it."""
        if self._run is not None and (learned := self._own.get("cadence")) is not None:
            self._run.resume(learned)
        return bool(self._own["stopped_early"])

    @property
    def skip_batches(self) -> int:
        """Batches to leave out from here on, because the run has diverged in them."""
        return 0 if self._back is None or self._internals.user_fetches else int(self._back.skip_batches)

    @property
    @override
    def _other_way(self) -> str:
        return str(self._back.text()) if self.skip_batches else ""

    @property
    def finished(self) -> bool:
        """The snapshot shows an epoch that is over."""
        return BoundaryKind(self._own["kind"]) is BoundaryKind.FINISHED

    def fit_over(self) -> None:
        """A rerun trains nothing: the random streams are as the finished run left them, its metrics, and its curves."""
        if not self.pending:
            return
        self._restore_streams()
        if self.finished:  # else the means of the epoch are missing
            run_state.restore_tables(self._internals, self._module.device, self._own["tables"])
        self._continue_curves()
        restart.finish_again(self._trainer, self._module)

    def restore_optimizers(self, original: Callable[[Any], None], checkpoint: Any) -> None:
        """Runs instead of the strategy's `load_optimizer_state_dict`.

        Raises:
            MismatchError: the optimizers are not those of the saved run.
        """
        mine = self.to_restore
        if checkpoint["optimizer_states"] is self._unchanged.get(_OPTIMIZERS):
            self._change_optimizers(checkpoint)
        if not self.pending or (mine and checkpoint["optimizer_states"] is not mine["optimizer_states"]):
            original(checkpoint)  # of a callback that trains before the run, as one that looks for a learning rate
            return
        self.to_restore = None
        before, now = len(checkpoint["lr_schedulers"]), len(self._trainer.lr_scheduler_configs)
        if before != now and not restart.averages(self._trainer) and not self._engine.changes:
            why = f"the snapshot has {before} of them, and configure_optimizers() makes {now} now"
            self.report.add([], [NotRestored("schedulers", why)])
        states, parts = checkpoint["optimizer_states"], run_state.FitParts(self._internals, self._trainer, self._module)
        names = self._own["parameters"]
        divided, optimizers = sharded.is_sharded(self._trainer), parts.optimizers
        own = {key: names[key] for key in names.keys() & optimizers.keys()}
        grown = {key: one for key, one in own.items() if len(one) > len(optimizers[key].param_groups)}
        same = {key: one for key, one in own.items() if key not in grown}
        with self._fitting("the optimizers of the snapshot do not fit those of configure_optimizers()", _HINT):
            self.report.add(
                [], self._match_optimizers(parts, same, run_state.named_schedulers(self._trainer), divided=divided)
            )
            self.report.add([], [NotRestored(*row) for row in self._own.get("unsaved_within", {}).items()])
            self._regrouped = run_state.restore_groups(self._trainer, parts, states, grown)
            self._load_optimizers(
                self._trainer.optimizers,
                states,
                lambda guarded: original({**checkpoint, "optimizer_states": guarded}),
                divided=divided,
            )

    def before_train_start(self) -> None:
        """Before the hooks `on_train_start`, when everything of Lightning's is restored."""
        if not self.pending:
            return
        self._kept = Kept(self._trainer, self._module, TRAIN_START, self._callbacks, self._regrouped)
        if self._back is None:
            assert self._engine.loaded is not None
            created = self._engine.loaded.info.created
            run_state.write_again(self._trainer, self._engine.root_url, created, self._internals.replace)

    def before_epoch(self) -> None:
        """Before Lightning starts the first epoch of the resumed run; of an imported file Lightning restores all."""
        if not self.pending:
            self._settle_optimizers(self._trainer.optimizers)
            return
        if self._kept is not None:
            self.report.add([], self._kept.put_back())
            self._kept = None
        self._loaders.settle()
        if self._loaded_as and not is_overridden("on_load_checkpoint", self._module):
            wrapped = isinstance(self._trainer.strategy.model, DistributedDataParallel)
            restart.load_again_where_changed(self._module, self._weights, self._loaded_as, buffers=wrapped)
        self._weights = {}
        before = self._own.get("validation_reload_epoch", self._internals.reload_epochs[1])
        self._internals.reload_epochs = self._own["reload_epoch"], before
        if (batches := self._loaders.batches_in_epoch()) is not None:
            self._internals.set_epoch_length(batches)
        restart.begin_averaging(self._trainer, self._module)
        if self._loaders.epoch_restarts:
            self._restart_epoch()
        self.report.notes += () if self._elastic is None else self._elastic.notes(self._loaders.dealt())
        if self.finished:
            self._internals.clear_restart()
            self._internals.clear_resuming()
            self._loaders.load_again()
            self._loaders.resumed()
            self._put_back()
            self._let_go()
        else:
            run_state.restore_tables(self._internals, self._module.device, self._own["tables"])

    def _restart_epoch(self) -> None:
        """The epoch of the snapshot begins again: nothing counts that belongs to its batches."""
        self._internals.begin_epoch_again()
        none = {name: self._internals.progress["batch"][name] for name in ("current", "is_last_batch")}
        progress = {**self._own["progress"], "batch": {**self._own["progress"]["batch"], **none}}
        tables = {**self._own["tables"], "first_batch": None, "fx": None}
        gradients = None if self._module.automatic_optimization else self._own["gradients"]
        of_the_epoch: dict[str, Any] = {"results": {}, "metrics": {}, "combined": None, "gradients": gradients}
        self._own = {**self._own, **of_the_epoch, "tables": tables, "progress": progress}
        self.report.notes.append(f"data: restart_epoch: epoch {self._own['epoch']} starts again at its first batch")

    def after_epoch_start(self) -> None:
        """After Lightning started it: in the middle of an epoch it does not call `on_train_epoch_start`."""
        missing = restart.replay(self._internals, self._trainer, self._module, self._callbacks, self._regrouped)
        self.report.add([], missing)

    def at_first_fetch(self) -> None:
        """The last moment before anything of the resumed run happens."""
        self._internals.clear_restart()
        self._internals.progress = self._own["progress"]
        self._loaders.resumed()
        self._internals.combined_position = self._own["combined"]
        self._put_back()
        self._let_go()

    def curves(self) -> dict[str, Any]:
        """For the notes of a snapshot: see `FitLoggers.note`."""
        return {} if self.loggers is None else self.loggers.note()

    def _continue_curves(self) -> None:
        if self.loggers is not None and self.report.is_open:
            self.report.add([], self.loggers.go_on(self._engine.forked_from))

    def _let_go(self) -> None:
        self._continue_curves()
        # Gradients and metric states can be large.
        self._own, self._callbacks, self._elastic, self._regrouped = {}, {}, None, []

    def _put_back(self) -> None:
        own, module, internals = self._own, self._module, self._internals
        restored = self._parts(exact=self._elastic is None)
        missing, _ = self._restore_gradient_order(sharded.wrappers_of(self._trainer), last=True)
        missing += sharded.model_of(self._trainer).restore(own)
        missing += run_state.restore_results(internals, self._trainer, module, own["results"])
        if self._elastic is not None and self._elastic.rank == 0:
            missing += self._elastic.not_restored("running means" if internals.results or own["metrics"] else "")
        run_state.restore_tables(internals, module.device, own["tables"])
        if self._run is not None:
            seen, unseen = self._run.capture.audit.restore("start" if self.finished else "batch")
            restored, missing = [*seen, *restored], missing + unseen
        missing += self._restore_streams()
        if internals.validates_by_time:
            missing.append(NotRestored("time of the next validation", "val_check_interval counts from the restart"))
        self.report.add(restored, missing + internals.lost_tickets(module))
        self.report.notes += [f"{path} was not stored: {why}" for path, why in own["left_out"].items()]

    def _parts(self, *, exact: bool) -> list[Restored]:
        own, trainer, count = self._own, self._trainer, self.count
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
        schedulers = ", ".join(type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs)
        means = f"{count(len(own['results']), 'logged value')}, {count(len(own['metrics']), 'metric object')}"
        rows = (
            (True, Restored("weights")),
            (True, Restored("optimizers", optimizers)),
            (True, Restored("loop counters")),
            (schedulers, Restored("schedulers", schedulers)),
            (exact and not self._engine.changes.new_streams, Restored("random streams", ", ".join(own["rng"]))),
            (True, Restored("data position", count(len(own["loaders"]), "loader"))),
            (exact and (own["results"] or own["metrics"]), Restored("running means", means)),
            (own["gradients"], Restored("accumulated gradients")),
        )
        return [part for there, part in rows if there]

    def _conclude(self) -> None:
        if self.pending:
            self.report.notes.append("training was complete already: nothing was done")
            within = self._own["batch"] and not self.finished
            if within and 0 <= (self._trainer.max_epochs or -1) <= self._own["epoch"]:
                self.report.missing.append(NotRestored("the rest of the epoch", _LATER_FIT))
        else:
            self.report.missing += self._loaders.problems(self.inexact)
            self.report.notes += self._loaders.notes()


_HINT = "use the optimizers this run was started with, or another folder for the new run"
_LATER_FIT = (
    "max_epochs ends this fit before the place of the snapshot, which a later fit of the script has reached: give that "
    "one ckpt_path='auto' too"
)
