"""Runs a script as `python` would, in a rehearsal.

`python -m ckpt_engine.cli.rehearsal SPEC script|module NAME ARGUMENTS...`
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from ckpt_engine.cli.rehearsal.patches import Rehearsal
from ckpt_engine.cli.rehearsal.runs import Spec


def main() -> None:
    """Set up this process as the script finds it in a plain run, and run it."""
    _, spec, kind, name, *arguments = sys.argv
    Rehearsal(Spec.read(Path(spec))).install()
    sys.argv = [name, *arguments]
    if kind == "module":
        sys.path[0] = os.getcwd()  # noqa: PTH109 - what `python -m` puts there
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
