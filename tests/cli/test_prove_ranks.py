"""`ckpt verify-resume` and `ckpt prove` start a command of several ranks as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.rehearsed import ranks_loop

Ckpt = Callable[..., Any]
UNTIL = 7
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(root: Path, fault: int = 0) -> list[str]:
    """As a user gives it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return [*launcher, ranks_loop.__file__, str(root), str(UNTIL), str(fault)]


def test_a_command_of_two_ranks_is_rehearsed(ckpt: Ckpt, tmp_path: Path) -> None:
    """Both ranks end after the step, and the steps of both are compared."""
    result = ckpt("verify-resume", "--steps", 6, "--timeout", 250, "--json", "--", *command(tmp_path / "run"))
    assert result.code == 0, result.out + result.err
    assert (result.json["exact"], result.json["replay"]["result"]) == (True, "exact")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", [0, 6])
def test_a_run_of_two_ranks_is_proved(ckpt: Ckpt, tmp_path: Path, fault: int) -> None:
    """Also where rank 1 alone has computed wrongly."""
    done = subprocess.run(command(tmp_path / "run", fault), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    result = ckpt("prove", f"{tmp_path / 'run'}#4", "--timeout", 250, "--json", "--", *command(tmp_path / "run", fault))
    assert result.code == bool(fault), result.out + result.err
    assert result.json["killed_after"] == 4
    if fault:
        assert (result.json["resumed"]["step"], result.json["resumed"]["area"]) == (fault, "tensor")
    else:
        assert result.json["replay"]["steps"] == UNTIL - 4
