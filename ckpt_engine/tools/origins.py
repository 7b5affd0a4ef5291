"""Which snapshots have written the bytes that a snapshot needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ckpt_engine.grouping import grouped
from ckpt_engine.observe import units
from ckpt_engine.store import names
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the stored bytes of a snapshot come from.

    Args:
        id: the snapshot.
        nbytes: of its state.
        stored_bytes: what is needed to read it, bases of deltas included.
        written_by: the same by the snapshot that wrote them, the oldest first.
    """

    id: str
    nbytes: int
    stored_bytes: int
    written_by: Mapping[str, int]

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Those of a snapshot."""
        found = grouped((owner_of(name), nbytes) for name, _, nbytes in _ranges(manifest))
        written_by = {owner: sum(sizes) for owner, sizes in sorted(found.items())}
        return cls(manifest.info.id, manifest.info.nbytes, sum(written_by.values()), written_by)

    def __str__(self) -> str:
        share = f", {units.share(self.stored_bytes / self.nbytes)} of its size" if self.nbytes else ""
        by = ", ".join(
            f"{units.size(nbytes)} by {'itself' if one == self.id else one}" for one, nbytes in self.written_by.items()
        )
        return f"{self.id} needs {units.size(self.stored_bytes)}{share}: {by or 'nothing was written'}"


def shared_bytes(a: Manifest, b: Manifest) -> int:
    """Stored bytes that both need: they lie there once."""
    return sum(nbytes for _, _, nbytes in _ranges(a) & _ranges(b))


def _ranges(manifest: Manifest) -> set[tuple[str, int, int]]:
    return {(manifest.files[piece.file].name, piece.offset, piece.nbytes) for _, piece in stored_pieces(manifest)}


def owner_of(name: str) -> str:
    """The snapshot that wrote a data file."""
    parsed = names.data_owner(name)
    assert parsed is not None  # the manifest was verified
    return parsed.id
