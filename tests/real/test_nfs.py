"""Real NFSv4.2, seen by two clients: the tests are those of `inside_nfs_*.py`, and run in a guest that has them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.real import nfs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
_SECONDS = 1500.0


def _passed_inside(folder: Path, chosen: str) -> int:
    """How many tests passed in the guest; none fails."""
    if why := nfs.missing():
        pytest.skip(why)
    arguments = ["-m", "pytest", "-s", "-x", "-m", "", "-p", "no:cacheprovider", "--timeout", "900", chosen]
    command = shlex.join([sys.executable, *arguments])
    ended = nfs.run(folder, command, seconds=_SECONDS, cwd=REPOSITORY, memory="3G")
    print(ended.output)
    assert ended.status == 0, ended.output
    return int(ended.output.rpartition(" passed")[0].split()[-1])


def test_the_storage_contract_holds_on_nfs(tmp_path: Path) -> None:
    """The whole suite on a mount; what one mount writes the other reads."""
    assert _passed_inside(tmp_path, "tests/real/inside_nfs_storage.py") > 30


def test_the_lease_holds_across_mounts(tmp_path: Path) -> None:
    """Who holds it on one mount is seen on the other, and its death too."""
    assert _passed_inside(tmp_path, "tests/real/inside_nfs_lease.py") == 4


def test_a_run_saved_on_one_mount_is_resumed_on_the_other(tmp_path: Path) -> None:
    """A trainer is killed with `kill -9`, and the run goes on elsewhere as if nothing had happened."""
    assert _passed_inside(tmp_path, "tests/real/inside_nfs_cycle.py") == 1
