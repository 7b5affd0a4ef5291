"""Settings of a running job: what an edited YAML file may change, and a thread that notices the edit."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ckpt_engine.config.load_config import load_config, shown
from ckpt_engine.config.models import Config
from ckpt_engine.errors import ConfigError

LOOK_SECONDS = 1.0
_END_SECONDS = 10.0

SAFE = (
    "overhead",
    "max_lost_work",
    "mtbf",
    "every_n_steps",
    "every_seconds",
    "at_steps",
    "on_validation_end",
    "at_end",
    "preemption.grace",
)
"""Options that take effect at the next step. All others are part of how the run was set up."""


@dataclass(frozen=True, slots=True)
class Change:
    """What an edit comes to.

    Args:
        config: in force from now on.
        applied: lines such as `overhead: 0.01 -> 0.02`.
        refused: options whose change needs a restart.
    """

    config: Config
    applied: tuple[str, ...]
    refused: tuple[str, ...]

    def text(self, path: str) -> str:
        """One line for people."""
        refused = f"; not in a running job: {', '.join(self.refused)}; start it again for that" if self.refused else ""
        return f"{path}: {', '.join(self.applied) or 'nothing is changed'}{refused}"


def change(now: Config, wanted: Config) -> Change | None:
    """What of `wanted` takes effect in a run with the options `now`; None where both are the same."""
    pairs = [(name, attrgetter(name)(now), attrgetter(name)(wanted)) for name in SAFE]
    applied = tuple(f"{name}: {shown(old)} -> {shown(new)}" for name, old, new in pairs if old != new)
    merged = {name: value for name, value in now.options().items() if name not in SAFE}
    merged |= {name: value for name, value in wanted.options().items() if name in SAFE}
    merged["preemption"] = {**merged.get("preemption", {}), "grace": wanted.preemption.grace}
    config = load_config(merged)
    refused = tuple(name for name in type(now).model_fields if getattr(config, name) != getattr(wanted, name))
    return Change(config, applied, refused) if applied or refused else None


class LiveFile:
    """Notices that a YAML file was edited, once a second, on a thread: its storage may hang like any other.

    Args:
        path: of the file.
        options: keywords that win over it.
    """

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self._path = Path(path).absolute()
        self.name = str(self._path)
        """The path, for messages."""
        self._options = dict(options)
        self._seen = self._mark()
        self._found: deque[Config | str] = deque(maxlen=1)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="ckpt-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._ending.set()
        if self._thread is not None and self._thread.is_alive():  # in a process that was forked it is not
            self._thread.join(_END_SECONDS)

    def take(self) -> Config | str | None:
        """What the file says since it was edited, or what is wrong with it; None: nothing new. Never waits."""
        return self._found.pop() if self._found else None

    def _run(self) -> None:
        before = self._seen
        while not self._ending.wait(LOOK_SECONDS):
            # Editors remove a file for a moment, or write it piece by piece: it counts once two looks agree on it.
            mark, before = before, self._mark()
            if mark is None or mark == self._seen or mark != before:
                continue
            self._seen = mark
            try:
                self._found.append(load_config(self._path, **self._options))
            except ConfigError as err:
                self._found.append(str(err))

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def live_file(source: object, options: Mapping[str, Any]) -> LiveFile | None:
    """The file behind a source of options, if it is a YAML file that exists."""
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(os.fspath(source))
    return LiveFile(path, options) if path.suffix.lower() in (".yaml", ".yml") and path.is_file() else None
