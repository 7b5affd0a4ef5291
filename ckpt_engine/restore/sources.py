"""Several storages with the same data files as one source: what is missing or damaged in one comes from the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.errors import CkptError, CorruptError, FormatError, StorageMissingError
from ckpt_engine.store.decode import Decoder
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Repair:
    """Bytes that came from another place than the rest.

    Args:
        entry: the entry whose digest did not fit; None: the first place could not be read.
        file: data file.
        nbytes: how many.
        bad, good: URLs of the place that failed and of the one that served.
        why: what was wrong.
    """

    entry: str | None
    file: str
    nbytes: int
    bad: str
    good: str
    why: str

    def __str__(self) -> str:
        what = f"{self.entry!r} ({self.nbytes} bytes)" if self.entry else f"{self.nbytes} bytes of {self.file}"
        return f"{what} came from {self.good}, because of {self.bad}: {self.why}"


class Sources:
    """Storages with the same objects, the preferred one first. Thread safe.

    `repairs` tells what others than the first had to serve.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = list(storages)
        self.repairs: list[Repair] = []
        self._dead: set[int] = set()

    @property
    def threads(self) -> int:
        """How many requests at once suit the preferred storage."""
        return self._storages[0].capabilities.reads_at_once

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` from the first storage that can; one that fails otherwise than by what it has is not asked again.

        Raises:
            CkptError: that of the first storage, if none can.
        """
        first: CkptError | None = None
        for number, storage in enumerate(self._storages):
            if number in self._dead and number < len(self._storages) - 1:
                continue
            try:
                storage.get_into(name, start, out)
            except CkptError as err:
                first = first or _without_frames(err)
                if not isinstance(err, FormatError | StorageMissingError):
                    self._dead.add(number)
                continue
            if number and (first is not None or self._dead):
                why = first.message if first is not None else "it failed before"
                self.repairs.append(Repair(None, name, out.nbytes, self._storages[0].url, storage.url, why))
            return
        assert first is not None
        raise first

    def view(self, name: str, start: int, nbytes: int) -> memoryview | None:
        """The bytes where they are, to be verified and not changed; None where they have to be read."""
        view = self._storages[0].capabilities.view
        if view is None:
            return None
        try:
            return view(name, start, nbytes)
        except CkptError:
            return None  # reading says what is wrong

    def repair(self, entry: str, name: str, piece: Piece, out: memoryview) -> None:
        """Fill `out` with a piece whose bytes are not what was written.

        Raises:
            CorruptError: no other storage has it as it was written; names the entry.
        """
        what = f"bytes {piece.offset} to {piece.offset + piece.nbytes} of {name} do not match their digest"
        for storage in self._storages:
            direct = storage.capabilities.unshared or storage
            try:
                direct.get_into(name, piece.offset, out)
            except CkptError:
                continue  # it has nothing to offer here; what is wrong with the piece is said already
            if digest(out) == piece.digest:
                if storage is self._storages[0]:
                    return  # it was damaged on the way only
                self.repairs.append(Repair(entry, name, piece.nbytes, self._storages[0].url, storage.url, what))
                return
        raise CorruptError(f"{entry!r}: {what}")

    def decoder(self, manifest: Manifest) -> Decoder:
        """Decodes pieces of a snapshot that these storages have; what it has to read is verified and repaired."""

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            name = manifest.files[piece.file].name
            self.read(name, piece.offset, out)
            if digest(out) != piece.digest:
                self.repair(entry, name, piece, out)

        return Decoder(manifest, fetch)


def _without_frames(error: CkptError) -> CkptError:
    """The same error, whose chain of tracebacks does not keep buffers alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
