"""The sections of the configuration, but for tiers and reports."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    WithJsonSchema,
    create_model,
    model_validator,
)

from ckpt_engine.config.option_types import (
    Count,
    Duration,
    FilePath,
    Flag,
    KeySource,
    Patterns,
    Size,
    Text,
    checked,
    one_of,
    parse_command,
    parse_expression,
    parse_headers,
    parse_signals,
    refuse,
    web_address,
)


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Best(Section):
    """Keep the best snapshots by a metric given to `save` or logged by the trainer."""

    monitor: Text = Field(description="Name of the metric. Snapshots without it, or where it is NaN, are never best.")
    mode: Annotated[Literal["min", "max"], one_of("min", "max")] = Field(
        default="min", description="Whether a small or a large value is good."
    )
    k: Count = Field(default=1, description="How many to keep.")


class Protect(Section):
    """Snapshots that nothing removes while they are young, whatever retention says."""

    days: Count = Field(description="Days from when a snapshot was taken. An S3 bucket with Object Lock enforces them.")


class ParityParts(Section):
    """How many lost parts of a data file can be made again."""

    data: Count = Field(default=8, le=24, description="Ranges that each data file is cut into (at most 24).")
    parity: Count = Field(default=2, le=8, description="So many of them may be lost or damaged (at most 8).")


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

    last: Count = Field(default=2, description="The newest N.")
    quota: Size | None = Field(
        default=None, description="Bytes the run may occupy at most, the snapshot being written included."
    )
    min_free: Size | None = Field(
        default=None,
        description="Bytes that stay free on the disk, the newest snapshot is refused for them; without it 1 % of the "
        "run's and the free bytes, at most 268 MB, for which only older snapshots go.",
    )
    components: dict[str, Rules] | None = Field(
        default=None, description="Rules by component: older snapshots lose it and keep the rest."
    )


def _keep_rules(value: object) -> object:
    """A number → so many of the newest."""
    return value if isinstance(value, bool) or not isinstance(value, int) else {"last": value}


KeepRules = Annotated[Keep, BeforeValidator(_keep_rules, json_schema_input_type=PositiveInt | Keep)]


_FROM: Any = Field(
    default=None,
    description="URL#STEP of another run, whose snapshot this run begins with; as soon as it has one of its own, it "
    "resumes from that. Without #STEP the newest.",
)


_Begins: Any = create_model("_Begins", __base__=Section, **{"from": (Text | None, _FROM)})  # type: ignore[call-overload]
"""With `from`, which is a word of Python."""


class Source(Section):
    """Who else is asked whether the run must stop: one of `file`, `http` and `command`."""

    file: FilePath | None = Field(default=None, description="A file that appears or is touched.")
    http: Annotated[str, checked(web_address), WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description="A URL that answers with something else than 404, and with match if that is given."
    )
    match: Annotated[str, checked(parse_expression), WithJsonSchema({"type": "string"})] | None = Field(
        default=None, description="A regular expression that the answer of http must contain."
    )
    headers: Annotated[dict[str, str], checked(parse_headers), WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, repr=False, description="Headers of the request of http."
    )
    command: (
        Annotated[
            tuple[str, ...],
            checked(parse_command),
            WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
        ]
        | None
    ) = Field(default=None, description="A command, without a shell, that ends with 0: stop, or with 1: go on.")
    every: Duration = Field(default=5.0, description="How often it is asked.")
    grace: Duration | None = Field(default=None, description="Time it leaves, instead of the general one.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in ("file", "http", "command") if getattr(self, name) is not None]
        for_http = self.match is not None or self.headers
        refuse(
            (len(given) != 1, "give one of file, http and command"),
            (self.http is None and for_http, "match and headers belong to http"),
        )
        return self


class Preemption(Section):
    """Who may ask the run to stop, and how long it then has to make a snapshot durable."""

    signals: Annotated[
        tuple[str, ...],
        checked(parse_signals),
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


class Rollback(Section):
    """What a restart does about a run whose loss has diverged."""

    on: Annotated[Literal["nan", "loss_spike"], one_of("nan", "loss_spike")] = Field(
        description="What ends training and makes the next start go back: as for guard."
    )
    skip_batches: Count = Field(
        default=100, description="Batches that each rank leaves out from there on; whole optimizer steps."
    )
    at_most: Count = Field(default=3, description="Rollbacks in a run; one more divergence ends it for good.")


class Seal(Section):
    """Who can open what is written, and whose signature is accepted. Every object is encrypted and signed."""

    to: tuple[Text, ...] = Field(
        default=(), description="Recipients, as `ckpt keys show` prints them; none: the one of key, else of sign."
    )
    sign: KeySource | None = Field(
        default=None, description="File of the key that signs, or a command that prints it; not given: key."
    )
    key: KeySource | None = Field(
        default=None,
        description="File of the key that opens, or a command that prints it; not given: the file that $CKPT_KEY_FILE "
        "names. A trainer that only writes needs none.",
    )
    signed_by: tuple[Text, ...] = Field(
        default=(), description="Recipients whose signature is accepted; none: the one of sign, else of key."
    )


class ResumeChanges(_Begins):  # type: ignore[misc]
    """What the next start changes in the snapshot that it resumes from, once."""

    only: Patterns | None = Field(
        default=None,
        description="What is restored, and nothing else: training begins at step 0, with fresh counters, positions and "
        "random streams.",
    )
    skip: Patterns = Field(
        default=(), description="What is left as the program made it; rng: the random streams of this process."
    )
    map: dict[Text, Text] = Field(
        default_factory=dict, description="New names of components and of what is right below them, by their old names."
    )
    override: dict[Text, Any] = Field(default_factory=dict, description="Values to set, by name.")
    strict: Flag = Field(
        default=True, description="no: weights that only the program or only the snapshot has stay as they are."
    )
