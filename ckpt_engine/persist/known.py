"""What one repository is known to hold already: the pieces of its newest snapshot, by which the next one is drafted."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import replace
from operator import itemgetter

from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.persist import image as drafts
from ckpt_engine.persist.aside import Aside
from ckpt_engine.persist.deltas import RowDeltas
from ckpt_engine.persist.image import Draft
from ckpt_engine.persist.snapshots import Staged
from ckpt_engine.store.decode import chain_of
from ckpt_engine.store.digest import digest
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.presence import lacking
from ckpt_engine.store.repository import Repository

SMALL_BYTES = 64 << 20
"""Images up to this size are digested before they are written whenever there is an older snapshot: it takes no time."""
SAMPLES = 8


class Known:
    """Drafts the snapshots of one writer in one repository, one after another.

    The image is digested before it is written only where that is likely to spare writing: if it did for the snapshot
    before, or if samples of it are unchanged. Else digesting runs beside writing.

    Args:
        repository: that is written to.
        aside: reads what is there. None: this is one of several ranks. It knows what it has written itself and not what
            the others have, so nothing is read: whole pieces of its own share are spared from its second snapshot on.
    """

    def __init__(self, repository: Repository, aside: Aside | None) -> None:
        self._repository = repository
        self._aside = aside
        self._deltas_from = aside if repository.storage.capabilities.cheap_reads else None
        """Where reading older data back costs little; else only whole pieces are spared."""
        self._newest: Manifest | None = None
        self._expects = False

    def draft(self, staged: Staged) -> Draft | None:
        """What the snapshot has to write; None: its whole image.

        Raises:
            WriterError: the image cannot be read.
            StorageError: what is there cannot be read, or that hangs; nothing has come of it.
        """
        if staged.cut_layout.nbytes < drafts.LEAST_BYTES:
            return None
        before = self._before()
        if before is None or not self._is_promising(staged, before):
            return None
        began = time.thread_time()
        digests, digest_seconds = staged.timed_digest()
        with staged.slot.image(staged.data.nbytes) as image:
            encode = RowDeltas(self._deltas_from, before, image).encode if self._deltas_from is not None else _nothing
            made = drafts.partial(staged.snapshot, staged.job.rank, staged.cut_layout, digests, before, encode)
        self._expects = made is not None
        if made is None or not self.stands(made):
            return None
        return replace(made, cpu_seconds=time.thread_time() - began + digest_seconds)

    def stands(self, draft: Draft) -> bool:
        """Whether everything that a draft refers to is still there, and will be as long as nothing is forgotten.

        Raises:
            StorageError: that cannot be told.
        """
        if draft.source is None:
            return True
        if all(parsed.id != draft.source for parsed in self._repository.ids()):
            return False
        return not lacking(self._repository.storage, draft.old_files)

    def committed(self, manifest: Manifest) -> None:
        """Note the newest snapshot; of several ranks, this one's share of it, which may yet come to nothing."""
        self._aside, self._newest = None, manifest

    def _before(self) -> Manifest | None:
        if self._aside is not None:
            aside, self._aside = self._aside, None  # asked once
            try:
                self._newest = aside.read(_newest)
            except (FormatError, StorageMissingError):
                self._newest = None  # damaged or gone: then all is written
        return self._newest

    def _is_promising(self, staged: Staged, before: Manifest) -> bool:
        cut_layout = staged.cut_layout
        if self._expects or staged.digests.known is not None or cut_layout.nbytes <= SMALL_BYTES:
            return True
        cuts = zip(cut_layout.layout.entries, cut_layout.extents, strict=True)
        pieces = [(extent.offset, extent, entry) for entry, extents in cuts for extent in extents]
        with staged.slot.image(staged.data.nbytes) as image:
            deltas = RowDeltas(self._deltas_from, before, image) if self._deltas_from is not None else None
            for number in range(SAMPLES):
                # Evenly over the bytes: it is bytes that are to be spared.
                middle = staged.data.nbytes * (2 * number + 1) // (2 * SAMPLES)
                _, extent, entry = pieces[max(0, bisect_right(pieces, middle, key=itemgetter(0)) - 1)]
                old = drafts.old_pieces(before, entry).get(extent.offset - entry.offset)
                if old is None:
                    continue
                with image[extent.offset : extent.offset + extent.nbytes] as part:
                    if digest(part) == old.content_digest:
                        return True
                chain = chain_of(before, entry.name, extent.offset - entry.offset, old)
                if deltas is not None and deltas.is_likely(entry, extent, chain):
                    return True
        return False


def _newest(repository: Repository) -> Manifest | None:
    ids = repository.ids()
    return repository.read(ids[-1].id) if ids else None


def _nothing(*_: object) -> None:
    """Encodes nothing."""
