"""A save and a load go through no more files, functions and calls than they did: counts, not times."""

from __future__ import annotations

import json
import sys

from tests.house.walk import ROOT
from tests.support import interpreters

MOST = {
    "durable": {"files": 41, "functions": 280, "calls": 410},
    "save": {"files": 47, "functions": 390, "calls": 600},
    "load": {"files": 25, "functions": 170, "calls": 278},
    "share": {"files": 49, "functions": 500, "calls": 4200},
}
"""These may only become smaller. They have room for what threads add on a busy machine: two functions."""


def test_there_are_no_more_calls() -> None:
    """`python -m tests.house.walk --all` lists them, the most frequent first."""
    command = [sys.executable, "-m", "tests.house.walk"]
    done = interpreters.run(command, capture_output=True, text=True, check=True, cwd=ROOT, without_ours=True)
    found = json.loads(done.stdout)
    more = {what: {name: n for name, n in found[what].items() if n > MOST[what][name]} for what in MOST}
    assert more == {what: {} for what in MOST}
