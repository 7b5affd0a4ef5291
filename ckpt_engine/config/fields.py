"""What the sections of options are made of: their base class, and fields that take quantities as people write them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

from ckpt_engine.config.quantities import parse_count, parse_duration_seconds, parse_flag, parse_fraction


def option_error(text: str, *, hint: str = "") -> PydanticCustomError:
    """The error of one option, shown as `<key>: <text>, got <value><hint>`."""
    return PydanticCustomError("option", "{text}", {"text": text, "hint": hint})


def checked(parse: Callable[[object], object], *, also: str | None = None) -> BeforeValidator:
    """Runs `parse` first; `also` is a word that is accepted as it is."""

    def validate(value: object) -> object:
        if also is not None and value == also:
            return value
        try:
            return parse(value)
        except ValueError as err:
            raise option_error(f"{err}, or '{also}'" if also else str(err)) from err

    return BeforeValidator(validate)


def one_of(*words: str) -> BeforeValidator:
    """Exactly one of `words`; the boolean that a YAML 1.1 reader makes of an unquoted `on` or `off` counts as it."""

    def validate(value: object) -> object:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) and "off" in words else value
        if isinstance(word, str) and word in words:
            return word
        near = difflib.get_close_matches(str(value).lower(), words, 1)
        choices = " or ".join(f"'{w}'" for w in words)
        raise option_error(f"must be {choices}", hint=f"; did you mean '{near[0]}'?" if near else "")

    return BeforeValidator(validate)


def nonempty_text(value: object) -> str:
    """A text with something in it.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be a text that has bytes in UTF-8, without lone surrogates") from None
    return value


_COUNT_SCHEMA = WithJsonSchema({"type": "integer", "minimum": 1})
DURATION_SCHEMA = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}],
    "examples": ["10 min", "1 h 30 min", 90],
}

Count = Annotated[int, checked(parse_count), _COUNT_SCHEMA]
Duration = Annotated[float, checked(parse_duration_seconds), WithJsonSchema(DURATION_SCHEMA)]
Flag = Annotated[bool, checked(parse_flag), WithJsonSchema({"type": "boolean"})]
Share = Annotated[
    float,
    checked(parse_fraction),
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
Text = Annotated[str, checked(nonempty_text), WithJsonSchema({"type": "string", "minLength": 1})]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused. `planned` keys belong to later versions."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    planned: ClassVar[frozenset[str]] = frozenset()
