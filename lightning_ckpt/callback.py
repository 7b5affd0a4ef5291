"""`AdaptiveCheckpoint`, the Lightning callback: which hook leads where, nothing else. And the guard of a fit.

Lightning's automatic optimisation runs forward and backward inside `optimizer.step(closure)`, so the fence is after
the closure (`on_before_optimizer_step`), not before the step. Callbacks that swap weights without an optimizer (weight
averaging) do so in validation and at the end of an epoch or of training; `FenceGuard` precedes them in the list of
callbacks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Never, Unpack

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from ckpt_engine.adapter import ConfigError

if TYPE_CHECKING:
    from ckpt_engine.adapter import Config, Options
    from lightning_ckpt.compat import LightningInternals
    from lightning_ckpt.loggers import FitLoggers
    from lightning_ckpt.restart import EarlierFit
    from lightning_ckpt.run import FitRun

_log = logging.getLogger("lightning_ckpt")
_NO_OPTIONS = ("self", "config", "unknown", "__class__")


class AdaptiveCheckpoint(Callback):
    """Exact, asynchronous snapshots of a Lightning run; `fit(..., ckpt_path="auto")` resumes from the newest one.

    Args:
        config: a YAML file, a folder or storage URL, or a mapping; see docs/configuration.md.
        tiers: where snapshots go, if `config` does not say it.
        overhead: share of training time that snapshots may cost ("1%").
        max_lost_work: work that a failure may cost at worst ("10 min"), or by its class (process, machine, site).
        mtbf: mean time between failures, or "auto".
        every_n_steps: a snapshot at every multiple of N steps.
        every_seconds: a snapshot when the last one is that old.
        at_steps: also a snapshot at each of these steps.
        on_validation_end: a snapshot after each validation.
        at_end: a snapshot of the final state.
        wait_at_end: how long the end waits for copies to further tiers ("10 min"); 0: not at all.
        keep: retention, e.g. {"last": 2}.
        protect: snapshots that nothing removes while they are young, e.g. {"days": 14}.
        seal: who can open what is written, and which key signs it, e.g. {"sign": "run.key"}; None is refused.
        preemption: signals, grace and other sources of a stop, e.g. {"grace": "2 min"}.
        status: where the run says how it stands, e.g. {"file": "status.json", "port": 9400}.
        log: what the progress bar and the loggers show, e.g. {"bar": "full"}.
        on: commands or webhooks, e.g. {"durable": "python evaluate.py", "failure": "https://…"}.
        guard: "off", "nan" or "loss_spike": what ends training before it is saved.
        rollback: as `guard`, and the next start goes back, e.g. {"on": "loss_spike", "skip_batches": 200}.
        resume: "auto" resumes from the newest snapshot where `fit` is given no `ckpt_path`; "off" never does.
        on_error: "raise_at_end", "raise" or "warn" when a snapshot fails in the background.
        writer: "process" or "thread".
        linger: how long the memory tier waits for a restarted trainer.
        slots: snapshots in host memory at once.
        lazy: "auto", "on" or "off".
        rng: random streams with another number of ranks: "derive", "warn" or "strict".
        data: a changed loader in the middle of an epoch: "refuse", "restart_epoch" or "continue".
        hidden: attributes that no state_dict has: "auto", "report" or "off".
        replay: a repeated step that differs: "warn", "stop" or "off".
        pickle: paths in the state that may be stored with pickle.
        unknown: refused, with the option that is meant.

    Keywords win over `config`. Making the callback reads the options and nothing else: no file, thread or device is
    touched before `setup`. The run itself is bit for bit the same as without the callback.

    Raises:
        ConfigError: an option is unknown or impossible; every problem, with the allowed keys and the nearest match.

    Examples:
        >>> trainer = L.Trainer(callbacks=[AdaptiveCheckpoint("/data/run1", max_lost_work="10 min")])
        >>> trainer.fit(model, datamodule, ckpt_path="auto")
    """

    if TYPE_CHECKING:

        def __init__(
            self, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, **options: Unpack[Options]
        ) -> None: ...

    else:
        # LightningCLI reads this signature. What a section and a word may be is ours to say, with the one that is
        # meant; and its YAML makes a boolean of `off`. It gives None for an empty `seal:`, and the default otherwise.
        def __init__(
            self,
            config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
            *,
            tiers: Any = None,
            overhead: float | str | None = None,
            max_lost_work: float | str | Mapping[str, float | str] | None = None,
            mtbf: float | str | None = None,
            every_n_steps: int | None = None,
            every_seconds: float | str | None = None,
            at_steps: list[int] | None = None,
            on_validation_end: bool | None = None,
            at_end: bool | None = None,
            wait_at_end: float | str | None = None,
            keep: int | dict[str, Any] | None = None,
            protect: dict[str, Any] | None = None,
            seal: dict[str, Any] | bool | None = False,
            preemption: dict[str, Any] | None = None,
            status: dict[str, Any] | None = None,
            log: dict[str, Any] | None = None,
            on: dict[str, Any] | None = None,
            guard: str | bool | None = None,
            rollback: dict[str, Any] | None = None,
            resume: str | bool | dict[str, Any] | None = None,
            on_error: str | None = None,
            writer: str | None = None,
            linger: float | str | None = None,
            slots: int | None = None,
            lazy: str | bool | None = None,
            rng: str | None = None,
            data: str | None = None,
            hidden: str | bool | None = None,
            replay: str | bool | None = None,
            pickle: str | list[str] | None = None,
            **unknown: Never,
        ) -> None:
            given = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
            if seal is None:
                raise ConfigError("seal: has no keys", hint="remove it for a run that is not sealed")
            given["seal"] = None if seal is False else seal
            self._make(config, given | unknown)

    def _make(self, config: str | os.PathLike[str] | Mapping[str, Any] | None, options: dict[str, Any]) -> None:
        from ckpt_engine.adapter import load_config

        super().__init__()
        self.config: Config = load_config(config, **options)
        self._source, self._options = config, options
        self._run: FitRun | None = None
        self._idle: LightningInternals | None = None
        self._fitted: EarlierFit | None = None
        self._log: Any = None
        self._loggers: FitLoggers | None = None

    @property
    def log(self) -> Any:
        """`LightningModule.log`: a trainer gives it to its callbacks as the first thing of all."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        from lightning_ckpt.compat_data import beginning
        from lightning_ckpt.loggers import FitLoggers

        self._log, begins = log, beginning()
        if begins is not None and begins[0].state.fn == TrainerFn.FITTING:
            self._loggers = FitLoggers(begins[0], self.config)
            self._loggers.begin(begins[1])

    @property
    @override
    def state_key(self) -> str:
        """Distinct per run folder, so that two instances can share a trainer."""
        return f"{type(self).__qualname__}{{'root': {self.config.root_url!r}}}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the options, and has not begun: a run belongs to one trainer and one process."""
        return {**vars(self), "_run": None, "_idle": None, "_fitted": None, "_loggers": None}

    # ---- setup and teardown

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # The engine is imported here and not with the class: that is three quarters of what importing it all takes.
        from ckpt_engine.adapter import Engine
        from lightning_ckpt.compat import LightningInternals
        from lightning_ckpt.fit_resume import FitResume
        from lightning_ckpt.loaders import FitLoaders
        from lightning_ckpt.loggers import FitLoggers
        from lightning_ckpt.restart import allow_restart
        from lightning_ckpt.run import FitRun

        self._release()
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._idle = internals = LightningInternals(trainer)
            internals.probe()
            around: Callable[..., None] = _start_fresh
            if stage != "fit":
                engine, loaders = Engine(self.config), FitLoaders(internals, trainer)
                around = FitResume(internals, trainer, pl_module, engine, loaders).resolve
            internals.wrap({"resume_start": around})
        else:
            self._require_own_folder(trainer)
            fitted, self._fitted = self._fitted, None
            loggers, self._loggers = self._loggers or FitLoggers(trainer, self.config), None
            self._run = FitRun(trainer, pl_module, self.config, self)
            self._run.engine.follow_file(self._source, self._options)
            self._run.resume.loggers = loggers
            self._run.resume.fitted = fitted
            self._run.connect()
            allow_restart(trainer, self._run.engine)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        from lightning_ckpt.restart import EarlierFit

        run, self._run = self._run, None
        self._release()
        if run is not None:
            self._fitted = EarlierFit(trainer, pl_module, run.engine.attempt)
            run.close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        run, self._run = self._run, None
        self._release()
        if run is not None:
            run.abort(exception)

    def _require_own_folder(self, trainer: pl.Trainer) -> None:
        from lightning_ckpt.compat import callbacks_of

        ours = [one.config.root_url for one in callbacks_of(trainer) if isinstance(one, AdaptiveCheckpoint)]
        if ours.count(self.config.root_url) > 1:
            raise ConfigError(
                f"two AdaptiveCheckpoint of this Trainer write {self.config.root_url}",
                hint="remove one of them, or give each a folder of its own",
            )

    def _release(self) -> None:
        if self._idle is not None:
            self._idle.unwrap()
            self._idle = None

    # ---- fit

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.optimizers_made()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.train_started()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.batch_ended(outputs)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.validation_started()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.validation_ended()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        from ckpt_engine.adapter import TrainerResume
        from lightning_ckpt.run_state import MARK

        checkpoint[MARK] = TrainerResume.mark_of(self.config.root_url)


def _start_fresh(original: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
    """`ckpt_path="auto"` under `fast_dev_run`, which neither reads nor writes snapshots."""
    from lightning_ckpt.restart import AUTO

    if checkpoint_path == AUTO:
        _log.info("fast_dev_run: AdaptiveCheckpoint is inactive, ckpt_path='auto' starts fresh")
    original(None if checkpoint_path == AUTO else checkpoint_path, *args, **kwargs)


class FenceGuard(Callback):
    """The first callback of the list while `AdaptiveCheckpoint` is active.

    Args:
        hooks: by name, what is called as Lightning calls them; none: this is the guard of a copied trainer.
    """

    def __init__(self, hooks: Mapping[str, Callable[..., object]]) -> None:
        vars(self).update(hooks)
        self._given: Callable[[], None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return FenceGuard, ({},)

    def first_batch(self, given: Callable[[], None]) -> None:
        """Once the next batch is there, `given` is called."""
        self.on_train_batch_start = self._first_batch  # type: ignore[assignment, method-assign]
        self._given = given

    @property
    def waits_for_batch(self) -> bool:
        """Whether the batch of `first_batch` is still to come."""
        return self._given is not None

    def _first_batch(self, *_: Any) -> None:
        given, self._given = self._given, None
        self.on_train_batch_start = None  # type: ignore[assignment, method-assign]
        if given is not None:
            given()
