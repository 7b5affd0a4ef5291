"""One `ckpt` verb in a process of its own, which says when it begins: `python -m tests.copy.verb VERB ROOT`."""

from __future__ import annotations

import sys

from ckpt_engine.cli import compact, prune
from ckpt_engine.cli.main import main

_ARGUMENTS = {"compact": [], "prune": ["--keep", "last=1"]}

if __name__ == "__main__":
    assert compact and prune  # imported before it begins
    print("ready", flush=True)
    main([sys.argv[1], sys.argv[2], *_ARGUMENTS[sys.argv[1]]])
