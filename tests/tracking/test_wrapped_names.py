"""A run resumes with and without what wraps its model or a module of it: snapshots have the names below the wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError
from ckpt_engine.state import module_names
from ckpt_engine.state.module_names import canonical, stored_name
from tests.tracking.changes import End, Objects, Setup, Trainer, by_hand
from tests.tracking.runs import only, report, resume_only, saved
from tests.tracking.test_resume_changes import TRAINERS

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile
AT = 4
Wrap = Callable[[nn.Module], nn.Module]


def _submodule(model: nn.Module) -> nn.Module:
    model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    model.body[0] = checkpoint_wrapper(model.body[0])  # type: ignore[index, operator]
    return model


def _checkpointed_and_compiled(model: nn.Module) -> nn.Module:
    return _submodule(_checkpointed(model))


WRAPS: Mapping[str, Wrap] = {
    "plain": lambda model: model,
    "whole": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "submodule": _submodule,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": fully_shard,  # type: ignore[dict-item]
    "checkpointed": _checkpointed,
    "both": _checkpointed_and_compiled,
}


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the next objects of a script with this wrapper."""
    original, chosen = Objects.of.__func__, ["plain"]  # type: ignore[attr-defined]

    def of(kind: Any, setup: Setup) -> Objects:
        made: Objects = original(kind, setup)
        made.model = WRAPS[chosen[0]](made.model)
        return made

    monkeypatch.setattr(Objects, "of", classmethod(of))
    return lambda kind: chosen.__setitem__(0, kind)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def resumed(trainer: Trainer, folder: Path, setup: Setup) -> End:
    return trainer.train(setup, resume_only(folder), 11)


def first_part(trainer: Trainer, setup: Setup, root: Path, target: Path) -> Path:
    from tests.tracking.runs import every_boundary

    trainer.train(setup, every_boundary(root), 0)
    return only(root, next(one for one in saved(root) if one.step == AT), target)


def values(end: End) -> Any:
    return end[0]


@pytest.mark.parametrize("now", ["whole", "submodule", "plain", "both"])
@pytest.mark.parametrize("before", ["plain", "whole", "submodule", "checkpointed"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_resumes_with_another_wrapper(
    trainer: str, before: str, now: str, tmp_path: Path, wrapped: Callable[[str], None]
) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    if trainer == "lightning" and "whole" in (before, now):
        pytest.skip("Lightning takes it off")
    assert_resumes(TRAINERS[trainer], before, now, tmp_path, wrapped)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("before", "now"), list(itertools.permutations(["plain", "whole", "ddp", "fsdp2"], 2)))
def test_a_run_resumes_with_another_wrapper_of_ranks(
    before: str, now: str, tmp_path: Path, wrapped: Callable[[str], None]
) -> None:
    """Of one process, so that each wrapper computes the same."""
    assert_resumes(TRAINERS["plain"], before, now, tmp_path, wrapped)


@pytest.mark.parametrize("before", ["whole", "submodule", "checkpointed"])
@pytest.mark.parametrize("now", ["plain", "whole", "both"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_snapshot_with_the_names_of_wrappers_is_read(
    trainer: str,
    before: str,
    now: str,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As earlier versions have written them."""
    with monkeypatch.context() as earlier:
        earlier.setattr(module_names, "_attributes", lambda _: ())
        wrapped(before)
        folder = first_part(TRAINERS[trainer], Setup(), tmp_path / "run", tmp_path / "1")
    assert_resumes(TRAINERS[trainer], "", now, tmp_path, wrapped)


def assert_resumes(
    trainer: Trainer, before: str, now: str, tmp_path: Path, wrapped: Callable[[str], None]
) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    setup, folder = Setup(), tmp_path / "1"
    if before:
        wrapped(before)
        first_part(trainer, setup, tmp_path / "run", folder)
    wrapped(now)
    expected = by_hand(trainer, setup)
    end = resumed(trainer, folder, setup)
    assert end[0] == expected[0][AT:]
    assert end[1] == expected[1]
    told = report(folder)
    assert not told.not_restored
    assert told.replay is None or told.replay.result == "exact"
