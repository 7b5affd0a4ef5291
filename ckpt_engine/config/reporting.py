"""The sections of the configuration about what a run reports to others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from ckpt_engine.config.option_types import (
    Duration,
    FilePath,
    Flag,
    Port,
    Text,
    checked,
    nonempty_text,
    one_of,
    parse_command,
    web_address,
)
from ckpt_engine.config.sections import Section


def _hook(value: object) -> str | list[str]:
    """A webhook, a line for a shell, or a program and its arguments."""
    if not isinstance(value, str):
        return parse_command(value)
    return web_address(value) if value.startswith(("http://", "https://")) else nonempty_text(value)


Hook = Annotated[
    str | tuple[str, ...],
    checked(_hook),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ],
            "examples": ["https://hooks.example.com/run1", "./notify.sh", ["python", "evaluate.py"]],
        }
    ),
]


class Status(Section):
    """What schedulers and monitors read of a run: nothing, a file, a page, or both."""

    file: FilePath | None = Field(default=None, description="A JSON file that is replaced again and again.")
    every: Duration = Field(default=5.0, description="How often the file is replaced.")
    port: Port | None = Field(default=None, description="Serve /metrics (for Prometheus) and /status (JSON) there.")
    host: Text = Field(default="127.0.0.1", description="The address that the port is opened on.")
    otel: Flag = Field(default=False, description="Show the same numbers to OpenTelemetry, as ckpt.step and so on.")


class Log(Section):
    """What a run shows of its snapshots beside its own log."""

    bar: Annotated[Literal["off", "short", "full"], one_of("off", "short", "full")] = Field(
        default="short",
        description="In Lightning's progress bar: short: the step of the newest durable snapshot; full: also the last "
        "stall, the interval in steps, megabytes and the age of the newest durable snapshot.",
    )
    loggers: Annotated[Literal["on", "full", "off"], one_of("on", "full", "off")] = Field(
        default="on",
        description="What Lightning's loggers, Accelerate's trackers and the reports of transformers get. on: six "
        "numbers ckpt/… (overhead, interval, age of the newest durable snapshot, work at risk, failed snapshots, "
        "goodput); full: all numbers; off: none.",
    )


class EventCalls(Section):
    """What is called when something happens to the run: a URL, a line for a shell, or a program with arguments."""

    failure: Hook | None = Field(
        default=None,
        repr=False,
        description="When training fails or is killed, a snapshot does not become durable, or a tier fails.",
    )
    stop: Hook | None = Field(default=None, repr=False, description="When training has ended or was stopped.")
    durable: Hook | None = Field(default=None, repr=False, description="When a snapshot has become durable.")
    timeout: Duration = Field(default=600, description="How long each call may take.")
