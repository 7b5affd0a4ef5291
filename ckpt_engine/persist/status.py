"""What a writer says about its tiers: values, and the file that `ckpt status` reads."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.errors import CorruptError, StorageMissingError
from ckpt_engine.store import layout
from ckpt_engine.store.storage.base import Storage

WORKING = "working"
AWAY = "away"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier at one moment.

    Args:
        state: `working`, or `away` since it failed.
        newest: id of the newest snapshot there, as far as is known.
        copying: id of the snapshot on its way.
        waiting: snapshots that it still wants.
        waiting_bytes: their bytes.
        sent_bytes: since the writer started.
        code, message: of the error that made it away.
        since: wall-clock seconds at which `state` began.
    """

    url: str
    state: str
    newest: str | None = None
    copying: str | None = None
    waiting: int = 0
    waiting_bytes: int = 0
    sent_bytes: int = 0
    code: str | None = None
    message: str | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """A writer and its tiers, nearest first. `written` is wall-clock seconds; `ended`: it is no longer there."""

    pid: int
    host: str
    written: float
    ended: bool
    tiers: tuple[TierStatus, ...]


class StatusFile:
    """Replaces a status file in one step, so that readers never see half of one.

    It is for people: not synced, and written only on a local disk. Not thread safe.

    Args:
        root: folder of the nearest tier.
    """

    def __init__(self, root: str, pid: int, host: str) -> None:
        self._path = Path(root) / layout.STATUS
        self._temporary = Path(root) / f".tmp-{os.urandom(8).hex()}-{layout.STATUS}"
        self._pid = pid
        self._host = host

    def write(self, tiers: Sequence[TierStatus], *, ended: bool = False) -> None:
        """Say how things are.

        Raises:
            OSError: from the disk; the earlier status stays.
        """
        status = WriterStatus(self._pid, self._host, time.time(), ended, tuple(tiers))
        try:
            self._temporary.write_text(json.dumps(dataclasses.asdict(status)) + "\n", encoding="utf-8")
            self._temporary.replace(self._path)
        except OSError:
            self._temporary.unlink(missing_ok=True)
            raise


def read_status(storage: Storage) -> WriterStatus | None:
    """The last status written at a run's root, or None.

    Raises:
        CorruptError: it is no status.
        StorageError
    """
    try:
        text = storage.get(layout.STATUS)
    except StorageMissingError:
        return None
    try:
        row: dict[str, Any] = json.loads(text)
        tiers = tuple(TierStatus(**tier) for tier in row.pop("tiers"))
        return WriterStatus(**row, tiers=tiers)
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise CorruptError(f"{storage.url}/{layout.STATUS} is damaged: {err}", hint="remove it") from err
