"""Resumes a run with each optimizer of torch and of libraries: `python -m tests.state.optimizers.sweep [LIBRARY...]`.

A cell is an optimizer class with a learning rate schedule and parameters of one dtype. Its run is made once without us
and once tracked; then it is resumed from its middle under another seed. Losses, weights and the optimizer's state must
be those of the uninterrupted run, bit for bit, and the resume report names nothing. Otherwise the first snapshot must
be refused. Libraries that are not installed are left out.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_engine.errors import CkptError
from tests.state.optimizers.runs import EVERY, Case, plain_step, resumed, tracked, train
from tests.support.snapshots import saved

LIBRARIES = {
    "torch": "torch.optim",
    "pytorch-optimizer": "pytorch_optimizer",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "lion-pytorch": "lion_pytorch",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH = 64
"""Low-bit optimizers leave smaller parameters as they are."""
GOOD = ("exact", "refused", "untrainable")


@dataclass(frozen=True, slots=True)
class Cell:
    """One optimizer class with parameters of one dtype."""

    library: str
    name: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.library}.{self.name} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a cell.

    Args:
        verdict: "exact", "refused" (by name, at the first snapshot), "untrainable" (without us, too), else a defect.
        detail: of the verdict.
        false_lines: what the report of an exact resume named all the same.
    """

    cell: Cell
    verdict: str
    detail: str = ""
    false_lines: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD and not self.false_lines


def cells(libraries: Sequence[str]) -> Iterator[Cell]:
    """The cells of the installed libraries among these."""
    for library in libraries:
        try:
            module = importlib.import_module(LIBRARIES[library])
        except ImportError:
            continue
        base = torch.optim.Optimizer
        for name, found in sorted(vars(module).items()):
            if inspect.isclass(found) and issubclass(found, base) and found is not base:
                yield from (Cell(library, name, dtype) for dtype in DTYPES)


def made(cls: Any, model: nn.Module) -> Any:
    """An object of the class: how its arguments are called differs."""
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    inner = torch.optim.AdamW
    ways: list[Callable[[], Any]] = [
        lambda: cls(parameters, lr=1e-3, momentum=0.9),
        lambda: cls(parameters, lr=1e-3),
        lambda: cls(parameters),
        lambda: cls(model, lr=1e-3),
        lambda: cls(parameters, base_optimizer=inner, lr=1e-3),
        lambda: cls(model, base_optimizer=inner, lr=1e-3),
        lambda: cls(inner(parameters, lr=1e-3)),
        lambda: cls(inner, parameters),
        lambda: cls(parameters, inner, lr=1e-3),
        lambda: cls(model, inner(parameters, lr=1e-3)),
        lambda: cls(parameters, num_data=16),
        lambda: cls(parameters, num_iterations=100),
        lambda: cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]),
        lambda: cls(matrices, lr=1e-3),
    ]
    problems = []
    for way in ways:
        try:
            return way()
        except Exception as err:  # noqa: BLE001 - classes of others
            problems.append(err)
    raise problems[0]


SECOND_ORDER = frozenset({"AdaHessian", "SophiaH"})
WITH_CLOSURE = frozenset(
    {
        *("LBFGS", "AliG", "BSAM", "SAM", "GSAM", "WSAM", "FriendlySAM", "LookSAM"),
        *("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"),
    }
)


def _closure_step(optimizer: Any, closure: Callable[[], torch.Tensor]) -> Any:
    return optimizer.step(torch.enable_grad()(closure))


def case_of(cell: Cell) -> Case:
    """The run of a cell."""
    cls = getattr(importlib.import_module(LIBRARIES[cell.library]), cell.name)
    return Case(
        lambda model: made(cls, model),
        dtype=DTYPES[cell.dtype],
        width=WIDTH,
        step=_closure_step if cell.name in WITH_CLOSURE else plain_step,
        second_order=cell.name in SECOND_ORDER,
    )


def run(cell: Cell, folder: Path) -> Result:
    """The cell's verdict."""
    case = case_of(cell)
    try:
        wanted = train(case, None)
        if (again := train(case, None)) != wanted:
            return Result(cell, "untrainable", f"it differs from run to run: {again == wanted}")
    except Exception as err:  # noqa: BLE001 - of others
        return Result(cell, "untrainable", f"{type(err).__name__}: {str(err)[:200]}")
    try:
        watched = tracked(case, folder)
        if (watched.losses, watched.end) != (wanted.losses, wanted.end):
            return Result(cell, "tracking changes it")
    except CkptError as err:
        return Result(cell, "refused late" if saved(folder / "run") else "refused", str(err)[:300])
    except Exception as err:  # noqa: BLE001 - a defect of ours
        return Result(cell, "crash", _where(err))
    try:
        found, lines, _ = resumed(case, folder)
    except CkptError as err:
        return Result(cell, "refused at resume", str(err)[:300])
    except Exception as err:  # noqa: BLE001 - a defect of ours
        return Result(cell, "crash at resume", _where(err))
    if (found.losses, found.end) != (wanted.losses[EVERY:], wanted.end):
        parts = [name for name in found.end if found.end[name] != wanted.end[name]]
        return Result(cell, "declared" if lines else "SILENT", f"{parts} {lines}")
    return Result(cell, "exact", "", tuple(lines))


def _where(err: BaseException) -> str:
    frames = reversed(traceback.extract_tb(err.__traceback__)[-3:])
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return f"{type(err).__name__}: {str(err)[:200]} at {places}"


def main(libraries: Sequence[str]) -> int:
    """Runs the cells and prints what became of them; 1 where one is a defect."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[Result] = []
    for cell in cells(libraries or list(LIBRARIES)):
        folder = Path(tempfile.mkdtemp(prefix="ckpt-optimizers-"))
        began = time.perf_counter()
        try:
            result = run(cell, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found.append(result)
        seconds, lines = time.perf_counter() - began, " | ".join(result.false_lines)
        print(f"{seconds:5.1f} s  {cell}: {result.verdict} {result.detail} {lines}", flush=True)
    print(Counter(one.verdict for one in found), f"false lines: {sum(bool(one.false_lines) for one in found)}")
    return int(not all(one.is_good for one in found))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.exit(main(sys.argv[1:]))
