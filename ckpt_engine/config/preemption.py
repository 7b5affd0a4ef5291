"""Stopping in time as options: which signals, how long they leave, and who else is asked."""

from __future__ import annotations

import re
import signal
from typing import Annotated, Self

from pydantic import Field, WithJsonSchema, model_validator

from ckpt_engine.config.fields import Duration, Section, Text, checked, nonempty_text, option_error

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


def _signal_names(value: object) -> list[str]:
    """One name or a list of names → names with `SIG` in front."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"must be a list of {', '.join(_SIGNALS)}")
    names = []
    for item in items:
        text = str(item).upper()
        name = text if text.startswith("SIG") else f"SIG{text}"
        if name not in _SIGNALS:
            raise ValueError(f"must be among {', '.join(_SIGNALS)}")
        if name not in names:
            names.append(name)
    return names


def _web_address(value: object) -> str:
    text = nonempty_text(value)
    if not re.match(r"https?://[^/]", text):
        raise ValueError("must be a URL that starts with http:// or https://")
    return text


def _expression(value: object) -> str:
    text = nonempty_text(value)
    try:
        re.compile(text)
    except re.error as err:
        raise ValueError(f"must be a regular expression ({err})") from err
    return text


def _command(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of a program and its arguments, such as [./preempted.sh, --now]")
    if not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of texts; put numbers in quotes")
    return [nonempty_text(value[0]), *value[1:]]


def _headers(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of names to texts")
    return {str(name): str(text) for name, text in value.items()}


class Source(Section):
    """Who else is asked whether the run must stop: one of `file`, `http` and `command`."""

    file: Text | None = Field(default=None, description="A file that appears or is touched.")
    http: Annotated[str, checked(_web_address), WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description="A URL that answers with something else than 404, and with match if that is given."
    )
    match: Annotated[str, checked(_expression), WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description="A regular expression that the answer of http must contain."
    )
    headers: Annotated[dict[str, str], checked(_headers), WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, repr=False, description="Headers of the request of http."
    )
    command: (
        Annotated[
            tuple[str, ...],
            checked(_command),
            WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
        ]
        | None
    ) = Field(default=None, description="A command, without a shell, that ends with 0: stop, or with 1: go on.")
    every: Duration = Field(default=5.0, description="How often it is asked.")
    grace: Duration | None = Field(default=None, description="Time it leaves, instead of the general one.")

    def __hash__(self) -> int:
        return hash((self.file, self.http, self.command))

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in ("file", "http", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            raise option_error("give one of file, http and command")
        if self.http is None and (self.match is not None or self.headers):
            raise option_error("match and headers belong to http")
        return self


class Preemption(Section):
    """Who may ask the run to stop, and how long it then has to make a snapshot durable."""

    signals: Annotated[
        tuple[str, ...],
        checked(_signal_names),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ] = Field(
        default=("SIGTERM", "SIGINT"),
        description="Signals after which a snapshot is taken and training stops; of SIGINT (Ctrl-C) a second one stops "
        "at once.",
    )
    grace: Duration = Field(default=30.0, description="Time between such a signal and the end of the process.")
    sources: tuple[Source, ...] = Field(default=(), description="Who else is asked whether the run must stop.")

    def numbers(self) -> tuple[signal.Signals, ...]:
        """`signals` as numbers."""
        return tuple(signal.Signals[name] for name in self.signals)
