"""Keeps client libraries away from Python's global random stream.

botocore, aiohttp and gcsfs draw retry jitter and shuffles from it, so that a dying server seen from inside the trainer
would change what training draws next. The writer is usually another process, but not always.
"""

from __future__ import annotations

import random
import sys

_PACKAGES = frozenset(
    {"aiobotocore", "aiohttp", "botocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "ocifs", "ossfs", "paramiko"}
)
_own = random.SystemRandom()


def shield() -> None:
    """Give the modules of these packages that are imported by now a random source of their own."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
