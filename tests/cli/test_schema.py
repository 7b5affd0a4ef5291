"""`ckpt schema`: the JSON Schema of the options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_engine.config import OPTION_NAMES
from ckpt_engine.config.option_types import (
    BYTES_PER_UNIT,
    SECONDS_PER_UNIT,
    parse_bytes,
    parse_bytes_per_second,
    parse_duration_seconds,
)

Ckpt = Callable[..., Any]


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield schema
        for value in schema.values():
            yield from _objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _objects(value)


def test_the_schema_lists_every_option_with_its_meaning(ckpt: Ckpt) -> None:
    """An editor can complete and explain every key, and marks unknown ones."""
    schema = ckpt("schema").json
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert tuple(schema["properties"]) == OPTION_NAMES
    assert schema["required"] == ["tiers"]
    sections = list(_objects(schema))
    assert len(sections) == 16
    for section in sections:
        assert section["additionalProperties"] is False
        assert all(option.get("description") for option in section["properties"].values())


def test_quantities_have_patterns_that_the_loader_agrees_with(ckpt: Ckpt) -> None:
    """An editor marks a text that is no duration, size or rate, and takes each unit that the loader takes."""
    schema = ckpt("schema").json
    tier, keep = (schema["$defs"][name]["properties"] for name in ("Tier", "Keep"))
    durations = [(f"1.5 {unit}", True) for unit in SECONDS_PER_UNIT] + [("1h 30min", True), ("1e3", True)]
    sizes = [(f"5{unit}", True) for unit in BYTES_PER_UNIT]
    rates = [(f"5 {unit}/s", True) for unit in BYTES_PER_UNIT if unit]
    wrong = [(text, False) for text in ("much", "1 percent", "10 minits", "", "min", "5 XB", "5 MB/h")]
    kinds: list[tuple[Any, list[tuple[str, bool]], Any]] = [
        (tier["every"], durations + wrong, parse_duration_seconds),
        (keep["quota"], sizes + wrong, parse_bytes),
        (tier["bandwidth"], rates + wrong, parse_bytes_per_second),
    ]
    for option, samples, parse in kinds:
        [pattern] = re.findall(r"'pattern': '(.*?)'[,}]", str(option))
        pattern = pattern.replace("\\\\", "\\")
        for text, fits in samples:
            assert bool(re.search(pattern, text)) is fits, (text, pattern)
            with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="must be"):
                parse(text)


def test_the_schema_has_an_id_and_takes_a_number_of_snapshots(ckpt: Ckpt) -> None:
    """`keep: 3`, generally and on a tier."""
    schema = ckpt("schema").json
    assert schema["$id"].startswith("urn:")
    for keep in (schema["properties"]["keep"], schema["$defs"]["Tier"]["properties"]["keep"]):
        assert {"type": "integer", "exclusiveMinimum": 0} in keep["anyOf"]


def test_the_schema_takes_the_same_forms_as_the_loader(ckpt: Ckpt) -> None:
    """Shares and durations are numbers or texts, a place is a text, a tier or a list of these."""
    options = ckpt("schema").json["properties"]
    assert [form["type"] for form in options["overhead"]["anyOf"]] == ["number", "string"]
    assert options["lazy"]["enum"] == ["auto", "on", "off"]
    text, tier, several = options["tiers"]["anyOf"]
    assert (text["type"], tier["$ref"], several["type"], several["minItems"]) == ("string", "#/$defs/Tier", "array", 1)
