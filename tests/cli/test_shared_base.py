"""Many fine-tunes of one base on one disk: each fork takes the bytes of its adapter, and outlives all others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer

FORKS, ADAPTER = 8, 20_000
"""How many there are; the numbers of an adapter."""


def _state(base: torch.Tensor, fork: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * fork + step)
    return {"base": base, "adapter": torch.randn(ADAPTER, generator=generator)}


def _bytes_on_disk(root: Path) -> int:
    """Of all files below a folder, each once."""
    files = {(found.st_dev, found.st_ino): found.st_size for found in (one.stat() for one in _files(root))}
    return sum(files.values())


def _files(root: Path) -> list[Path]:
    return sorted(one for one in root.rglob("*") if one.is_file())


def _assert_whole(root: Path, base: torch.Tensor, fork: int) -> None:
    found = Checkpointer(root, writer="thread").load()
    expected = _state(base, fork, 2 if fork else 1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("megabytes", "kills"), [(20, 3), pytest.param(400, 25, marks=pytest.mark.slow)], ids=["small", "large"]
)
def test_forks_share_the_base(ckpt: Callable[..., Any], tmp_path: Path, megabytes: int, kills: int) -> None:
    """A removal that is killed after any of its files hits no byte of another run; the first one goes first."""
    base, roots = torch.rand(megabytes * 250_000), [tmp_path / f"run{n}" for n in range(FORKS + 1)]
    with Checkpointer(roots[0], writer="thread") as run:
        run.save(_state(base, 0, 1), step=1)
    for number, root in enumerate(roots[1:], 1):
        assert ckpt("fork", f"{roots[0]}#1", root).code == 0
        with Checkpointer(root, writer="thread") as run:
            found = run.load()
            run.save({**found, "adapter": _state(base, number, 2)["adapter"]}, step=2)
    assert _bytes_on_disk(tmp_path) <= 1.05 * (base.nbytes + (2 * FORKS + 1) * 4 * ADAPTER)
    draws = random.Random(3)
    for number, root in enumerate(roots):
        files = draws.sample(_files(root), len(_files(root)))
        left = [(n, one) for n, one in enumerate(roots) if n > number]
        size = -(-len(files) // kills)
        for at in range(0, len(files), size):
            for file in files[at : at + size]:
                file.unlink()
            for n, one in draws.sample(left, min(2, len(left))):
                _assert_whole(one, base, n)
