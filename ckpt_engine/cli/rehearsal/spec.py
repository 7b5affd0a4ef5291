"""What a rehearsal tells the process that runs the script, and what that process writes down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt_engine.errors import CorruptError


@dataclass(frozen=True, slots=True)
class Spec:
    """One run of the script.

    Args:
        folder: where its snapshots go; one folder in it per run folder that the script names.
        trace: file to which one line of JSON per event is appended.
        steps: the run ends right after the first snapshot of at least this step.
        kill_at: the process kills itself before it would take a snapshot after this step; None: it does not.
    """

    folder: str
    trace: str
    steps: int
    kill_at: int | None = None

    def write(self, path: Path) -> Path:
        """Put it into a file."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Spec:
        """The inverse of `write`."""
        return cls(**json.loads(path.read_text()))


Attributes = Mapping[str, tuple[str, str]]
"""Class and digest of values that may be hidden state, by path; that of a local variable begins with `function().`"""

Batches = Mapping[tuple[int, int], str]
"""Digests of batches, by loader and number within the epoch."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of the script wrote down.

    Args:
        roots: the run folders that the script named, in order of their first use.
        loaded: ids of the snapshots it resumed from.
        batches: what was fetched on the way to each step.
        steps: of the snapshots it took, in order.
        stopped: it was ended after its last step; otherwise it was killed, or ended by itself.
        attributes: what its objects and its loop's variables were at each step.
    """

    roots: tuple[str, ...]
    loaded: tuple[str, ...]
    batches: Mapping[int, Batches]
    steps: tuple[int, ...]
    stopped: bool
    attributes: Mapping[int, Attributes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The events of a trace file; none if there is no file.

        Raises:
            CorruptError: it holds something else.
        """
        lines = path.read_text().splitlines() if path.exists() else []
        roots: list[str] = []
        loaded: list[str] = []
        steps: list[int] = []
        batches: dict[int, dict[tuple[int, int], str]] = {}
        attributes: dict[int, Attributes] = {}
        now: dict[str, tuple[str, str]] = {}
        stopped = False
        try:
            for event in map(json.loads, lines):
                if event["event"] == "root":
                    roots.append(event["url"])
                elif event["event"] == "loaded":
                    loaded.append(event["snapshot"])
                elif event["event"] == "saving":
                    steps.append(event["step"])
                    found = {(loader, number): digest for loader, number, digest in event["batches"]}
                    batches.setdefault(event["step"], {}).update(found)
                    now = now | {path: (kind, digest) for path, (kind, digest) in event["attributes"].items()}
                    attributes[event["step"]] = now
                elif event["event"] == "stopped":
                    stopped = True
        except (ValueError, KeyError, TypeError) as err:
            raise CorruptError(f"{path} is not what a rehearsal writes: {err}") from err
        return cls(tuple(roots), tuple(loaded), batches, tuple(steps), stopped, attributes)


def event_line(name: str, **values: Any) -> bytes:
    """One event as it is appended to the trace."""
    return json.dumps({"event": name, **values}).encode() + b"\n"
