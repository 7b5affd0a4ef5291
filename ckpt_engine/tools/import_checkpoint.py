"""Saves a checkpoint of another program as a snapshot of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_engine.config import Config, Tier, load_config
from ckpt_engine.errors import CkptError, MismatchError
from ckpt_engine.observe.units import count
from ckpt_engine.store.manifest import SnapshotInfo

if TYPE_CHECKING:
    from ckpt_engine.interop.imported import Imported

SAVE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What was, or would be, imported. `snapshot` is None if nothing was written."""

    source: str
    form: str
    root: str
    step: int
    epoch: int | None
    arrays: int
    nbytes: int
    snapshot: str | None = None
    notes: tuple[str, ...] = ()


def config_of(tier: Tier, there: int) -> Config:
    """The nearest tier, and retention that removes nothing: that is the run's business."""
    nearest = tier.model_dump(mode="json", exclude_unset=True, exclude={"keep"})
    return load_config(
        {"tiers": [nearest], "keep": {"last": there + 1}, "writer": "thread", "slots": 1, "on_error": "raise"}
    )


def plan_import(
    found: Imported, source: Path, root: str, step: int | None, there: Sequence[SnapshotInfo]
) -> ImportResult:
    """What will be written.

    Raises:
        UnstorableLeafError: a leaf cannot be stored; names it.
        MismatchError: the step is not known.
    """
    from ckpt_engine.state.flatten import Flattener  # torch

    chosen = found.step if step is None else step
    if chosen is None:
        raise MismatchError(f"{source} does not say at which step it was saved", hint="give it with --step")
    arrays = []
    for key, node in found.state.items():
        arrays += Flattener().scan(node, (key,)).arrays
        Flattener().describe(node, (key,))
    about_run = [
        f"the run has {count(len(there), 'snapshot')}, the newest of step {newest.step}: "
        f"it resumes from step {chosen} now"
        for newest in there[-1:]
    ]
    return ImportResult(
        source=str(source.absolute()),
        form=found.form,
        root=root,
        step=chosen,
        epoch=found.epoch,
        arrays=len(arrays),
        nbytes=sum(array.numel() * array.element_size() for array in arrays),
        notes=(*found.notes, *about_run),
    )


def save_import(found: Imported, planned: ImportResult, config: Config) -> str:
    from ckpt_engine.checkpointer import Checkpointer  # torch

    notes: Mapping[str, Any] = {
        "trainer": found.form,
        "imported": {"from": planned.source, "as": found.form, "notes": list(found.notes)},
        **found.about,
    }
    with Checkpointer(config) as checkpointer:
        handle = checkpointer.save(found.state, step=planned.step, epoch=planned.epoch, reason="import", notes=notes)
        try:
            return handle.wait(SAVE_SECONDS)
        except CkptError as err:
            # The cause is what helps; the wrapper speaks of the background.
            raise err.__cause__ if isinstance(err.__cause__, CkptError) else err from None
