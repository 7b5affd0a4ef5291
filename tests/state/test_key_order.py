"""Keys come back in the order that they had at each snapshot: a cache or a queue in a dict depends on it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer

WAIT_SECONDS = 60.0


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("count", [3, 3000], ids=["few", "packed"])
def test_a_dict_whose_order_has_changed_is_restored_in_the_new_order(kind: Any, count: int, tmp_path: Path) -> None:
    """Names, values and tensors are the same as before, so that only their order tells the two apart."""
    keys = [f"key{number}" for number in range(count)]
    turned = [*keys[1:], keys[0]]

    def state(order: list[str]) -> dict[str, Any]:
        return {"tensors": kind((key, torch.ones(2)) for key in order), "values": kind.fromkeys(order, 1)}

    with Checkpointer(tmp_path, writer="thread", keep={"last": 3}) as ckpt:
        for step, order in enumerate((keys, turned, keys)):
            assert ckpt.save(state(order), step=step).wait(WAIT_SECONDS)
    for step, order in enumerate((keys, turned, keys)):
        found = Checkpointer(tmp_path, writer="thread").load(step)
        assert found is not None and list(found["tensors"]) == list(found["values"]) == order, step
