"""Retention as options: which snapshots a run or a tier keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ckpt_engine.config.fields import Count, Section, Text, one_of


class Best(Section):
    """Keep the best snapshots by a metric given to `save` or logged by the trainer."""

    monitor: Text = Field(description="Name of the metric. Snapshots without it, or where it is NaN, are never best.")
    mode: Annotated[Literal["min", "max"], one_of("min", "max")] = Field(
        default="min", description="Whether a small or a large value is good."
    )
    k: Count = Field(default=1, description="How many to keep.")


class Keep(Section):
    """Which snapshots are kept: everything that any of these rules wants. The newest one is always kept."""

    planned = frozenset({"hourly", "daily", "weekly", "quota", "min_free", "age", "tags"})

    last: Count = Field(default=2, description="The newest N.")
    every_n_steps: Count | None = Field(default=None, description="Those whose step is a multiple of N.")
    best: Best | None = Field(default=None, description="The best by a metric.")
