"""Three ranks of DDP put a saved order of sums in force all together, or not at all: gradients are never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CASES = {
    "plain": "",
    "unused": "",
    "first": "",
    "hook": "the parameters have hooks (rank 0)",
    "unwrapped": "DistributedDataParallel is around fewer tracked models than it was (rank 0)",
    "one unwrapped": "",
    "second later": "",
    "second unwrapped": "DistributedDataParallel is around fewer tracked models than it was (rank 0)",
    "unknown": "the snapshot does not have the order: DDP did not know it yet (rank 0)",
    "ahead": "the ranks are at other places of the script",
}
"""Why nothing is done, by what `order_of_sums` tries."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has seen of each case."""
    folder, launcher = tmp_path_factory.mktemp("order"), Launcher("tests.ranks.sharded.order_of_sums")
    job = {"trace": str(folder / "trace"), "cases": list(CASES)}
    launcher.start(job, 3, folder / "log")
    statuses = launcher.join()
    launcher.close()
    assert statuses == [0, 0, 0], "".join(path.read_text() for path in folder.glob("log*"))
    return [json.loads(Path(f"{folder / 'trace'}.{rank}").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_their_step(case: str, found: list[dict[str, Any]]) -> None:
    """Gradients are those of their step although the ranks differ, and all ranks give the same reason."""
    for rank in found:
        assert rank[case]["why"] == CASES[case]
        assert rank[case]["later"] is (case in ("one unwrapped", "second later"))
        for step, gradient in enumerate(rank[case]["gradients"]):
            assert gradient == pytest.approx([2.0 * 10**step] * 3)


def test_the_order_is_in_force_where_all_ranks_can(found: list[dict[str, Any]]) -> None:
    """The reducer has it at once."""
    assert {rank["plain"]["rebuilt"] for rank in found} == {"3 2 1 0"}
