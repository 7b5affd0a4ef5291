"""Scripts whose resume was silently another run once, or might be: each is killed and started again."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from tests.exact.silent import libraries, optimizers, readers, streams, variables

SCRIPTS: dict[str, Callable[[], None]] = {
    name: script
    for module in (libraries, optimizers, readers, streams, variables)
    for name, script in vars(module).items()
    if inspect.isfunction(script) and script.__module__ == module.__name__ and not inspect.signature(script).parameters
    if not name.startswith("_")
}
"""All of them, by name."""
