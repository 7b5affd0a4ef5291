"""The options themselves: frozen pydantic models with their defaults, meanings and JSON Schema.

A new option is one field here. A key that the documentation of a later version knows is listed in `planned`, so that it
is refused by name instead of being called a typing mistake.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from ckpt_engine.config.fields import (
    DURATION_SCHEMA,
    Count,
    Duration,
    Flag,
    Section,
    Share,
    checked,
    nonempty_text,
    one_of,
    option_error,
)
from ckpt_engine.config.keep import Keep
from ckpt_engine.config.quantities import parse_duration_seconds

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def _location(value: object) -> str:
    """A storage URL as given, or a folder as an absolute path (relative to the working directory, `~` expanded)."""
    text = nonempty_text(value)
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
        raise option_error("must name a folder")
    if len(places) > 1:
        raise option_error(f"several tiers are not supported by this version: {len(places)} given, name one")
    return [{"url": place} if isinstance(place, str) else place for place in places]


def _patterns(value: object) -> list[str]:
    """One text or a list of texts → a list."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("must be a list of paths such as ['loop/custom', 'callbacks/*']")
    return [nonempty_text(item) for item in items]


class _TierListSchema:
    """JSON Schema of what `_tier_list` accepts."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        places = handler(core)
        one = {"anyOf": [{"type": "string"}, places.get("items", {})]}
        return {"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1, "maxItems": 1}]}


class Tier(Section):
    """A place for snapshots."""

    planned = frozenset({"every", "every_n_steps", "codec", "bandwidth", "concurrency", "storage_options"})

    url: Annotated[str, checked(_location), WithJsonSchema({"type": "string", "minLength": 1})] = Field(
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
        checked(parse_duration_seconds, also="auto"),
        WithJsonSchema({"anyOf": [{"const": "auto"}, *DURATION_SCHEMA["anyOf"]]}),
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
    on_error: Annotated[Literal["raise", "warn"], one_of("raise", "warn")] = Field(
        default="warn",
        description="A snapshot that fails in the background stops training at the next step, or is reported.",
    )
    writer: Annotated[Literal["process", "thread"], one_of("process", "thread")] = Field(
        default="process", description="What writes snapshots: a process that outlives the trainer, or a thread of it."
    )
    slots: Count = Field(
        default=2, description="Snapshots that fit in host memory at once: one staged while one is written."
    )
    lazy: Annotated[Literal["auto", "off"], one_of("auto", "off")] = Field(
        default="auto",
        description="auto: copy while the next forward and backward run; off: copy before training goes on.",
    )

    pickle: Annotated[
        tuple[str, ...],
        checked(_patterns),
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
