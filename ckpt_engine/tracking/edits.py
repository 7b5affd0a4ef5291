"""Takes in what an edited options file changes in a running job, and says what became of the edit."""

from __future__ import annotations

import logging

from ckpt_engine.config import Config
from ckpt_engine.config.live import LiveFile, change
from ckpt_engine.frequency.driver import Cadence
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.tracking.settings import cadence_settings


class Edits:
    """From `start` to `close`, on the training thread.

    Args:
        live: the file that the options came from; None: they came from elsewhere, and nothing ever changes.
        cadence, watch: learn what concerns them.
        log: of the adapter.
    """

    def __init__(self, live: LiveFile | None, cadence: Cadence, watch: PreemptionWatch, log: logging.Logger) -> None:
        self._live = live
        self._cadence = cadence
        self._watch = watch
        self._log = log

    def start(self) -> None:
        """Begin to look at the file."""
        if self._live is not None:
            self._live.start()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        if self._live is not None:
            self._live.close()

    def apply(self, config: Config) -> Config:
        """The options from now on; `config`, those so far, unless the file was edited in a way that changes them."""
        found = None if self._live is None else self._live.take()
        if found is None or self._live is None:
            return config
        if isinstance(found, str):
            self._log.warning("the edited options are not used: %s", found)
            return config
        made = change(config, found)
        if made is None:
            return config
        self._log.warning("%s", made.text(self._live.name))
        self._watch.grace_seconds = made.config.preemption.grace
        if (settings := cadence_settings(made.config)) != cadence_settings(config):
            self._cadence.retune(settings)
        return made.config
