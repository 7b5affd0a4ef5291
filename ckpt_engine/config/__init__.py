"""The one schema of all options: YAML files, keywords and nested mappings become the same frozen `Config`.

load_config("ckpt.yaml")                           # a YAML file
load_config("/data/run1", overhead="1%")           # a folder or storage URL, plus keywords
load_config({"tiers": "/data/run1"}, slots=1)      # a mapping; keywords win

`Options` is the same for type checkers, which find a misspelt key or value of a keyword in the user's script.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Required, TypedDict

from ckpt_engine.config.load_config import load_config
from ckpt_engine.config.models import OPTION_NAMES, Config, Tier
from ckpt_engine.config.option_types import parse_duration_seconds, parse_fraction
from ckpt_engine.config.sections import Best, Keep, Preemption

__all__ = [
    "OPTION_NAMES",
    "Best",
    "Config",
    "Keep",
    "Options",
    "Preemption",
    "Tier",
    "load_config",
    "parse_duration_seconds",
    "parse_fraction",
]

Duration = float | str | timedelta
"""Seconds, a text with units (`10 min`), or a `timedelta`."""
Size = float | str
"""Bytes, or a text with units: `500 GB`."""
Folder = str | os.PathLike[str]


class BestOptions(TypedDict, total=False):
    """The section `keep.best`."""

    monitor: Required[str]
    mode: Literal["min", "max"]
    k: int


class RulesOptions(TypedDict, total=False):
    """A section of `keep.components`."""

    last: int
    every_n_steps: int
    hourly: int
    daily: int
    weekly: int
    age: Duration
    best: BestOptions


class KeepOptions(RulesOptions, total=False):
    """The section `keep`, also of a tier."""

    quota: Size
    min_free: Size
    components: Mapping[str, RulesOptions]


class SealOptions(TypedDict, total=False):
    """The section `seal`."""

    to: Sequence[str]
    sign: str | Sequence[str]
    key: str | Sequence[str]
    signed_by: Sequence[str]


class TierOptions(TypedDict, total=False):
    """One of `tiers`."""

    url: Required[Folder]
    every: Duration
    every_n_steps: int
    replicate: int
    parity: int | Mapping[str, int]
    keep: KeepOptions | int
    protect: Mapping[str, int]
    bandwidth: Size
    concurrency: int
    on_failure: Literal["degrade", "fail"]
    codec: str
    storage_options: Mapping[str, Any]
    seal: SealOptions


class LostWorkOptions(TypedDict, total=False):
    """The option `max_lost_work` by class of failure."""

    process: Duration
    machine: Duration
    site: Duration


class SourceOptions(TypedDict, total=False):
    """One of `preemption.sources`."""

    file: Folder
    http: str
    match: str
    headers: Mapping[str, str]
    command: Sequence[str]
    every: Duration
    grace: Duration


class PreemptionOptions(TypedDict, total=False):
    """The section `preemption`."""

    signals: str | Sequence[str]
    grace: Duration
    sources: Sequence[SourceOptions]


class StatusOptions(TypedDict, total=False):
    """The section `status`."""

    file: Folder
    every: Duration
    port: int
    host: str
    otel: bool


class LogOptions(TypedDict, total=False):
    """The section `log`."""

    bar: Literal["off", "short", "full"]
    loggers: Literal["on", "full", "off"]


class OnOptions(TypedDict, total=False):
    """The section `on`."""

    failure: str | Sequence[str]
    stop: str | Sequence[str]
    durable: str | Sequence[str]
    timeout: Duration


class RollbackOptions(TypedDict, total=False):
    """The section `rollback`."""

    on: Required[Literal["nan", "loss_spike"]]
    skip_batches: int
    at_most: int


ResumeOptions = TypedDict(
    "ResumeOptions",
    {
        "from": str,
        "only": str | Sequence[str],
        "skip": str | Sequence[str],
        "map": Mapping[str, str],
        "override": Mapping[str, Any],
        "strict": bool,
    },
    total=False,
)
"""The section `resume`, with `from`, which is a word of Python."""


class Options(TypedDict, total=False):
    """The keywords of `Checkpointer`, both `AdaptiveCheckpoint`s and `TransformersCallback`; None: not given."""

    overhead: float | str | None
    max_lost_work: Duration | LostWorkOptions | None
    mtbf: Duration | None
    every_n_steps: int | None
    every_seconds: Duration | None
    at_steps: Sequence[int] | None
    on_validation_end: bool | None
    at_end: bool | None
    wait_at_end: Duration | None
    keep: KeepOptions | int | None
    protect: Mapping[str, int] | None
    seal: SealOptions | None
    tiers: Folder | TierOptions | Sequence[Folder | TierOptions] | None
    preemption: PreemptionOptions | None
    status: StatusOptions | None
    log: LogOptions | None
    on: OnOptions | None
    guard: Literal["off", "nan", "loss_spike"] | None
    rollback: RollbackOptions | None
    resume: Literal["auto", "off"] | ResumeOptions | None
    on_error: Literal["raise_at_end", "raise", "warn"] | None
    writer: Literal["process", "thread"] | None
    linger: Duration | None
    slots: int | None
    lazy: Literal["auto", "on", "off"] | bool | None
    rng: Literal["derive", "warn", "strict"] | None
    data: Literal["refuse", "restart_epoch", "continue"] | None
    hidden: Literal["auto", "report", "off"] | None
    replay: Literal["warn", "stop", "off"] | None
    pickle: str | Sequence[str] | None
