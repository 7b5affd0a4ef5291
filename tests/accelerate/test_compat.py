"""Every undocumented name of Accelerate in use is there and means what it did; a failure names the feature at risk."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import accelerate_ckpt
from accelerate_ckpt import private
from accelerate_ckpt.private import ACCELERATE_NAMES, AcceleratorInternals
from ckpt_engine.data.private_names import PrivateName, lacking
from ckpt_engine.errors import CkptError
from tests.accelerate.runs import make_accelerator
from tests.loop.runs import Average, Case, Net
from tests.support import interpreters

PACKAGE = Path(accelerate_ckpt.__file__).parent


@pytest.fixture
def accelerator() -> Accelerator:
    return make_accelerator(Case())


@pytest.mark.parametrize("entry", ACCELERATE_NAMES, ids=lambda e: f"{e.owner}.{e.name}")
def test_a_private_name_is_still_there(entry: PrivateName, accelerator: Accelerator) -> None:
    """Upstream has not renamed it."""
    missing = lacking([entry], AcceleratorInternals(accelerator).owners())
    why = f"Accelerate {private.ACCELERATE_VERSION} lacks {entry.owner}.{entry.name}: {entry.used_for} fails"
    assert entry not in missing, why


def test_a_missing_name_is_one_clear_error(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which feature needs what, and what to do."""
    monkeypatch.setattr(private, "ACCELERATE_NAMES", (PrivateName("shard", "_no_such_thing", "the data position"),))
    with pytest.raises(CkptError, match=r"lacks names .*shard\._no_such_thing \(for the data position\)"):
        AcceleratorInternals(accelerator).probe()


def test_the_lists_hold_what_was_prepared(accelerator: Accelerator) -> None:
    """`prepare` and `register_for_checkpointing` still fill the lists that a snapshot is made of."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader: DataLoader[Any] = DataLoader([0.0, 1.0])  # type: ignore[arg-type]
    prepared = accelerator.prepare(model, optimizer, schedule, loader)
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    internals = AcceleratorInternals(accelerator)
    assert internals.models() == [prepared[0]]
    assert internals.named_objects() == {
        "optimizer": prepared[1],
        "scheduler": prepared[2],
        "custom_checkpoint_0": average,
    }
    assert [source.outer for source in internals.sources().values()] == [prepared[3]]
    assert internals.count() == 5


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_prepared_loader_is_one_batch_ahead(dispatch: bool) -> None:
    """It fetches the next batch before it gives one, so that it knows the last; positions are recorded for that."""

    class Source(torch.utils.data.IterableDataset[Any]):
        fetched = 0

        def __iter__(self) -> Iterator[Any]:
            for number in range(4):
                self.fetched += 1
                yield torch.tensor(float(number))

    accelerator = make_accelerator(Case(extra={"dispatch_batches": dispatch}))
    source = Source()
    iterator = iter(accelerator.prepare(DataLoader(source)))
    ahead = []
    for given in range(1, 4):
        next(iterator)
        ahead.append(source.fetched - given)
    assert ahead == [private.LOOKAHEAD] * 3


def test_accumulation_is_counted_where_we_restore_it(accelerator: Accelerator) -> None:
    """`accelerator.step` decides which batch ends an accumulation."""
    accelerator.gradient_accumulation_steps = 3
    AcceleratorInternals(accelerator).step = 1
    ends = []
    for _ in range(4):
        with accelerator.accumulate():
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, False, False]


def test_nothing_else_touches_private_names_of_accelerate() -> None:
    """Outside of the two files for them no attribute with a leading underscore is used on anything but our objects."""
    known = {entry.name for entry in ACCELERATE_NAMES if entry.name.startswith("_")}
    offenders = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in PACKAGE.glob("*.py")
        if path.name not in ("private.py", "private_trainer.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (node.attr in known - {"_models"} or (node.attr == "_models" and ast.unparse(node.value) != "self"))
    ]
    assert offenders == []


def test_accelerate_alone_is_enough() -> None:
    """Where transformers is not installed, and where it is it is not imported."""
    code = "import sys; sys.modules['transformers'] = None; import accelerate_ckpt; accelerate_ckpt.AdaptiveCheckpoint"
    interpreters.run([sys.executable, "-W", "ignore", "-c", code], check=True, without_ours=True)
