"""Real models of all layouts on 1, 2 and 4 ranks: what any has saved any other loads, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher
from tests.ranks.sharded.models import LAYOUTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher("tests.ranks.sharded.matrix")
    yield launcher
    launcher.close()


def run(launcher: Launcher, folder: Path, size: int, **job: Any) -> list[Any]:
    """What the ranks found."""
    launcher.start({"root": str(folder), "out": str(folder / "out.json"), **job}, size, folder / "log", patience=900.0)
    statuses = launcher.join()
    log = "\n".join(file.read_text()[-3000:] for file in sorted(folder.glob("log.*")))
    assert statuses == [0] * size, log
    found: list[Any] = json.loads((folder / "out.json").read_text())
    return found


def test_every_layout_loads_every_other_on_any_number_of_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """{DDP, FSDP2, TP, HSDP, FSDP2+TP} on {1, 2, 4} ranks, weights and optimizer, after gathering: 225 cases."""
    found = run(launcher, tmp_path, 4, layouts=list(LAYOUTS), sizes=[1, 2, 4])
    assert len(found) == (len(LAYOUTS) * 3) ** 2
    assert [case for case in found if case[2]] == []


@pytest.mark.parametrize("layouts", [["fsdp2", "fsdp2+tp"], ["tp", "hsdp"]])
def test_states_by_name_are_read_into_another_layout(launcher: Launcher, tmp_path: Path, layouts: list[str]) -> None:
    """As docs/sharded.md says, with `into` and without."""
    job = {"root": str(tmp_path), "out": str(tmp_path / "out"), "layouts": layouts, "sizes": [4], "by_name": True}
    launcher.start(job, 4, tmp_path / "log", patience=240.0)
    assert launcher.join() == [0] * 4, "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("log.*"))
