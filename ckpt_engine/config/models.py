"""The options themselves: frozen pydantic models with their defaults, meanings and JSON Schema.

A new option is one field here. A key that the documentation of a later version knows is listed in `planned`, so that it
is refused by name instead of being called a typing mistake.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from ckpt_engine.config.quantities import parse_count, parse_duration_seconds, parse_flag, parse_fraction

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def _problem(text: str, *, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("option", "{text}", {"text": text, "hint": hint})


def _checked(parse: Callable[[object], object], *, also: str | None = None) -> BeforeValidator:
    """Runs `parse` first; `also` is a word that is accepted as it is."""

    def validate(value: object) -> object:
        if also is not None and value == also:
            return value
        try:
            return parse(value)
        except ValueError as err:
            raise _problem(f"{err}, or '{also}'" if also else str(err)) from err

    return BeforeValidator(validate)


def _one_of(*words: str) -> BeforeValidator:
    """Exactly one of `words`; the boolean that a YAML 1.1 reader makes of an unquoted `on` or `off` counts as it."""

    def validate(value: object) -> object:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) and "off" in words else value
        if isinstance(word, str) and word in words:
            return word
        near = difflib.get_close_matches(str(value).lower(), words, 1)
        choices = " or ".join(f"'{w}'" for w in words)
        raise _problem(f"must be {choices}", hint=f"; did you mean '{near[0]}'?" if near else "")

    return BeforeValidator(validate)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    return value


def _location(value: object) -> str:
    """A storage URL as given, or a folder as an absolute path (relative to the working directory, `~` expanded)."""
    text = _text(value)
    if text == "memory":
        raise ValueError("the memory tier is not supported by this version; give a folder on a local disk")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return str(Path(os.path.abspath(Path(text).expanduser())))  # noqa: PTH100 - `..` is folded, links are not followed
    if scheme[1].lower() != "file":
        # The URL itself is left out: it may carry credentials.
        raise ValueError(
            f"storage '{scheme[1]}://' is not supported by this version; give a local folder or a file:// URL"
        )
    if not text[scheme.end() :].startswith("/"):
        raise ValueError("a file URL has three slashes: file:///folder")
    return text


def _tier_list(value: object) -> object:
    """One place or a list of places → a list of mappings."""
    places = value if isinstance(value, list | tuple) else [value]
    if not places:
        raise _problem("must name a folder")
    if len(places) > 1:
        raise _problem(f"several tiers are not supported by this version: {len(places)} given, name one")
    return [{"url": place} if isinstance(place, str) else place for place in places]


def _patterns(value: object) -> list[str]:
    """One text or a list of texts → a list."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("must be a list of paths such as ['loop/custom', 'callbacks/*']")
    return [_text(item) for item in items]


class _TierListSchema:
    """JSON Schema of what `_tier_list` accepts."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        places = handler(core)
        one = {"anyOf": [{"type": "string"}, places.get("items", {})]}
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1, "maxItems": 1}]}


_COUNT_SCHEMA = WithJsonSchema({"type": "integer", "minimum": 1})
_DURATION_SCHEMA = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}],
    "examples": ["10 min", "1 h 30 min", 90],
}

Count = Annotated[int, _checked(parse_count), _COUNT_SCHEMA]
Duration = Annotated[float, _checked(parse_duration_seconds), WithJsonSchema(_DURATION_SCHEMA)]
Flag = Annotated[bool, _checked(parse_flag), WithJsonSchema({"type": "boolean"})]
Share = Annotated[
    float,
    _checked(parse_fraction),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9.eE+-]+\s*%?\s*$"},
            ],
            "examples": ["1%", 0.01],
        }
    ),
]
Text = Annotated[str, _checked(_text), WithJsonSchema({"type": "string", "minLength": 1})]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused. `planned` keys belong to later versions."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    planned: ClassVar[frozenset[str]] = frozenset()


class Best(Section):
    """Keep the best snapshots by a metric given to `save` or logged by the trainer."""

    monitor: Text = Field(description="Name of the metric. Snapshots without it, or where it is NaN, are never best.")
    mode: Annotated[Literal["min", "max"], _one_of("min", "max")] = Field(
        default="min", description="Whether a small or a large value is good."
    )
    k: Count = Field(default=1, description="How many to keep.")


class Keep(Section):
    """Which snapshots are kept: everything that any of these rules wants. The newest one is always kept."""

    planned = frozenset({"hourly", "daily", "weekly", "quota", "min_free", "age", "tags"})

    last: Count = Field(default=2, description="The newest N.")
    every_n_steps: Count | None = Field(default=None, description="Those whose step is a multiple of N.")
    best: Best | None = Field(default=None, description="The best by a metric.")


class Tier(Section):
    """A place for snapshots."""

    planned = frozenset({"every", "every_n_steps", "codec", "bandwidth", "concurrency", "storage_options"})

    url: Annotated[str, _checked(_location), WithJsonSchema({"type": "string", "minLength": 1})] = Field(
        description="A folder, relative to the working directory if not absolute, or a file:// URL."
    )
    keep: Keep | None = Field(default=None, description="Retention of this tier, instead of the general one.")


class Config(Section):
    """Options of a run. Durations are in seconds once loaded."""

    planned = frozenset({"linger", "rollback"})

    overhead: Share = Field(
        default=0.01, description="Share of training time that snapshots may cost; the frequency follows."
    )
    max_lost_work: Duration | None = Field(default=None, description="Work that a crash may cost at worst.")
    mtbf: Annotated[
        Literal["auto"] | float,
        _checked(parse_duration_seconds, also="auto"),
        WithJsonSchema({"anyOf": [{"const": "auto"}, *_DURATION_SCHEMA["anyOf"]]}),
    ] = Field(
        default="auto", description="Mean time between failures of the job; auto learns it from the run's own restarts."
    )
    every_n_steps: Count | None = Field(
        default=None,
        description="A snapshot at every multiple of N steps; without overhead or max_lost_work at no other interval.",
    )
    every_seconds: Duration | None = Field(
        default=None,
        description="A snapshot when the last one is that old; without overhead or max_lost_work at no other interval.",
    )
    on_validation_end: Flag = Field(default=False, description="Also a snapshot after each validation.")
    at_end: Flag = Field(default=True, description="A snapshot of the final state when training ends.")
    keep: Keep = Field(default_factory=Keep, description="Which snapshots are kept.")
    tiers: Annotated[tuple[Tier, ...], BeforeValidator(_tier_list), _TierListSchema()] = Field(
        description="Where snapshots go: a folder or file:// URL, or a list with one of these."
    )
    on_error: Annotated[Literal["raise", "warn"], _one_of("raise", "warn")] = Field(
        default="warn",
        description="A snapshot that fails in the background stops training at the next step, or is reported.",
    )
    writer: Annotated[Literal["process", "thread"], _one_of("process", "thread")] = Field(
        default="process", description="What writes snapshots: a process that outlives the trainer, or a thread of it."
    )
    slots: Count = Field(
        default=2, description="Snapshots that fit in host memory at once: one staged while one is written."
    )
    lazy: Annotated[Literal["auto", "on", "off"], _one_of("auto", "on", "off")] = Field(
        default="auto",
        description="on: copy while the next forward and backward run; off: copy before training goes on; "
        "auto: on where a core is left that training does not use.",
    )

    pickle: Annotated[
        tuple[str, ...],
        _checked(_patterns),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
    ] = Field(
        default=(),
        description="Paths in the state (* and ? match) that may be stored with pickle. Loading these can run code.",
    )

    debug: Flag = Field(
        default=False,
        description="Compare every lazily copied byte with an immediate copy; slow, for finding mistakes.",
    )

    @property
    def root_url(self) -> str:
        """The run's root: an absolute folder path, or the URL as given."""
        return self.tiers[0].url

    @property
    def root_keep(self) -> Keep:
        """The retention that holds at the run's root."""
        return self.tiers[0].keep or self.keep

    def root_keep_rules(self) -> dict[str, Any]:
        """`root_keep` as plain JSON: only the rules that are set."""
        return self.root_keep.model_dump(mode="json", exclude_none=True)

    def frequency_options(self) -> dict[str, Any]:
        """What decides when snapshots are taken: keywords of `FrequencySettings.from_options`. None: not given."""
        return {
            "overhead": self.overhead if "overhead" in self.model_fields_set else None,
            "max_lost_work_seconds": self.max_lost_work,
            "mtbf_seconds": None if self.mtbf == "auto" else self.mtbf,
            "every_n_steps": self.every_n_steps,
            "every_seconds": self.every_seconds,
            "on_validation_end": self.on_validation_end,
            "at_end": self.at_end,
            "slots": self.slots,
        }

    def options(self) -> dict[str, Any]:
        """The options that were given, as JSON values; `load_config` makes an equal `Config` of them."""
        return self.model_dump(mode="json", exclude_unset=True)


OPTION_NAMES: tuple[str, ...] = tuple(Config.model_fields)
"""Names of the top-level options, which are also the keywords of `Checkpointer` and of both `AdaptiveCheckpoint`s."""
