"""The recorded results of one machine: raw samples of every bar with versions, date and disturbance."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks import bars
from benchmarks.run import Scale
from benchmarks.values import BarResult, from_json, to_json

FORMAT = 1
NOISY_SHARE = 0.03
"""Share of the processors used by others from which on a measurement counts as disturbed."""


@dataclass(frozen=True, slots=True)
class MeasuredBar:
    """A bar's result and the circumstances of its measurement.

    Args:
        when: ISO 8601, UTC.
        shares: of all processors, used by `others` and `stolen` by the hypervisor.
    """

    result: BarResult
    when: str
    scale: Scale
    shares: Mapping[str, float]
    versions: Mapping[str, str]

    @property
    def disturbed(self) -> bool:
        """Whether somebody else used the machine noticeably."""
        return sum(self.shares.values()) > NOISY_SHARE


def measured_bar(
    result: BarResult, scale: Scale, shares: Mapping[str, float], versions: Mapping[str, str]
) -> MeasuredBar:
    """A bar measured just now."""
    when = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
    return MeasuredBar(result, when, scale, shares, versions)


@dataclass(frozen=True, slots=True)
class Record:
    """Bars measured on one machine, by name."""

    machine: Mapping[str, Any]
    bars: Mapping[str, MeasuredBar]

    def with_bar(self, bar: MeasuredBar) -> Self:
        """A record in which `bar` replaces an earlier measurement of the same bar."""
        return self.merged(type(self)(self.machine, {bar.result.name: bar}))

    def merged(self, newer: Record) -> Self:
        """This record, with the bars of `newer` instead of its own where both have them."""
        found = {**self.bars, **newer.bars}
        return type(self)(newer.machine, {name: found[name] for name in (*bars.NAMES, *bars.STUDIES) if name in found})

    def write(self, path: Path) -> None:
        """Write as JSON."""
        data = {
            "format": FORMAT,
            "machine": dict(self.machine),
            "bars": [
                {
                    "when": bar.when,
                    "scale": bar.scale.value,
                    "shares": {k: round(v, 4) for k, v in bar.shares.items()},
                    "versions": dict(bar.versions),
                    **to_json(bar.result),
                }
                for bar in self.bars.values()
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(data), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            ValueError: another format.
        """
        data = json.loads(path.read_text())
        if data.get("format") != FORMAT:
            raise ValueError(f"{path} has format {data.get('format')}, not {FORMAT}")
        found = [
            MeasuredBar(from_json(row), row["when"], Scale(row["scale"]), row["shares"], row["versions"])
            for row in data["bars"]
        ]
        return cls(data["machine"], {bar.result.name: bar for bar in found})


def read_all(folder: Path) -> list[Record]:
    """The records of a folder, oldest file first. Raises as `Record.read`."""
    return [Record.read(path) for path in sorted(folder.glob("*.json"))]


def _rounded(node: Any) -> Any:
    """Six significant digits are more than any clock here can tell."""
    if isinstance(node, float):
        return float(f"{node:.6g}")
    if isinstance(node, dict):
        return {key: _rounded(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_rounded(value) for value in node]
    return node
