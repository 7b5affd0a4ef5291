"""A named pipe, a link or a sparse file in place of any file of a run: nothing hangs, what goes wrong has a code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import CkptError
from ckpt_engine.store import names as layout
from ckpt_engine.store import pins
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage

Ckpt = Callable[..., Any]
VERBS = ("ls", "show", "status", "pin", "compact", "prune --keep last=9")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 << 30)


def _link(path: Path) -> None:
    outside = path.with_name("moved")
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


STRANGE: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "sparse": _sparse, "link": _link}


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


KINDS = ("record", "lease", "status", "catalog", "rollback", "manifest", "data", "pin", "part")
QUICK = {*((kind, "pipe") for kind in KINDS if kind != "catalog"), ("lease", "sparse"), ("manifest", "link")}
CASES = [
    pytest.param(kind, strange, marks=() if (kind, strange) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for strange in STRANGE
]


@pytest.mark.cells(3)
@pytest.mark.parametrize(("kind", "strange"), CASES)
def test_nothing_hangs_and_what_goes_wrong_has_a_code(kind: str, strange: str, tmp_path: Path, ckpt: Ckpt) -> None:
    """Each verb, a load and a training; the older snapshot is what is loaded where the newer one is hit."""
    options: dict[str, Any] = {"keep": {"last": 9}, "writer": "thread"}
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step=step).wait(60)
    repository = Repository(LocalStorage(tmp_path))
    newest = repository.ids()[-1].id
    pins.pin(repository, newest)
    (name,) = repository.files_of(newest)
    names = {"manifest": layout.manifest_name(newest), "data": name, "pin": layout.pin_name(newest)}
    names |= {"part": layout.part_name(newest, 1), "record": layout.RECORD}
    path = tmp_path / names.get(kind, f"{kind}.json")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    STRANGE[strange](path)

    verified = ckpt("verify", tmp_path)
    assert (verified.code, path.name in verified.out) == (1, True)
    for verb in VERBS:
        first, *rest = verb.split()
        result = ckpt(first, tmp_path, *rest)
        assert result.code in (0, 1, 2)
        assert "Traceback" not in result.err
    try:
        with Checkpointer(tmp_path, **options) as checkpointer:
            loaded = checkpointer.load()
            assert loaded is not None
            step = loaded["step"]
            assert step == (1 if kind in ("manifest", "data") else 2)
            assert torch.equal(loaded["w"], state(step)["w"])
            checkpointer.save(state(3), step=3).wait(60)
    except CkptError as err:
        assert kind in ("lease", "rollback"), err
        assert str(path) in str(err)
