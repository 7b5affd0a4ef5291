"""Parses what a user writes as the place of snapshots."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckpt_engine.config.option_types import nonempty_text
from ckpt_engine.observe.units import LOGIN

MEMORY = "memory"
"""The place of the memory tier."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
"""The beginning of a storage URL."""
_ALMOST_URL = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)|(s3a?|gc?s|az|abfss?|hdfs|hf|file)(?::/*|//)", re.IGNORECASE
)
"""Else a bucket would silently be a folder of this machine, which is lost with it."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
"""What `os.path.expandvars` replaces."""
_MAY_BE_SECRET = frozenset("@?#")
"""Before the first may be a login, after the others a signature."""


def _without_variables(text: str) -> str:
    """The text with `$NAME` and `${NAME}` replaced by what the environment says.

    Raises:
        ValueError: a variable is not set, or empty: what is left would be another place.
    """
    for found in _VARIABLE.finditer(text):
        name = found[1] or found[2]
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set: set it, or write the place itself")
    return os.path.expandvars(text)


def parse_location(value: object) -> str:
    """A storage URL, `memory`, or the absolute path of a folder, with variables of the environment and `~` replaced.

    Raises:
        ValueError: it is none of these, or has a password in it.
    """
    text = _without_variables(nonempty_text(value))
    scheme = SCHEME.match(text)
    if text == MEMORY:
        return text
    if scheme is None:
        if (almost := _ALMOST_URL.match(text)) is not None:
            if not _MAY_BE_SECRET.isdisjoint(text):
                raise ValueError("a URL has a colon and two slashes; it is not shown, as it may contain a password")
            url = f"{almost[1] or almost[2]}://{text[almost.end() :]}"
            raise ValueError(f"a URL has a colon and two slashes: {url}; a folder of that name: ./{text}")
        if "://" in text:
            raise ValueError("a URL begins with its scheme, such as s3://bucket/run, and no folder has :// in its name")
        try:
            folder = Path(text).expanduser()
        except RuntimeError:
            raise ValueError(f"no home folder is known for a leading ~; a folder of that name: ./{text}") from None
        return str(Path(os.path.abspath(folder)))  # noqa: PTH100 - `..` is folded, links are not followed
    if LOGIN.match(text[scheme.end() :]):
        # Not with the value: it is logged, and it names the place in reports.
        raise ValueError("must not contain a password; put credentials in storage_options or in the environment")
    if scheme[1].lower() == "file" and not text[scheme.end() :].startswith("/"):
        raise ValueError("a file URL has three slashes: file:///folder")
    return text
