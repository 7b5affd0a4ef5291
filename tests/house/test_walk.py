"""A save and a load go through no more files, functions and calls than they did: counts, not times."""

from __future__ import annotations

import json
import sys

from tests.house.walk import ROOT
from tests.support import interpreters

MOST = {
    "durable": {"files": 45, "functions": 345, "calls": 510},
    "save": {"files": 45, "functions": 372, "calls": 603},
    "load": {"files": 31, "functions": 206, "calls": 340},
    "share": {"files": 48, "functions": 490, "calls": 4800},
}
"""These may only become smaller. They have room for what threads add on a busy machine: four functions."""


def test_there_are_no_more_calls() -> None:
    """`python -m tests.house.walk --all` lists them, the most frequent first."""
    command = [sys.executable, "-m", "tests.house.walk"]
    done = interpreters.run(command, capture_output=True, text=True, check=True, cwd=ROOT, without_ours=True)
    found = json.loads(done.stdout)
    more = {what: {name: n for name, n in found[what].items() if n > MOST[what][name]} for what in MOST}
    assert more == {what: {} for what in MOST}
