"""Choose what to resume from: the newest snapshot whose manifest is whole and whose data is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, FormatError, NoUsableSnapshotError, ResumeError, StorageMissingError
from ckpt_engine.store import layout
from ckpt_engine.store.manifest import Manifest, SnapshotInfo
from ckpt_engine.store.repository import Repository

Check = Callable[[Manifest], None]
"""Raises if a snapshot does not fit its user (for example a model with other keys); asked before data is read."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A snapshot that was not used, and why."""

    snapshot: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot whose manifest is whole and whose data files have their full size."""

    info: SnapshotInfo
    manifest: Manifest


def candidates(
    repository: Repository, rejected: list[Rejected], *, step: int | None = None, check: Check | None = None
) -> Iterator[Candidate]:
    """Usable snapshots, newest first; what is skipped is appended to `rejected`.

    Args:
        step: only snapshots of this step.

    Raises:
        CkptError: whatever `check` raises, and a storage that cannot be read at all.
    """
    sizes: dict[str, int] | None = None
    for parsed in reversed(repository.ids()):
        if step is not None and parsed.step != step:
            continue
        try:
            manifest = repository.read(parsed.id)
            if sizes is None:
                sizes = {o.name: o.nbytes for o in repository.storage.list(layout.DATA)}
            _require_files(manifest, sizes)
        except (FormatError, StorageMissingError) as err:
            reject(rejected, parsed.id, err)
            continue
        if check is not None:
            check(manifest)
        yield Candidate(manifest.info, manifest)


def reject(rejected: list[Rejected], snapshot: str, error: CkptError) -> None:
    """Note why a snapshot is not used."""
    rejected.append(Rejected(snapshot, error.code, error.message))


def _require_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    for file in manifest.files:
        found = sizes.get(file.name)
        if found is None:
            raise StorageMissingError(f"data file {file.name} is missing")
        if found != file.nbytes:
            raise FormatError(f"data file {file.name} has {found} bytes instead of {file.nbytes}")


def none_usable(url: str, rejected: Sequence[Rejected], step: int | None) -> ResumeError | None:
    """The error for "there are snapshots and none can be used", or None if there were none at all."""
    if rejected:
        lines = "\n".join(f"  {r.snapshot}: [{r.code}] {r.reason}" for r in rejected)
        return NoUsableSnapshotError(
            f"none of the {len(rejected)} snapshots in {url} is usable:\n{lines}\n",
            hint=f"look closer with `ckpt verify {url}`, or start anew in another folder",
        )
    if step is not None:
        return ResumeError(f"no snapshot of step {step} in {url}", hint=f"`ckpt ls {url}` shows what there is")
    return None
