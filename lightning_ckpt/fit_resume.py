"""Resuming: `ckpt_path="auto"` becomes the newest usable snapshot, and what Lightning does not restore is put back.

The order in which a resumed `fit` calls this: `resolve` (instead of the connector's `resume_start`), Lightning restores
its own part, `before_epoch` and `after_epoch_start` around the first epoch start, `at_first_fetch` right before the
first batch is asked for.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import EarlyStopping
from torch.nn.parallel import DistributedDataParallel

from ckpt_engine.audit.audit import Audit
from ckpt_engine.data import rng
from ckpt_engine.engine import Engine
from ckpt_engine.errors import MismatchError, ResumeError
from ckpt_engine.loop import components
from ckpt_engine.loop.capture import (
    Elastic,
    require_ranks,
    require_whole_gradients,
)
from ckpt_engine.loop.components import own_extra_state, saved_shapes
from ckpt_engine.loop.distributed_models import GradientOrder
from ckpt_engine.loop.diverging import Rollbacks
from ckpt_engine.loop.taking_over import Resume
from ckpt_engine.observe.resume_report import NotRestored, Restored
from ckpt_engine.observe.units import count
from ckpt_engine.preempt.divergence import RollbackRecord
from ckpt_engine.restore.load import Loaded
from ckpt_engine.restore.match import require_match
from ckpt_engine.state import optimizers as stored
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from lightning_ckpt import restart, run_state, sharded
from lightning_ckpt.compat import LightningInternals, callbacks_of
from lightning_ckpt.compat_data import both, is_overridden
from lightning_ckpt.loaders import FitLoaders
from lightning_ckpt.loggers import FitLoggers
from lightning_ckpt.restart import AUTO, Fresh, Kept, calls_the_users
from lightning_ckpt.run_state import BoundaryKind
from lightning_ckpt.sharded import replicas_of

_log = logging.getLogger("lightning_ckpt")

TRAIN_START = "on_train_start"
_NOT_IN_A_FILE = {
    "random streams": "a file of Lightning has none: they go on as this process has seeded them",
    "data position": "a file of Lightning has none: the loaders start again at their beginning",
    "running means": "a file of Lightning has none: logged means start again at zero",
}


class FitResume(Resume):
    """One resolution of `ckpt_path`, and the rest of the restore if it found a snapshot.

    Args:
        internals: of the trainer.
        trainer: that resumes.
        module: the LightningModule.
        engine: opens the run's folder.
        loaders: of this fit; None outside of `fit`.
        rollbacks: decides whether the run goes back, where it may.
        audit: of the run; None outside of `fit`.
    """

    def __init__(
        self,
        internals: LightningInternals,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        engine: Engine,
        loaders: FitLoaders | None,
        rollbacks: Rollbacks | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._internals = internals
        self._trainer = trainer
        self._module = module
        super().__init__(engine, _log, lambda: trainer.log_dir or trainer.default_root_dir)
        self._loaders = loaders
        self._rollbacks = rollbacks
        self._audit = audit
        self._rollback: RollbackRecord | None = None
        self._weights: Mapping[str, Any] = {}
        self._loaded_as: restart.Dtypes = {}
        self.to_restore: dict[str, Any] | None = None
        """What Lightning has been handed and has not put back yet."""
        self._callbacks: Mapping[str, Any] = {}
        self._kept: Kept | None = None
        self._regrouped: list[tuple[torch.optim.Optimizer, run_state.Groups]] = []
        self.fresh = Fresh(trainer, module, engine)
        self.pending = False
        self.loggers: FitLoggers | None = None

    # ---- choosing

    def resolve(self, original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        """Runs instead of the connector's `resume_start`.

        Raises:
            ResumeError: outside of `fit` there is nothing to load.
            NoUsableSnapshotError: there are snapshots, and none is usable.
            MismatchError: the snapshot is of another model; names the keys, before any data is read.
        """
        if self._loaders is not None and not self.pending:
            path = self.fresh.path(path)
        if path != AUTO:
            original(path, *args, **kwargs)
            return
        root = self._engine.root_url
        if self._loaders is not None:
            self._engine.start(resumes=True)
        candidate = self._engine.choose(check=self._fits)
        hpc = self._newer_hpc(candidate.info if candidate else None)
        if hpc is not None:
            _log.info("ckpt_path='auto': %s is newer than the newest snapshot in %s", hpc, root)
            if candidate is not None:
                self._engine.go_on_after(candidate.info)
            original(hpc, *args, **kwargs)
        elif candidate is None and getattr(original, "resolves_auto", False):
            original(AUTO, *args, **kwargs)  # a second callback with a folder of its own
        elif candidate is None:
            if self._loaders is None:
                raise ResumeError(
                    f"ckpt_path='auto': there is no snapshot in {root}, and untrained weights are not worth scoring",
                    hint="train first, or pass the path of a checkpoint",
                )
            fresh = f"ckpt_path='auto': no snapshot in {root} yet, starting fresh; {self._engine.rhythm}"
            self._announce(fresh)
            original(None, *args, **kwargs)
        else:
            if self._rollbacks is not None:
                back = self._rollbacks.pending(candidate.info.id)
                self._rollback = back and back.on(replicas_of(self._trainer), self._internals.in_whole_steps)
            self._load()

    def _load(self) -> None:
        back = self._rollback
        live = sharded.live_of(self._trainer, self._module)
        step = None if back is None else back.step
        state = self._engine.load(step, live=live, check=self._fits, back=back is not None)
        loaded = self._engine.loaded
        assert state is not None
        assert loaded is not None
        own = self._open(state, loaded)
        components.grow(self._module, {} if own is None else own.get("metrics", {}))
        if live is not None:
            sharded.restore(self._trainer, state)
        for key in ("state_dict", "current_model_state"):
            if key in state:
                state[key] = own_extra_state(state[key])
        self._internals.hand_over(state, f"{self._engine.root_url}#{loaded.info.id}")
        self.to_restore = state if self._loaders is not None and own is not None else None
        if self._loaders is None:
            _log.info("loaded the weights of snapshot %s (step %d)", loaded.info.id, loaded.info.step)
            return
        if own is None:
            self._resume_imported(loaded)
            return
        self._weights = state.get("current_model_state", state["state_dict"])
        if calls_the_users(self._trainer, self._module, TRAIN_START, restart.HOOK):
            self._callbacks = stored.own_copy(
                state.get("callbacks", {})
            )  # they may keep, and change, what they are given
        self._loaded_as = {} if sharded.is_flat(self._trainer) else restart.dtypes_of(self._module)
        self._own = own
        if self._elastic is not None:
            self._elastic = replace(self._elastic, teams=sharded.teams_of(loaded.manifest, self._trainer))
        if self._audit is not None and self._elastic is None:
            self._audit.resumes(own.get("audit", {}), own["hidden"])
        self.note(_where(own))
        if back is not None:
            self.note(back.text())
            if self._rank == 0:
                _log.warning("%s; training goes on at step %d", back.text(), back.step)
            if self._internals.user_fetches:
                self.add([], [NotRestored("skipped batches", "training_step fetches itself")])
        self.pending = True
        self._notes += self._internals.skip_searches(lambda: self.pending, own.get("batch_sizes", {}))
        if self.loggers is not None:
            self.loggers.wait(loaded.manifest.notes)
        self._trainer.should_stop = self._should_stop()
        # A resumed run has been past its sanity check; its validation must not run at other places than it did.
        self._trainer.num_sanity_val_steps = 0
        self._loaders.expect(own["loaders"], own.get("validation", ()), self._elastic)
        if self._elastic is not None:
            self._own = self._for_other_ranks(own, self._elastic)

    def _for_other_ranks(self, own: Mapping[str, Any], elastic: Elastic) -> Mapping[str, Any]:
        """What the adapter keeps, for another number of ranks."""
        changed: dict[str, Any] = {"rng": elastic.streams}
        if own["gradients"]:
            require_whole_gradients([sharded.model_of(self._trainer, self._module)], elastic.saved_size)
            saved = [one["gradients"] or {} for one in elastic.own]
            changed["gradients"], missing = elastic.gradients(saved, self._module)
            self.add([], missing if elastic.rank == 0 else [])
        return {**own, **changed}

    def _resume_imported(self, loaded: Loaded) -> None:
        """A file of Lightning's own: Lightning restores all that it has, and the report says what it has not."""
        imported = loaded.manifest.notes.get("imported", {"from": "a state that was saved by hand"})
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._trainer.optimizers)
        self.note(f"imported from {imported['from']}: from its step on the run is not an exact repeat")
        restored = [Restored("weights"), Restored("optimizers", optimizers), Restored("loop counters")]
        self.add(restored, [NotRestored(name, why) for name, why in _NOT_IN_A_FILE.items()])

    def _fits(self, manifest: Manifest) -> None:
        """Raises where the weights of the snapshot are not those of this model."""
        module = self._module
        if not {"state_dict", *(["loops"] if self._loaders is not None else [])} <= manifest.tree.keys():
            raise ResumeError(
                f"snapshot {manifest.info.id} was not taken in a Lightning run", hint="give this run its own folder"
            )
        if self._loaders is not None:
            require_ranks(manifest, self._trainer.world_size, self._engine.config.rng)
            sharded.require_layout(manifest, self._trainer)
        if is_overridden("on_load_checkpoint", module):
            return  # the user's hook may well convert the old weights
        expected = sharded.shapes(self._trainer, module)
        found = components.without_metrics(module, saved_shapes(manifest, "state_dict"))
        if not module.strict_loading:
            common = expected.keys() & found.keys()
            expected = {name: shape for name, shape in expected.items() if name in common}
            found = {name: shape for name, shape in found.items() if name in common}
        require_match(expected, found, what="model", snapshot=manifest.info.id)

    def _newer_hpc(self, info: SnapshotInfo | None) -> str | None:
        """The Slurm requeue file if it is newer than our snapshot."""
        if not SLURMEnvironment.detect():
            return None
        path = self._internals.hpc_path()
        if path is None or info is None:
            return path
        try:
            step = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
        except (pickle.UnpicklingError, RuntimeError, KeyError):
            return path if Path(path).stat().st_mtime > info.created else None
        return path if step > info.step else None

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
        self.note("training was stopped through trainer.should_stop, not by EarlyStopping: it goes on")
        return False

    # ---- restoring

    @property
    def is_to_be_published(self) -> bool:
        """The report is not out yet."""
        return self._loaded is not None

    @property
    def cadence_state(self) -> Mapping[str, Any] | None:
        """What the earlier run had learned about its snapshots."""
        return self._own.get("cadence")

    @property
    def skip_batches(self) -> int:
        """Batches to leave out from here on, because the run has diverged in them."""
        if self._rollback is None or self._internals.user_fetches:
            return 0
        return self._rollback.skip_batches

    @property
    def stopped_early(self) -> bool:
        """Whether EarlyStopping has stopped the run."""
        return bool(self._own["stopped_early"])

    @property
    def finished(self) -> bool:
        """The snapshot shows an epoch that is over."""
        return BoundaryKind(self._own["kind"]) is BoundaryKind.FINISHED

    def nothing_left(self) -> None:
        """A rerun trains nothing: the random streams are as the finished run left them, its metrics, and its curves."""
        rng.restore(self._own["rng"])
        if self.finished:  # else the means of the epoch are missing
            run_state.restore_tables(self._internals, self._module.device, self._own["tables"])
        self._continue_curves()

    def restore_optimizers(self, original: Callable[[Any], None], checkpoint: Any) -> None:
        """Runs instead of the strategy's `load_optimizer_state_dict`.

        Raises:
            MismatchError: the optimizers are not those of the saved run.
        """
        mine = self.to_restore
        if not self.pending or (mine and checkpoint["optimizer_states"] is not mine["optimizer_states"]):
            original(checkpoint)  # of a callback that trains before the run, as one that looks for a learning rate
            return
        self.to_restore = None
        before, now = len(checkpoint["lr_schedulers"]), len(self._trainer.lr_scheduler_configs)
        if before != now and not restart.averages(self._trainer):
            why = f"the snapshot has {before} of them, and configure_optimizers() makes {now} now"
            self.add([], [NotRestored("schedulers", why)])
        states, parts = checkpoint["optimizer_states"], run_state.FitParts(self._internals, self._trainer, self._module)
        names = stored.read_order(self._own.get("parameters")) or run_state.older_names(self._own.get("groups", []))
        divided, optimizers = sharded.is_sharded(self._trainer), parts.optimizers
        own = {key: names[key] for key in names.keys() & optimizers.keys()}
        grown = {key: one for key, one in own.items() if len(one) > len(optimizers[key].param_groups)}
        alike = {key: one for key, one in own.items() if key not in grown}
        try:
            moved = stored.put_in_order(alike, parts, divided=divided)
            self._notes += [f"{name}: {stored.MOVED}" for name in moved]
            schedulers = run_state.named_schedulers(self._trainer)
            self.add([], components.made_otherwise(self._own.get("made"), optimizers, schedulers))
            self.add([], [NotRestored(*row) for row in self._own.get("unsaved_within", {}).items()])
            self._regrouped = run_state.restore_groups(self._trainer, parts, states, grown)
            with stored.linked(self._trainer.optimizers):
                original({**checkpoint, "optimizer_states": list(map(stored.guarded, states))})
        except (ValueError, KeyError, MismatchError) as err:
            why, hint = (err.message, err.hint) if isinstance(err, MismatchError) else (str(err), "")
            raise MismatchError(
                f"the optimizers of the snapshot do not fit those of configure_optimizers(): {why}",
                hint=hint or "use the optimizers this run was started with, or another folder for the new run",
            ) from err
        for optimizer, state in zip(() if divided else self._trainer.optimizers, states, strict=False):
            stored.put_exactly(optimizer, state)

    def before_train_start(self) -> None:
        """Before the hooks `on_train_start`, when everything of Lightning's is restored."""
        self._kept = Kept(self._trainer, self._module, TRAIN_START, self._callbacks, self._regrouped)
        if self._rollback is None:
            assert self._engine.loaded is not None
            info = self._engine.loaded.info
            run_state.write_again(self._trainer, self._engine.root_url, info, self._internals.wrap)

    def before_epoch(self) -> None:
        """Before Lightning starts the first epoch of the resumed run; of an imported file Lightning restores all."""
        if not self.pending:
            stored.into_own_memory(self._trainer.optimizers)
            return
        assert self._loaders is not None
        if self._kept is not None:
            self.add([], self._kept.put_back())
            self._kept = None
        self._loaders.settle()
        self._restore_precisely()
        before = self._own.get("validation_reload_epoch", self._internals.reload_epochs[1])
        self._internals.reload_epochs = self._own["reload_epoch"], before
        if (batches := self._loaders.batches_in_epoch()) is not None:
            self._internals.set_epoch_length(batches)
        restart.begin_averaging(self._trainer, self._module)
        if self._loaders.epoch_restarts:
            self._restart_epoch()
        self._notes += () if self._elastic is None else self._elastic.notes(self._loaders.dealt())
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
        self.note(f"data: restart_epoch: epoch {self._own['epoch']} starts again at its first batch")

    def _restore_precisely(self) -> None:
        if self._loaded_as and not is_overridden("on_load_checkpoint", self._module):
            wrapped = isinstance(self._trainer.strategy.model, DistributedDataParallel)
            restart.load_again_where_changed(self._module, self._weights, self._loaded_as, buffers=wrapped)
        self._weights = {}

    def after_epoch_start(self) -> None:
        """After Lightning started it: in the middle of an epoch it does not call `on_train_epoch_start`."""
        missing = restart.replay(self._internals, self._trainer, self._module, self._callbacks, self._regrouped)
        self.add([], missing)

    def at_first_fetch(self) -> None:
        """The last moment before anything of the resumed run happens."""
        assert self._loaders is not None
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
        if self.loggers is not None and self.is_to_be_published:
            self.add([], self.loggers.go_on())

    def _let_go(self) -> None:
        self._continue_curves()
        # Gradients and metric states can be large.
        self._own, self._callbacks, self._elastic, self._regrouped = {}, {}, None, []
        self.pending = False

    def _put_back(self) -> None:
        own, module, internals = self._own, self._module, self._internals
        restored = _parts(own, self._trainer, exact=self._elastic is None)
        order = GradientOrder(sharded.wrappers_of(self._trainer))
        assert self._engine.loaded is not None
        step, same = self._engine.loaded.info.step, self._elastic is None
        missing, _ = order.put_back(own, self._engine, step, last=True, same=same)
        missing += components.restore(module, own["metrics"]) if own["metrics"] else []
        missing += run_state.restore_results(internals, self._trainer, module, own["results"])
        if self._elastic is not None and self._elastic.rank == 0:
            missing += self._elastic.not_restored("running means" if internals.results or own["metrics"] else "")
        run_state.restore_tables(internals, module.device, own["tables"])
        if own["gradients"]:
            missing += components.put_back_gradients(module, own["gradients"])
        if own["flags"] != own["flags_at_start"]:
            if components.dump_flags(module) == own["flags_at_start"]:
                components.restore_flags(module, own["flags"])
            elif components.dump_flags(module) != own["flags"]:
                missing.append(NotRestored("frozen parameters and eval modes", "the script sets others now"))
        if self._audit is not None:
            seen, unseen = self._audit.restore("start" if self.finished else "batch")
            restored, missing = [*seen, *restored], missing + unseen
        missing += [NotRestored("random streams", problem) for problem in rng.restore(own["rng"])]
        if internals.validates_by_time:
            missing.append(NotRestored("time of the next validation", "val_check_interval counts from the restart"))
        self.add(restored, missing + internals.lost_tickets(module))
        self._notes += [f"{path} was not stored: {why}" for path, why in own["left_out"].items()]

    def _conclude(self) -> None:
        assert self._loaders is not None
        if self.pending:
            self._notes.append("training was complete already: nothing was done")
            within = self._own["batch"] and not self.finished
            if within and 0 <= (self._trainer.max_epochs or -1) <= self._own["epoch"]:
                self._missing.append(NotRestored("the rest of the epoch", _LATER_FIT))
        else:
            self._missing += self._loaders.problems()
            self._notes += self._loaders.notes()


_LATER_FIT = (
    "max_epochs ends this fit before the place of the snapshot, which a later fit of the script has reached: give that "
    "one ckpt_path='auto' too"
)


def _where(own: Mapping[str, Any]) -> str:
    if BoundaryKind(own["kind"]) is BoundaryKind.FINISHED:
        return f"epoch {own['epoch']} was complete"
    return f"continues in epoch {own['epoch']} after {count(own['batch'], 'batch')}"


def _parts(own: Mapping[str, Any], trainer: pl.Trainer, *, exact: bool) -> list[Restored]:
    optimizers = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
    schedulers = ", ".join(type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs)
    parts = [Restored("weights"), Restored("optimizers", optimizers), Restored("loop counters")]
    if schedulers:
        parts.append(Restored("schedulers", schedulers))
    if exact:
        parts.append(Restored("random streams", ", ".join(own["rng"])))
    parts.append(Restored("data position", count(len(own["loaders"]), "loader")))
    if exact and (own["results"] or own["metrics"]):
        detail = f"{count(len(own['results']), 'logged value')}, {count(len(own['metrics']), 'metric object')}"
        parts.append(Restored("running means", detail))
    if own["gradients"]:
        parts.append(Restored("accumulated gradients"))
    return parts
