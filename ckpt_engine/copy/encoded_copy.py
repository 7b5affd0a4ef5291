"""Stores a planned snapshot at a place in the codec of that place.

It works in parts of bounded size: while one part is sent the next one is encoded. The name of a part follows from what
it holds, so that an interrupted copy finds what it has sent, and a part that another snapshot needs is never written
over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, eq

from ckpt_engine.copy import write_plan
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.encode_pieces import DELTA, Encoder, Files, Pick, in_rows
from ckpt_engine.copy.sharing_bounds import SharingBounds
from ckpt_engine.copy.transfer import Copied, CopySourceError, has_file, settle_data
from ckpt_engine.copy.write_plan import (
    REACH,
    ROWS,
    Bases,
    WritePlan,
    decide_sound,
    older_than,
    paired,
    plan,
    plan_alone,
)
from ckpt_engine.copy.write_snapshot import CutLayout, RawContents, Staged
from ckpt_engine.errors import FormatError, StorageMissingError, WriterError
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import Decoder, decoder_of
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.watchdog import CallProgress, GuardedReader

ROW_SAMPLES = 4
"""Rows of an entry that are looked at first."""
GLANCES, GLANCE_BYTES = 8, 64
"""So many places of a piece, and bytes at each of them, are compared with those of earlier images."""
GLANCE_PAGE_BYTES = 4096
"""These places are at least so far apart."""
Glances = Mapping[tuple[str, int], tuple[int, tuple[bytes, ...]]]
"""Of an image, by entry and number of the piece: the size of the piece, and its bytes at a few places."""


def put_encoded(
    source: Repository, target: Repository, manifest: Manifest, pick: Pick, tally: EncodeStats
) -> tuple[Manifest, Copied]:
    """Store the data of a snapshot, encoded; every piece is compared with its digest first. See `transfer.Put`.

    What some of several ranks have refers to nothing at the target: of its arrays that has other slices.

    Args:
        pick: the codec of each dtype; a piece that it does not pay for is stored as it is.
        tally: takes what it took.

    Raises:
        CopySourceError: what is copied cannot be read.
        StorageError: from the target.
    """
    if manifest.info.partial is None:
        dtypes = {entry.dtype for entry in manifest.entries.values() if entry.pieces}
        planned, rank = plan(manifest, target, DELTA in map(pick, dtypes), target.storage.get_into), 0
    else:
        planned, rank = plan_alone(manifest), manifest.info.partial.ranks[0]
    files = Files(manifest, planned, rank)
    bases = Bases(manifest, source, older_at(target, planned.before))
    encoder = Encoder(manifest, planned, decoder_of(source.storage.get_into, manifest), bases, pick)
    sent = present = 0
    for file, blocks, done in files.encoded(encoder):
        for one in done:
            tally.add(one)
        if has_file(target.storage, file):
            present += file.nbytes
        else:
            began = time.monotonic()
            target.storage.put(file.name, blocks)
            tally.put_seconds += time.monotonic() - began
            tally.put_bytes += file.nbytes
            sent += file.nbytes
        blocks.clear()
    if present:
        settle_data(target.storage)
    return files.manifest(), Copied(sent, present)


def older_at(target: Repository, before: Manifest) -> Decoder | None:
    """Reads an older snapshot, where that is cheap."""
    return decoder_of(target.storage.get_into, before) if target.storage.capabilities.cheap_reads else None


class Encoded(RawContents):
    """A staged snapshot as it was planned: data files of encoded pieces.

    With a codec at most two parts of the image (`SharingBounds.part_bytes`) are in memory beside it, and each piece is
    compared with its digest when it is encoded. Without one all is encoded at once, which is only changed rows.

    Args:
        source: manifest of the image.
        codec: a codec's name, `DELTA`, or `ROWS`.
        there: reads the older snapshot, where that is cheap.
        cpu_seconds: what planning has cost.

    Raises:
        WriterError: the image cannot be read.
    """

    def __init__(
        self,
        staged: Staged,
        repository: Repository,
        source: Manifest,
        planned: WritePlan,
        codec: str,
        there: Decoder | None,
        cpu_seconds: float,
    ) -> None:
        super().__init__(staged, repository)
        self.cpu_seconds = cpu_seconds
        self._codec = codec
        self._there = there
        self._source = source
        self._files = Files(source, planned, staged.job.rank)
        self._ready: list[tuple[DataFile, list[memoryview]]] | None = None
        if planned.bounds.part_bytes is not None:
            self.new_bytes = max(staged.nbytes, planned.most_bytes(manifest_codec.encode(self._source)))
            return
        with staged.slot.image(staged.nbytes) as image:
            self._ready = list(self._encoded(image, None))
        self.new_bytes = sum(file.nbytes for file, _ in self._ready)

    def manifest(self) -> Manifest:
        """As it will be, or that of the image; then `new_bytes` counts what encoding adds."""
        return self._source if self._ready is None else self._files.manifest()

    def put(self, image: memoryview, progress: CallProgress) -> Manifest:
        began, put_bytes = time.monotonic(), 0
        ready, self._ready = self._ready, None
        for file, blocks in ready if ready is not None else self._encoded(image, progress):
            self.new.append(file.name)
            self.repository.storage.put(file.name, blocks)
            put_bytes += file.nbytes
            blocks.clear()
        self.new_bytes = put_bytes
        self.write_seconds = time.monotonic() - began
        return self._files.manifest()

    def stands(self) -> bool:
        keepers, old = self._files.plan.keepers, self._files.old_files()
        refers = bool(old) or not self._files.new  # until it is stored it may yet refer to anything there
        return not keepers or not refers or self.repository.still_has(keepers, old)

    def _encoded(self, image: memoryview, progress: CallProgress | None) -> Iterator[tuple[DataFile, list[memoryview]]]:
        def view(entry: str, piece: Piece) -> memoryview:
            part = image[piece.offset : piece.offset + piece.nbytes]
            if progress is not None:
                progress.check()
                progress.moved()  # encoding is no storage call, and may take its time
                if digest(part) != piece.digest:
                    raise WriterError(
                        f"{entry!r} has changed in its arena slot while it was encoded; it is not written"
                    )
            return part

        def fetch(entry: str, piece: Piece, out: memoryview) -> None:
            out[:] = view(entry, piece)

        bases = Bases(self._source, None, self._there)
        decoder = Decoder(self._source, fetch)
        encoder = Encoder(self._source, self._files.plan, decoder, bases, lambda _: self._codec, view)
        try:
            for file, blocks, done in self._files.encoded(encoder):
                self.cpu_seconds += sum(one.seconds for one in done)
                yield file, blocks
        except CopySourceError as err:
            raise err.error from err


def encoded(
    staged: Staged, repository: Repository, codec: str, make_plan: Callable[[Manifest], WritePlan] | None = None
) -> Encoded:
    """A staged snapshot as a tier with a codec stores it.

    Args:
        make_plan: given the manifest of the image; None: as `write_plan.plan` does at the tier.

    Raises:
        WriterError: the image cannot be read.
        StorageError: what is there cannot be read.
    """
    digests, seconds = staged.timed_digest()
    source = staged.manifest(repository.run_id, digests)
    planned = (
        plan(source, repository, codec == DELTA, repository.storage.get_into)
        if make_plan is None
        else make_plan(source)
    )
    return Encoded(staged, repository, source, planned, codec, older_at(repository, planned.before), seconds)


class DedupBaseline:
    """What one repository is known to have already, by which the next snapshot of one writer is planned.

    The image is digested before it is written only where that is likely to spare writing: if it did for the snapshot
    before, or if some of its bytes are those of earlier images. Else digesting runs beside writing.

    Args:
        repository: that is written to.
        aside: reads what is there. None: this is one of several ranks. It knows what it has written itself and not what
            the others have, so nothing is read: whole pieces of its own share are spared from its second snapshot on.
    """

    def __init__(self, repository: Repository, aside: GuardedReader | None) -> None:
        self._repository = repository
        self._first_look = self._aside = aside
        self._rows_from = aside if repository.storage.capabilities.cheap_reads else None
        """Where reading older data back costs little; else only whole pieces are spared."""
        self._older: list[Manifest] = []
        self._seen: list[Glances] = []
        """Of the newest images that were looked at, the newest first."""
        self._expects = False

    def contents(self, staged: Staged) -> Encoded | None:
        """What the snapshot has to write; None: its whole image.

        Raises:
            WriterError: the image cannot be read.
            StorageError: what is there cannot be read, or that hangs; nothing has come of it.
        """
        bounds = write_plan.PLAIN
        if staged.cut_layout.nbytes < bounds.least_bytes:
            return None
        if self._first_look is not None:
            aside, self._first_look = self._first_look, None
            self._older = aside.read(lambda repository: list(older_than(math.inf, repository)))
        if not self._is_promising(staged):
            return None
        began = time.thread_time()
        digests, digest_seconds = staged.timed_digest()
        manifest = staged.manifest(self._repository.run_id, digests)
        with staged.slot.image(staged.nbytes) as image:
            planned = self._planned(manifest, partial(self._seems_in_few_rows, manifest, image), bounds)
        self._expects = planned.pays
        if not planned.pays or not self._repository.still_has(planned.keepers, planned.before.files):
            return None
        seconds = time.thread_time() - began + digest_seconds
        return Encoded(staged, self._repository, manifest, planned, ROWS, self._reader_of(planned.before), seconds)

    def plan_share(self, manifest: Manifest) -> WritePlan:
        """How the share of one of several ranks is stored encoded: it may refer to the share before.

        Without differences: the manifest of all ranks would not say what they are made against.

        Raises:
            StorageError: what is there cannot be found out.
        """
        return self._planned(manifest, lambda _: False, write_plan.ENCODED)

    def _planned(self, manifest: Manifest, differs: Callable[[str], bool], bounds: SharingBounds) -> WritePlan:
        older = [
            one
            for one in self._older
            # Who is one of several ranks does not know what others have removed.
            if (
                one.info.id in self._repository.alive
                if self._aside is not None
                else self._repository.still_has([one.info.id], one.files)
            )
        ]
        usable = {
            *map(attrgetter("name"), chain.from_iterable(map(attrgetter("files"), older)))
        } - self._repository.damage.files
        return decide_sound(manifest, older, usable, differs, bounds, self.read)

    def committed(self, manifest: Manifest) -> None:
        """Note the newest snapshot; of several ranks, this one's share of it, which may yet come to nothing."""
        self._first_look = None
        self._older = [manifest, *self._older][:REACH]

    def read(self, name: str, start: int, out: memoryview) -> None:
        """As `Storage.get_into`; aside, where that is possible."""
        if self._aside is None:
            self._repository.storage.get_into(name, start, out)
        else:
            self._aside.read(lambda repository: repository.storage.get_into(name, start, out), out.nbytes)

    def _reader_of(self, before: Manifest) -> Decoder | None:
        """Reads the older snapshot, aside; what need not be verified is not."""
        if self._rows_from is None:
            return None

        def glance(_: str, piece: Piece, out: memoryview) -> None:
            self.read(before.files[piece.file].name, piece.offset, out)

        return decoder_of(self.read, before, glance)

    def _seems_in_few_rows(self, manifest: Manifest, image: memoryview, name: str) -> bool:
        """Whether few rows of an entry seem to have changed, as far as a few rows of one piece tell."""
        for _, new, old in paired(manifest.entries[name], self._older[0].entries.get(name)):
            if new.content_digest != old.content_digest:
                return self._in_few_rows(name, manifest.entries[name], new, old, self._older[0], image)
        return False

    def _in_few_rows(
        self, name: str, entry: Entry, piece: Piece, old: Piece, before: Manifest, image: memoryview
    ) -> bool:
        aside, chunk = self._rows_from, in_rows(name, entry, piece)
        if aside is None or chunk is None or old.group:
            return False
        if old.base is not None:
            return True
        row_nbytes = piece.nbytes // chunk.shape[0]
        starts = [chunk.shape[0] * (2 * n + 1) // (2 * ROW_SAMPLES) * row_nbytes for n in range(ROW_SAMPLES)]
        file = before.files[old.file].name
        if old.nbytes != piece.nbytes:
            return False
        try:
            rows = aside.read(
                lambda there: [there.storage.get(file, old.offset + start, row_nbytes) for start in starts]
            )
        except (FormatError, StorageMissingError):
            return False
        here = (image[piece.offset + start :][:row_nbytes] for start in starts)
        return 2 * sum(a == b for a, b in zip(rows, here, strict=True)) >= ROW_SAMPLES

    def _is_promising(self, staged: Staged) -> bool:
        if self._expects or staged.digests.known is not None:
            self._seen = []  # the next one is compared with this one, which is not looked at
            return True
        with staged.slot.image(staged.nbytes) as image:
            seen = _glances(staged.cut_layout, image)
        before, self._seen = self._seen, [seen, *self._seen][:REACH]
        if self._older and not before:
            return True  # it was not looked at, or an earlier process has written it: its bytes would have to be read
        spared, bounds = self._repeated_bytes(seen, before), write_plan.PLAIN
        return spared >= max(bounds.least_bytes, bounds.least_share * staged.cut_layout.nbytes)

    def _repeated_bytes(self, seen: Glances, before: Sequence[Glances]) -> float:
        """How much of an image seems to be there: whole pieces at any place, and rows at the place that they had."""
        known = {glance for glances in before for glance in glances.values()}
        newest: Glances = before[0] if before and self._rows_from is not None else {}
        found = 0.0
        for place, glance in seen.items():
            nbytes, here = glance
            if glance in known:
                found += nbytes
            elif place in newest:
                found += nbytes * sum(map(eq, here, newest[place][1])) / len(here)
            known.add(glance)
        return found


def _glances(cut_layout: CutLayout, image: memoryview) -> Glances:
    found = {}
    for entry, extents in zip(cut_layout.layout.entries, cut_layout.extents, strict=True):
        for number, one in enumerate(extents):
            piece = image[one]
            step = max(GLANCE_PAGE_BYTES, len(piece) // GLANCES)
            here = tuple(bytes(piece[at : at + GLANCE_BYTES]) for at in range(0, len(piece), step))
            found[entry.name, number] = len(piece), here
    return found
