"""`ckpt schema`: the JSON Schema of the options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine.config import OPTION_NAMES

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
    assert len(sections) == 11
    for section in sections:
        assert section["additionalProperties"] is False
        assert all(option.get("description") for option in section["properties"].values())


def test_the_schema_takes_the_same_forms_as_the_loader(ckpt: Ckpt) -> None:
    """Shares and durations are numbers or texts, a place is a text, a tier or a list of these."""
    options = ckpt("schema").json["properties"]
    assert [form["type"] for form in options["overhead"]["anyOf"]] == ["number", "string"]
    assert options["lazy"]["enum"] == ["auto", "on", "off"]
    text, tier, several = options["tiers"]["anyOf"]
    assert (text["type"], tier["$ref"], several["type"], several["minItems"]) == ("string", "#/$defs/Tier", "array", 1)
