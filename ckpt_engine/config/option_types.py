"""The types that options have, each with its parser.

A parser makes a plain number in base units of a quantity as people write it (`1%`, `10 min`, `500 GB`). It takes
numbers and texts, because YAML 1.1 readers deliver `1e-3` as a text, and raises `ValueError` with a text that
completes the sentence "<key>: ...".
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

_NUMBER = r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_TERM = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ]*)")
SECONDS_PER_UNIT: Mapping[str, float] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
MOST_SECONDS = 100 * 365 * 86400.0
"""No clock of the system waits for much more than that."""
_DECIMAL = ("", "k", "M", "G", "T", "P")
BYTES_PER_UNIT: Mapping[str, int] = {
    **{f"{prefix}{b}": 1000**n for n, prefix in enumerate(_DECIMAL) for b in ("B", "")},
    **{f"{prefix.upper()}iB": 1024**n for n, prefix in enumerate(_DECIMAL) if n},
    **{f"{prefix.lower()}b": 1000**n for n, prefix in enumerate(_DECIMAL)},
    "KB": 1000,
    "K": 1000,
    "bytes": 1,
    "byte": 1,
}
"""Powers of 1000, of 1024 with an `i`. `Mb` is not among them: that would be bits."""
_FLAGS: Mapping[str, bool] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
FAILURES = {
    "process": "Work that a failure of the process may cost: the machine and its memory stay.",
    "machine": "Work that the loss of a machine may cost, with its memory and its disk.",
    "site": "Work that the loss of the whole site may cost: only further tiers elsewhere stay.",
}
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


def _number(value: object) -> float | None:
    """The finite number in `value`, or None where there is none (booleans are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_fraction(value: object) -> float:
    """A share strictly between 0 and 1.

    Args:
        value: `0.01`, `"0.01"`, `"1e-2"` or `"1%"`.

    Raises:
        ValueError: not a share.
    """
    percent = isinstance(value, str) and value.rstrip().endswith("%")
    number = _number(value.rstrip()[:-1]) if isinstance(value, str) and percent else _number(value)
    if number is None:
        raise ValueError("must be a share such as '1%' or 0.01")
    share = number / 100 if percent else number
    if not 0 < share < 1:
        hint = "" if percent or not 1 <= number < 100 else f"; for {number:g} percent write '{number:g}%'"
        raise ValueError(f"must be above 0% and below 100%{hint}")
    return share


def parse_wait_seconds(value: object) -> float:
    """As `parse_duration_seconds`, or 0: no wait."""
    return 0.0 if _number(value) == 0 else parse_duration_seconds(value)


def parse_duration_seconds(value: object) -> float:
    """A positive, finite duration in seconds.

    Args:
        value: seconds as a number, or a text of numbers with units ms, s, min, h, d, w: `"10 min"`, `"1h 30min"`.

    Raises:
        ValueError: not a duration.
    """
    seconds = _number(value)
    if seconds is None and isinstance(value, str):
        seconds = _sum_of_terms(value)
    if seconds is None:
        raise ValueError("must be a duration such as '10 min', '90 s', '1 h 30 min' or a number of seconds")
    if not 0 < seconds < math.inf:
        raise ValueError("must be a duration above 0")
    if seconds > MOST_SECONDS:
        raise ValueError("must be a duration of at most 100 years")
    return seconds


def _sum_of_terms(text: str) -> float | None:
    """Seconds in a text such as `1h 30min`; None where it is not of that form (a unit may be left out only alone)."""
    total, position, text = 0.0, 0, text.strip()
    while position < len(text):
        term = _TERM.match(text, position)
        unit = term[2] if term else ""
        factor = SECONDS_PER_UNIT.get(unit if unit == "m" else unit.lower())
        if term is None or unit in ("", "M") or factor is None:
            return None
        total += float(term[1]) * factor
        position = term.end()
    return total if text else None


def parse_bytes(value: object) -> int:
    """A positive number of bytes.

    Args:
        value: bytes as a number, or a text such as `"500 GB"`, `"1.5TB"` (powers of 1000) or `"64 GiB"` (of 1024).

    Raises:
        ValueError: not a size.
    """
    number = _number(value)
    if number is None and isinstance(value, str):
        term = _TERM.fullmatch(value.rstrip())
        factor = BYTES_PER_UNIT.get(term[2]) if term else None
        number = _number(float(term[1]) * factor) if term and factor else None
    if number is None:
        raise ValueError("must be a size such as '500 GB', '64 GiB' or a number of bytes")
    if number < 1:
        raise ValueError("must be a size of at least 1 byte")
    return int(number)


def parse_bytes_per_second(value: object) -> int:
    """A positive rate in bytes per second.

    Args:
        value: bytes per second as a number, or a text such as `"200 MB/s"`.

    Raises:
        ValueError: not a rate.
    """
    try:
        if isinstance(value, str) and _number(value) is None:
            size, slash, second = value.strip().rpartition("/")
            if not slash or second.strip() not in ("s", "sec", "second"):
                raise ValueError
            return parse_bytes(size)
        return parse_bytes(value)
    except ValueError:
        raise ValueError("must be a rate such as '200 MB/s' or a number of bytes per second") from None


def parse_count(value: object, most: int = 1 << 53) -> int:
    """A whole number from 1 to `most`.

    Args:
        value: `500`, `"500"`, `1e3` or `"1e3"`.
        most: the largest one that means anything; by default the largest that every reader of JSON has exactly.

    Raises:
        ValueError: not a whole number, below 1 or above `most`.
    """
    number = _number(value)
    if number is None or number != int(number):
        raise ValueError("must be a whole number")
    if number < 1:
        raise ValueError("must be a whole number of at least 1")
    if number > most:
        raise ValueError(f"must be a whole number of at most {most}")
    return int(number)


def parse_flag(value: object) -> bool:
    """True or False; also `yes`/`no` and `on`/`off`, which are booleans to YAML 1.1 readers and texts to others.

    Raises:
        ValueError: anything else, 0 and 1 included.
    """
    flag = _FLAGS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("must be true or false")
    return flag


def option_error(text: str, *, hint: str = "") -> PydanticCustomError:
    """The error of one option, shown as `<key>: <text>, got <value><hint>`."""
    return PydanticCustomError("option", "{text}", {"text": text, "hint": hint})


def refuse(*rules: tuple[object, str]) -> None:
    """Raises the error of the first rule that applies.

    Args:
        rules: whether each one applies, and the text of its error.
    """
    for applies, text in rules:
        if applies:
            raise option_error(text)


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


def one_of(*words: str, also: Callable[[str], bool] = lambda _: False) -> BeforeValidator:
    """Exactly one of `words`; the boolean that a YAML 1.1 reader makes of an unquoted `on` or `off` counts as it.

    Args:
        also: whether another text is allowed.
    """

    def validate(value: object) -> object:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) and "off" in words else value
        if isinstance(word, str) and (word in words or also(word)):
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
    if "\0" in value:
        raise ValueError("must not contain a zero byte")
    return value


def _file_path(value: object) -> str:
    """The path of a file, which need not exist.

    Raises:
        ValueError: it can be none.
    """
    text = nonempty_text(value)
    if PurePath(text).name in ("", ".."):
        raise ValueError("must be the path of a file, such as 'status.json'")
    return text


def parse_lost_work(value: object) -> float | dict[str, float]:
    """A duration, or one for each class of failures that is named.

    Raises:
        ValueError: a class that there is none of, or a value that is no duration.
    """
    if not isinstance(value, Mapping):
        return parse_duration_seconds(value)
    if not value or (unknown := [one for one in value if one not in FAILURES]):
        named = f", not {unknown[0]!r}" if value else ""
        raise ValueError(f"takes a duration, or durations for {', '.join(FAILURES)}{named}")
    return {str(one): parse_duration_seconds(limit) for one, limit in value.items()}


def _bytes_schema(after: str, example: str) -> dict[str, object]:
    """JSON Schema of a number of bytes, with or without a unit; `after`: what follows the unit."""
    text = {"type": "string", "pattern": rf"^\s*{_AMOUNT}(\s*({_BYTE_UNITS})\s*{after})?\s*$"}
    return {"anyOf": [{"type": "number", "minimum": 1}, text], "examples": [example]}


def parse_signals(value: object) -> list[str]:
    """One name or a list of names → names with `SIG` in front."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"must be a list of {', '.join(_SIGNALS)}")
    names = dict.fromkeys(f"SIG{str(item).upper().removeprefix('SIG')}" for item in items)
    if not names.keys() <= set(_SIGNALS):
        raise ValueError(f"must be among {', '.join(_SIGNALS)}")
    return list(names)


def web_address(value: object) -> str:
    """A URL of HTTP.

    Raises:
        ValueError: anything else.
    """
    text = nonempty_text(value)
    with suppress(ValueError):  # such as half of an IPv6 address, or a port that is no number
        parts = urlsplit(text)
        if (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.username is None
            and parts.port != 0
            and text.isprintable()
            and len(text.split()) == 1
        ):
            return text
    raise ValueError("must be a URL that starts with http:// or https:// and names a host, without a user")


def parse_expression(value: object) -> str:
    text = nonempty_text(value)
    try:
        re.compile(text)
    except re.error as err:
        raise ValueError(f"must be a regular expression ({err})") from err
    return text


def parse_command(value: object) -> list[str]:
    """A program and its arguments.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a list of a program and its arguments, such as [./preempted.sh, --now]")
    if not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of texts; put numbers in quotes")
    if any("\0" in item for item in value):
        raise ValueError("must not contain a zero byte")
    return [nonempty_text(value[0]), *value[1:]]


def _key_source(value: object) -> str | list[str]:
    """The absolute path of a file, as the writer works in another folder; or a program and its arguments."""
    if not isinstance(value, str | list | tuple) or not value:
        raise ValueError("must be the path of a key file, or a command as a list such as [vault, read, my-key]")
    return str(Path(_file_path(value)).expanduser().absolute()) if isinstance(value, str) else parse_command(value)


def parse_headers(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of names to texts")
    return {str(name): str(text) for name, text in value.items()}


def _patterns(value: object) -> list[str]:
    """One text or a list of texts → a list."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("must be a list of paths such as ['loop/custom', 'callbacks/*']")
    return [nonempty_text(item) for item in items]


_COUNT_SCHEMA = WithJsonSchema({"type": "integer", "minimum": 1})
_AMOUNT = r"[\d_.]+([eE][+-]?\d+)?"
_TIME_UNITS, _BYTE_UNITS = ("|".join(filter(None, units)) for units in (SECONDS_PER_UNIT, BYTES_PER_UNIT))
DURATION_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": rf"^\s*({_AMOUNT}|({_AMOUNT}\s*({_TIME_UNITS})\s*)+)\s*$"},
    ],
    "examples": ["10 min", "1 h 30 min", 90],
}
Count = Annotated[int, checked(parse_count), _COUNT_SCHEMA]
Port = Annotated[
    int,
    checked(partial(parse_count, most=65535)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535}),
]
Duration = Annotated[float, checked(parse_duration_seconds), WithJsonSchema(DURATION_SCHEMA)]
LostWork = Annotated[
    float | dict[str, float],
    checked(parse_lost_work),
    WithJsonSchema(
        {
            "anyOf": [
                *DURATION_SCHEMA["anyOf"],
                {
                    "type": "object",
                    "properties": {one: {**DURATION_SCHEMA, "description": text} for one, text in FAILURES.items()},
                    "additionalProperties": False,
                    "minProperties": 1,
                },
            ],
            "examples": ["10 min", {"process": "1 min", "site": "2 h"}],
        }
    ),
]
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
KeySource = Annotated[
    str | tuple[str, ...],
    checked(_key_source),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
FilePath = Annotated[str, checked(_file_path), WithJsonSchema({"type": "string", "minLength": 1})]
Text = Annotated[str, checked(nonempty_text), WithJsonSchema({"type": "string", "minLength": 1})]
Rate = Annotated[int, checked(parse_bytes_per_second), WithJsonSchema(_bytes_schema(r"/\s*(s|sec|second)", "200 MB/s"))]
Size = Annotated[int, checked(parse_bytes), WithJsonSchema(_bytes_schema("", "500 GB"))]
Patterns = Annotated[
    tuple[str, ...],
    checked(_patterns),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}),
]
