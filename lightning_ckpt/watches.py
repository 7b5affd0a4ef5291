"""Everything that watches a run beside its snapshots: who wants it to stop, losses, weights, the status page."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from ckpt_engine.config import Config
from ckpt_engine.config.live import LiveFile
from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.observe.clock import Clock
from ckpt_engine.observe.fanout import FanOutSink
from ckpt_engine.preempt.board import Board
from ckpt_engine.preempt.divergence import Divergence, On
from ckpt_engine.preempt.notice import Stop
from ckpt_engine.preempt.stale import StaleWatch
from ckpt_engine.preempt.watch import open_watch
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.load import Loaded
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.tracking.edits import Edits
from lightning_ckpt.losses import Losses
from lightning_ckpt.telemetry import Telemetry

_log = logging.getLogger("lightning_ckpt")


class Watches:
    """From `start` to `close`, on the training thread.

    Args:
        config: options.
        clock: the source of moments.
        sinks: gets this run's events and takes those of the watches.
        telemetry: the numbers for the status page.
        cadence: is retuned when options change.
        live: the file that `config` came from.
        ranks: who trains together; None: this process alone.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        sinks: FanOutSink,
        telemetry: Telemetry,
        cadence: Cadence,
        live: LiveFile | None,
        ranks: Ranks | None,
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._rank = None if ranks is None else ranks.rank
        self._ledger, self.preemption = open_watch(config, clock, ranks)
        self._board = Board(config.status, self.preemption.outlook, telemetry.plain_numbers)
        on = config.guard if config.rollback is None else config.rollback.on
        self._losses = Losses(On(on)) if on != "off" else None
        self._stale: StaleWatch | None = None
        self.edits = Edits(live, cadence, self.preemption, _log)
        sinks.add(self._ledger)
        sinks.add(self.preemption)

    def start(self, step: int, module: pl.LightningModule, loaded: Loaded | None) -> None:
        """Training of `module` starts at `step`, with what was loaded."""
        if loaded is not None:
            self._ledger.resumed(loaded.info.step, loaded.place)
        nearest = self._config.tiers[0]
        trained = [f"state_dict/{name}" for name, one in module.named_parameters() if one.requires_grad]
        self._stale = StaleWatch(trained, Repository(open_storage(nearest.url, nearest.for_storage())).read)
        self._sinks.add(self._stale)
        self.preemption.boundary(step)
        self.preemption.start()
        self._board.start()
        self.edits.start()

    def close(self) -> None:
        """Put signal handlers back, end all threads. Idempotent."""
        self.preemption.close()
        self._board.close()
        self.edits.close()

    def batch_ended(self, step: int, outputs: Any) -> None:
        """What `training_step` returned."""
        if self._losses is not None:
            self._losses.add(step, outputs)

    def boundary(self, step: int) -> Stop | None:
        """Step `step` is complete; the stop, if the run is to stop here."""
        if self._stale is not None and (stale := self._stale.take()) is not None:
            self._sinks.emit(stale)
        self.preemption.boundary(step)
        return self.preemption.stop

    @property
    def guards(self) -> bool:
        """Whether somebody judges the losses."""
        return self._losses is not None

    def vetoed(self, *, due: bool) -> bool:
        """Whether the losses so far speak against a snapshot now; `due`: one would be taken."""
        return self._losses is not None and self._losses.veto(due=due)

    @property
    def divergence(self) -> Divergence | None:
        """What `vetoed` has found: training has diverged; of several ranks, on this one."""
        found = None if self._losses is None else self._losses.divergence
        return found if found is None or self._rank is None else replace(found, rank=self._rank)
