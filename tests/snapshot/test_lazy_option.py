"""The option `lazy: off` holds for every way to take a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.state import entries


@pytest.mark.parametrize(("option", "expected"), [("auto", {"w"}), ("off", set())])
def test_what_a_script_calls_lazy_is_asked_only_where_the_option_allows_it(
    option: Any, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tensors on a GPU are copied while training continues; here those of the host stand for them."""
    monkeypatch.setattr(entries, "LAZY_ON", "cpu")
    asked: set[str] = set()

    def lazy(path: tuple[Any, ...]) -> bool:
        asked.add(path[0])
        return False

    with Checkpointer(str(tmp_path / "run"), writer="thread", lazy=option) as ckpt:
        ckpt.prepare({"w": torch.ones(4)}, lazy=lazy)
        ckpt.save({"w": torch.ones(5)}, step=1, lazy=lazy).wait(60)
    assert asked == expected
