"""A save and a load go through no more files, functions and calls than they did: counts, not times."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.house.walk import ROOT

MOST = {
    "save": {"files": 46, "functions": 370, "calls": 605},
    "load": {"files": 33, "functions": 216, "calls": 360},
    "share": {"files": 50, "functions": 500, "calls": 5000},
}
"""These may only become smaller. What threads add now and then is in them."""


def test_there_are_no_more_calls() -> None:
    """`python -m tests.house.walk --all` lists them, the most frequent first."""
    command = [sys.executable, "-m", "tests.house.walk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    more = {what: {name: n for name, n in found[what].items() if n > MOST[what][name]} for what in MOST}
    assert more == {what: {} for what in MOST}
