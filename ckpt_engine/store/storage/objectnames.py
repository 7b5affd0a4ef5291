"""Names of objects and URLs of roots on object stores."""

from __future__ import annotations

from ckpt_engine.errors import StorageError
from ckpt_engine.observe.secrets import LOGIN


def checked(name: str) -> str:
    """`name`, if it is an object name.

    Raises:
        StorageError: a name that could leave the root or meet a temporary object.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(".tmp-") or "\0" in part for part in parts):
        raise StorageError(f"not an object name: {name!r}")
    return name


def split_url(url: str) -> tuple[str, str]:
    """The scheme and the path of a root, without slashes around it.

    Raises:
        StorageError: not the URL of a root. The message never shows a URL that carries credentials.
    """
    scheme, _, path = url.partition("://")
    scheme = scheme.lower()
    if LOGIN.match(path):
        raise StorageError(
            f"the {scheme}:// URL carries credentials", hint="give them in storage_options or the environment"
        )
    path = path.strip("/")
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise StorageError(f"not a storage root: {scheme}://{path}", hint="leave out '//', '.' and '..'")
    if "?" in path or "#" in path:
        raise StorageError(f"'?' and '#' have no meaning here: {scheme}://{path}", hint="remove them")
    return scheme, path
