"""A rehearsal: the environment variable with which `ckpt verify-resume` and `ckpt prove` start a command in a scratch
folder, and end it after a step.

The command, its ranks and all else that it starts inherit the variable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

VARIABLE = "CKPT_REHEARSAL"
_DROPPED = ("overhead", "max_lost_work", "mtbf", "every_seconds", "at_end", "on", "seal")
"""Options that have their defaults in a rehearsal."""
_ROOTS = "roots.jsonl"
_ALL = 1_000_000


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How far a command runs, and where.

    Args:
        folder: has a folder `runN` for each run that the command names, in the order of their first use.
        every_n_steps: a snapshot at every multiple of these; all are kept.
        end: when this step is complete, the process ends, before it saves a snapshot of it.
    """

    folder: str
    every_n_steps: int
    end: int

    @classmethod
    def of_environment(cls) -> Self | None:
        """What this process takes part in; None: no rehearsal."""
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        """The environment of a process that takes part."""
        return {**os.environ, VARIABLE: json.dumps(asdict(self))}

    def roots(self) -> list[str]:
        """The runs that the command has named, in the order of their folders."""
        path = Path(self.folder, _ROOTS)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def place_of(self, root: str) -> str:
        """The folder that takes the place of a run.

        Args:
            root: of the run, as the options name it.
        """
        if root not in self.roots():
            Path(self.folder).mkdir(exist_ok=True)
            with Path(self.folder, _ROOTS).open("a") as file:  # two ranks may both do so: the first line counts
                file.write(json.dumps(root) + "\n")
        return str(Path(self.folder, f"run{self.roots().index(root)}"))

    def options(self, root: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """A run's options in this rehearsal; None: they are already.

        Args:
            root: of the run.
            given: its options.
        """
        if root.startswith(self.folder):
            return None
        return {name: value for name, value in given.items() if name not in _DROPPED} | {
            "tiers": self.place_of(root),
            "keep": {"last": _ALL},
            "every_n_steps": self.every_n_steps,
            "on_error": "raise",
            "replay": "warn",
        }
