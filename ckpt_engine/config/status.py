"""Where a run says how it stands, as options."""

from __future__ import annotations

from pydantic import Field

from ckpt_engine.config.fields import Count, Duration, Section, Text


class Status(Section):
    """What schedulers and monitors read of a run: nothing, a file, a page, or both."""

    file: Text | None = Field(default=None, description="A JSON file that is replaced again and again.")
    every: Duration = Field(default=5.0, description="How often the file is replaced.")
    port: Count | None = Field(default=None, description="Serve /metrics (for Prometheus) and /status (JSON) there.")
    host: Text = Field(default="127.0.0.1", description="The address that the port is opened on.")
