"""The formats of others under one signature: what is refused, and what is written."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_engine.convert import accelerate_folder, dcp_folder, transformers_folder
from ckpt_engine.convert.parts import recognise
from ckpt_engine.errors import CkptError, MismatchError
from ckpt_engine.store.manifest import SnapshotInfo

Check = Callable[[Any, SnapshotInfo], None]
"""Raises MismatchError if a state cannot become this format; the tensors' values do not matter."""
Writer = Callable[[Any, SnapshotInfo, Path], tuple[str, ...]]
"""Writes a state into an empty folder; returns notes."""


_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, pickle.PicklingError)
"""What the writers of others raise for values that they do not take."""


@contextmanager
def fitting(form: str, snapshot: str) -> Iterator[None]:
    """Runs a check or a writer; what it cannot take is said in our words.

    Raises:
        MismatchError: a state that can be stored need not be one that others can store.
    """
    try:
        yield
    except CkptError:
        raise
    except _MISFITS as err:
        raise MismatchError(
            f"the state of {snapshot} cannot become {form}: {type(err).__name__}: {err}",
            hint="--to safetensors exports its tensors",
        ) from err


def _check_dcp(state: Any, info: SnapshotInfo) -> None:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MismatchError(f"the state of {info.id} is no dict with text keys, as dcp needs it", hint="--to torch")


def _check_accelerate(state: Any, info: SnapshotInfo) -> None:
    accelerate_folder.require(recognise(state), info.id)


def _check_transformers(state: Any, info: SnapshotInfo) -> None:
    transformers_folder.require(recognise(state), info.id)


def _write_dcp(state: Any, _: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    return dcp_folder.write(state, folder)


def _write_accelerate(state: Any, info: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    return accelerate_folder.write(recognise(state), info.step, folder)


def _write_transformers(state: Any, _: SnapshotInfo, folder: Path) -> tuple[str, ...]:
    return transformers_folder.write(recognise(state), folder)


CHECKS: dict[str, Check] = {
    "dcp": _check_dcp,
    "accelerate": _check_accelerate,
    "transformers": _check_transformers,
}
WRITERS: dict[str, Writer] = {
    "dcp": _write_dcp,
    "accelerate": _write_accelerate,
    "transformers": _write_transformers,
}
