"""Retention as options: which snapshots a run or a tier keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from ckpt_engine.config.fields import Count, Duration, Section, Text, checked, one_of
from ckpt_engine.config.quantities import parse_bytes

Size = Annotated[
    int,
    checked(parse_bytes),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1}, {"type": "string"}], "examples": ["500 GB"]}),
]


class Best(Section):
    """Keep the best snapshots by a metric given to `save` or logged by the trainer."""

    monitor: Text = Field(description="Name of the metric. Snapshots without it, or where it is NaN, are never best.")
    mode: Annotated[Literal["min", "max"], one_of("min", "max")] = Field(
        default="min", description="Whether a small or a large value is good."
    )
    k: Count = Field(default=1, description="How many to keep.")


class Rules(Section):
    """What is kept: everything that any of these rules wants."""

    last: Count | None = Field(default=None, description="The newest N.")
    every_n_steps: Count | None = Field(default=None, description="The first at or after each multiple of N steps.")
    hourly: Count | None = Field(default=None, description="The newest of each of the last N hours that have one.")
    daily: Count | None = Field(default=None, description="The newest of each of the last N UTC days that have one.")
    weekly: Count | None = Field(default=None, description="The newest of each of the last N ISO weeks that have one.")
    age: Duration | None = Field(default=None, description="What was taken at most that long before the newest.")
    best: Best | None = Field(default=None, description="The best by a metric.")


class Keep(Rules):
    """Which snapshots are kept: everything that any of these rules wants. The newest one is always kept."""

    planned = frozenset({"tags"})

    last: Count = Field(default=2, description="The newest N.")
    quota: Size | None = Field(
        default=None, description="Bytes the run may occupy at most, the snapshot being written included."
    )
    min_free: Size | None = Field(default=None, description="Bytes that stay free on the disk.")
    components: dict[str, Rules] | None = Field(
        default=None, description="Rules by component: older snapshots lose it and keep the rest."
    )
