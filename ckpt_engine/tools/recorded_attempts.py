"""The attempts that a run has recorded.

Each says how it ended, and what its time went into.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ckpt_engine.config import Config
from ckpt_engine.observe import units
from ckpt_engine.observe.run_times import RunSpent
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.tools.live_run import LiveWriter
from ckpt_engine.writer.attempts import Attempt, AttemptHistory, read_attempts

MEANINGS = {
    "productive": "training that was not lost",
    "slowdown": "longer steps near snapshots",
    "stall": "snapshots blocked training",
    "fence": "waits for copies",
    "hooks": "of each step, for snapshots or not",
    "replay": "lost by failures, done again",
    "restore": "snapshots were read",
    "startup": "processes got ready",
    "validation": "evaluation",
    "end": "waits for the last snapshot",
    "down": "no process trained",
    "unknown": "not recorded",
}


def history_of(config: Config, storage: Storage) -> AttemptHistory:
    """The attempts as recorded at the nearest tier; of one that is trained on this machine up to now.

    Raises:
        CorruptError: the record is damaged.
        StorageError
    """
    history, live = read_attempts(storage), LiveWriter.of(config.root_url)
    is_over = not history.attempts or history.attempts[-1].end is not None
    if is_over or live is None or not (live.trainer and live.spent):
        return history  # of a writer that does not answer it is at most a minute old
    now = replace(history.attempts[-1], **live.spent)
    lasted = max(now.seconds, time.time() - now.began)
    return replace(history, attempts=(*history.attempts[:-1], replace(now, seconds=lasted)))


def failure_of(one: Attempt) -> str:
    """How it ended, for people."""
    if one.end is None:
        return "trains, or was lost with its machine"
    return f"ended by a failure of {one.failure}" if one.failure else "ended, or was stopped"


def headline(spent: RunSpent) -> str:
    """The goodput of a run, for people."""
    least = "at least " if spent.parts["unknown"] > 0.0 else ""  # of attempts that an older version has recorded
    return f"goodput {least}{units.percent(spent.goodput)} of {units.duration(spent.wall)}"
