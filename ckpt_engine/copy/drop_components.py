"""Slimming: a snapshot is written again without the components that retention drops.

Data files are never changed, so this costs one copy of what stays. The slim snapshot has the same `seq` and step; its
id follows from the first one's and from what it lacks, so that an interrupted slimming is recognised and finished. A
crash leaves the first snapshot, or both, or the slim one. Its notes say what it lacks: it cannot resume a run alone.

What is written again is one plain file, whatever it was before. So compaction is slimming that takes nothing away.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter

from ckpt_engine.copy.transfer import mapped, scratch_file, scratch_of
from ckpt_engine.store import container, manifest_codec, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import RAW, SLIMMED, DataFile, Entry, Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.tree import entries_in


@dataclass(frozen=True, slots=True)
class Slim:
    """A slim snapshot to be written.

    Args:
        whole: the snapshot it is made of.
        kept: the pieces that it takes over, in the order of the new file: (entry, where it begins there, piece).
    """

    whole: Manifest
    manifest: Manifest
    header: bytes
    kept: tuple[tuple[str, int, Piece], ...]

    @property
    def nbytes(self) -> int:
        """What writing it stores: data file and manifest."""
        return sum(file.nbytes for file in self.manifest.files) + len(manifest_codec.encode(self.manifest))


def slim_id(snapshot: str, without: Collection[str]) -> str:
    """The id of `snapshot` once it lacks these components."""
    text = "\0".join([snapshot, *sorted(without)])
    return f"{snapshot.rpartition('-')[0]}-{digest(text.encode()).partition(':')[2][:8]}"


def foresee(whole: Manifest, without: Collection[str]) -> Slim | None:
    """What `whole` is without these components, and plain. None: the digests of what is encoded are not known."""
    tree = {name: node for name, node in whole.tree.items() if name not in without}
    wanted = set(entries_in(tree)) & set(whole.entries)
    entries = {name: entry for name, entry in whole.entries.items() if name in wanted}
    rows = []
    for name, entry in entries.items():
        code, shape = container.container_form(entry.dtype, entry.shape, entry.nbytes)
        if code != entry.container_dtype:
            return None
        rows.append((name, code, shape, entry.nbytes))
    header = container.data_header(rows)
    moved: dict[str, Entry] = {}
    kept: list[tuple[str, int, Piece]] = []
    offset = len(header)
    for name, entry in entries.items():
        pieces = []
        for start, piece in entry.placed():
            if piece.content_digest is None:
                return None
            pieces.append(Piece(0, offset, piece.raw_nbytes, piece.content_digest, piece.raw_nbytes))
            kept.append((name, start, piece))
            offset += piece.raw_nbytes
        moved[name] = replace(entry, pieces=tuple(pieces))
    snapshot = slim_id(whole.info.id, without)
    components = {name: size for name, size in whole.info.components.items() if name not in without}
    made = Manifest(
        replace(whole.info, id=snapshot, nbytes=offset - len(header), components=components),
        whole.run,
        whole.world,
        whole.software,
        (DataFile(names.data_name(snapshot), offset),),
        moved,
        tree,
        {**whole.notes, **({SLIMMED: {"from": whole.info.id, "without": sorted(without)}} if without else {})},
    )
    return Slim(whole, made, header, tuple(kept))


def write_slim(repository: Repository, slim: Slim) -> None:
    """Write and commit a slim snapshot; its bytes are verified on the way. Needs the lease.

    Raises:
        CkptError: the whole snapshot is damaged or cannot be read; nothing was committed.
        StorageError: it was not committed.
    """
    storage, file = repository.storage, slim.manifest.files[0]
    with ExitStack() as open_files:
        plain = [piece for _, _, piece in slim.kept if piece.codec == RAW]
        images = {
            index: open_files.enter_context(
                mapped(storage, slim.whole.files[index], [piece for piece in plain if piece.file == index])
            )
            for index in {piece.file for piece in plain}
        }
        decoder, at = decoder_of(storage.get_into, slim.whole), 0
        nbytes = sum(piece.raw_nbytes for _, _, piece in slim.kept if piece.codec != RAW)
        scratch = memoryview(scratch_file(scratch_of(storage), nbytes) if nbytes else b"")
        blocks = [memoryview(slim.header)]
        for name, start, piece in slim.kept:
            if piece.codec == RAW:
                blocks.append(images[piece.file][piece.offset : piece.offset + piece.nbytes])
            else:
                blocks.append(scratch[at : at + piece.raw_nbytes])
                decoder.read(name, start, piece, blocks[-1])
                at += piece.raw_nbytes
        try:
            # It may be there, of an attempt that died before its commit; whatever it is, no manifest needs it.
            storage.put(file.name, blocks, exclusive=False)
        finally:
            for block in blocks:
                block.release()
    repository.commit(slim.manifest)


def is_compact(manifest: Manifest) -> bool:
    """Whether a snapshot is plain and has all of its data in files of its own."""
    owners = {owner.id for file in manifest.files if (owner := names.data_owner(file.name))}
    return owners <= {manifest.info.id} and all(map(attrgetter("is_plain"), manifest.entries.values()))
