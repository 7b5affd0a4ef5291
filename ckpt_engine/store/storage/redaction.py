"""Hides credentials of storages in whatever is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import quote

from ckpt_engine.errors import led_to

_WORDS = ("key", "secret", "token", "pass", "credential", "sas", "connection_string")
_PUBLIC = frozenset({"endpoint_url", "region_name", "anon", "profile", "project", "account_name", "host", "port"})
_ENVIRONMENT = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_REDACTION_LEAST = 6
"""Shorter texts are parts of ordinary words: hiding them would make messages unreadable."""
_HIDDEN = "***"
_SIGNED = re.compile(r"[?&;](sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|token|access_token|accountkey)=", re.IGNORECASE)
"""In a URL that opens what it names for all who have it."""


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """The texts in a library's options and in the environment that must not be shown, longest first.

    At the top level that is everything but what is known to be public. Below, what its name says is a secret; and
    user names and passwords in any URL.
    """
    found = {os.environ.get(name, "") for name in _ENVIRONMENT}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found.update(_below(value, secret=_is_secret(name)))
        elif isinstance(value, str):
            found.update([*_passwords(value)] if name in _PUBLIC else [value, *_passwords(value)])
    found.update([quote(text, safe="") for text in found])
    return tuple(sorted((text for text in found if len(text) >= _REDACTION_LEAST), key=len, reverse=True))


def redacted(text: str, secrets: Collection[str]) -> str:
    """`text` without them."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return text


def shows(error: BaseException, secrets: Collection[str]) -> bool:
    """Whether a traceback of `error` would show one of them or a signed URL, in what led to it too."""
    for one in led_to(error):
        text = "\n".join([f"{one!r} {one}", *getattr(one, "__notes__", ())])
        if redacted(text, secrets) != text or _SIGNED.search(text):
            return True
    return False


def _below(options: Mapping[str, object], *, secret: bool) -> Iterator[str]:
    for name, value in options.items():
        hidden = secret or _is_secret(name)
        if isinstance(value, Mapping):
            yield from _below(value, secret=hidden)
        elif isinstance(value, str):
            yield from _passwords(value)
            if hidden:
                yield value


def _is_secret(name: object) -> bool:
    return any(word in str(name).lower() for word in _WORDS)


def _passwords(text: str) -> Iterator[str]:
    """Who logs in with what, if `text` is a URL that says so; in pieces too, for a slash in it confuses libraries."""
    _, scheme, rest = text.partition("://")
    login, at, _ = rest.rpartition("@")
    if scheme and at:
        yield login
        for part in login.split(":", 1)[1:]:
            yield part
            yield from part.split("/")
