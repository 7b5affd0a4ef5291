"""A storage whose objects are encrypted and signed, around one that keeps them.

Each object but the lease begins with a header: magic, the number of its key, its size and a salt. AES-256-GCM chunks
follow, so that the header and the first one, and each of the others, have 256 KiB. Their key is derived (HKDF-SHA256)
from that of the snapshot, the header, the place and the name; the nonce is the number of the chunk.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ckpt_engine.errors import CorruptError, SealError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, Storage, WrapperStorage
from ckpt_engine.store.storage.disk import private_memory, require_size
from ckpt_engine.store.storage.seal_keys import KEYS, RUN, KeyRing, SnapshotKey
from ckpt_engine.store.storage.upload_parts import MemoryBlocks

CHUNK_BYTES = 256 << 10
_TAG_BYTES = 16
_ROOM_BYTES = CHUNK_BYTES - _TAG_BYTES
_BATCH_BYTES = 4 << 20
"""What is opened at once, or sealed for a part of an upload."""
_WRITE_BYTES = 16 << 20
"""What is sealed for a disk at once: it takes that faster than less."""
_HEADER = struct.Struct(">8s8sQ40s")
"""Magic, the number of the key, the bytes that are sealed, and a salt."""
_OWNER = re.compile(r"/([0-9]{8,}-s[0-9]{10,}-[0-9a-f]{8})[-.]")
_rooms = threading.local()


def sealed_bytes(nbytes: int) -> int:
    """The size of the sealed object of so many bytes."""
    chunks = max(1, -(-(_HEADER.size + nbytes) // _ROOM_BYTES))
    return _HEADER.size + nbytes + chunks * _TAG_BYTES


def plain_bytes(nbytes: int) -> int:
    """The bytes that are sealed in an object of this size."""
    return max(0, nbytes - _HEADER.size - -(-nbytes // CHUNK_BYTES) * _TAG_BYTES)


def owner_of(name: str) -> str:
    """The snapshot that an object belongs to, or `RUN`."""
    found = _OWNER.search(name)
    return found[1] if found else RUN


@dataclass(frozen=True, slots=True)
class SealedFile:
    """How the chunks of one object are sealed.

    Args:
        header: what it begins with.
        nbytes: of what is sealed.
        size: of the object.
    """

    name: str
    header: bytes
    key: SnapshotKey
    cipher: AESGCM
    nbytes: int
    size: int

    @classmethod
    def of(cls, name: str, header: bytes, key: SnapshotKey, root: bytes) -> SealedFile:
        """The one that has this header."""
        nbytes = _HEADER.unpack(header)[2]
        derived = HKDF(SHA256(), 32, header, root + name.encode()).derive(key.secret)
        return cls(name, header, key, AESGCM(derived), nbytes, sealed_bytes(nbytes))

    def extent(self, chunk: int) -> tuple[int, int]:
        """The first of the sealed bytes that a chunk has, and the end."""
        start = chunk * _ROOM_BYTES - _HEADER.size
        return max(0, start), min(self.nbytes, start + _ROOM_BYTES)

    def seal_of(self, chunk: int) -> tuple[bytes, bytes]:
        """The nonce of a chunk, and what is authenticated with it."""
        return chunk.to_bytes(12, "big"), f"{self.name} {chunk} of {self.size}".encode()

    def open(self, raw: memoryview, first: int, start: int, out: memoryview) -> None:
        """Fill `out` with what is sealed from `start` on.

        Args:
            raw: the object from the chunk `first` on.

        Raises:
            CorruptError: these are not the bytes that were sealed.
        """
        chunks = -(-len(raw) // CHUNK_BYTES)
        for chunk in range(first, first + chunks):
            at = (chunk - first) * CHUNK_BYTES
            sealed = raw[at + (0 if chunk else _HEADER.size) : at + CHUNK_BYTES]
            low, high = self.extent(chunk)
            begin, end = max(low, start), min(high, start + len(out))
            nonce, place = self.seal_of(chunk)
            try:
                if (begin, end) == (low, high):
                    part = out[low - start : high - start]
                    self.cipher.decrypt_into(nonce, sealed, place, part)
                else:
                    whole = self.cipher.decrypt(nonce, sealed, place)
                    out[begin - start : end - start] = whole[begin - low : end - low]
            except (InvalidTag, ValueError) as err:
                raise CorruptError(f"{self.name} was changed after it was sealed, near byte {low}") from err


class SealedBlocks(MemoryBlocks, Sequence[memoryview]):
    """The bytes of a sealed object, which are made when they are asked for; as a sequence one after another."""

    def __init__(self, file: SealedFile, blocks: Sequence[memoryview]) -> None:
        self._file = file
        self._plain = MemoryBlocks(blocks)
        self._tags: dict[int, bytes] = {}
        self.nbytes = file.size

    def close(self) -> None:
        self._plain.close()

    def __len__(self) -> int:
        return -(-self.nbytes // _WRITE_BYTES)

    def __getitem__(self, index: Any) -> Any:
        return self._sealed(index * _WRITE_BYTES, memoryview(private_memory(_WRITE_BYTES)))

    def __iter__(self) -> Iterator[memoryview]:
        """Each one is there until the next is asked for, which is made meanwhile."""
        rooms = [memoryview(private_memory(min(self.nbytes, _WRITE_BYTES))) for _ in range(min(2, len(self)))]
        made: dict[int, memoryview] = {}

        def make(index: int) -> None:
            made[index] = self._sealed(index * _WRITE_BYTES, rooms[index % 2])

        make(0)
        for index in range(1, len(self)):
            ahead = threading.Thread(target=make, args=(index,), name="ckpt-encrypt", daemon=True)
            ahead.start()
            try:
                yield made.pop(index - 1)
            finally:
                ahead.join()  # it reads the caller's memory
        yield made.pop(len(self) - 1)

    def views(self, start: int, nbytes: int, most: int) -> Iterator[memoryview]:
        end = start + nbytes
        for base in range(start - start % _BATCH_BYTES, end, _BATCH_BYTES):
            made = self._sealed(base, memoryview(bytearray(min(_BATCH_BYTES, self.nbytes - base))))
            yield from MemoryBlocks([made[max(0, start - base) : end - base]]).views(0, len(made), most)

    def _sealed(self, base: int, room: memoryview) -> memoryview:
        """What the object has from `base` on, as far as there is room."""
        file, end = self._file, min(base + len(room), self.nbytes)
        for chunk in range(base // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            at = chunk * CHUNK_BYTES - base
            if not chunk:
                room[: _HEADER.size] = file.header
                at = _HEADER.size
            low, high = file.extent(chunk)
            parts = list(self._plain.views(low, high - low, CHUNK_BYTES))
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            sealed = room[at : at + high - low + _TAG_BYTES]
            nonce, place = file.seal_of(chunk)
            file.cipher.encrypt_into(nonce, data, place, sealed)
            tag = bytes(sealed[-_TAG_BYTES:])
            # Of other bytes under the same nonce nothing may leave this process.
            if self._tags.setdefault(chunk, tag) != tag:
                raise StorageError(f"memory has changed while it was written to {file.name}")
        return room[: end - base]


@lru_cache(maxsize=64)
def ring_of(_url: str, options: str, key: str | None) -> KeyRing:
    """The keys of a place, which all storages of this process share that are opened at it."""
    return KeyRing(**{"key": key, **json.loads(options)})


class SealedStorage(WrapperStorage):
    """Seals what is put into `inner`, and opens what comes from there.

    Args:
        ring: the keys.
    """

    def __init__(self, inner: Storage, ring: KeyRing) -> None:
        super().__init__(inner)
        self._ring = ring
        self._files: dict[str, SealedFile] = {}

    @cached_property
    def capabilities(self) -> Capabilities:
        own = super().capabilities
        rotate = partial(self._ring.rotate, self.inner)
        return replace(own, folder=None, view=None, rotate=rotate, duplicate=lambda _: None)

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        if name == names.LEASE:
            self.inner.put(name, blocks, exclusive=exclusive)
            return
        key = self._ring.key_for(self.inner, owner_of(name))
        if names.manifest_id(name) is not None:
            digest = key.digest(name, b"".join(blocks))
            if digest not in key.manifests:
                key.manifests.append(digest)
                key.is_stored = False
        if not key.is_stored or name == names.RECORD:  # with which a place begins, also one that was removed
            self._ring.publish(self.inner, key)
        nbytes = sum(block.nbytes for block in blocks)
        number = bytes.fromhex(key.name.rpartition("-")[2])
        header = _HEADER.pack(names.SEALED, number, nbytes, os.urandom(40))
        file = SealedFile.of(name, header, key, self._ring.root)
        self.inner.put(name, SealedBlocks(file, blocks), exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == names.LEASE:
            return self.inner.get(name, start, nbytes)
        head = memoryview(self.inner.get(name, 0, CHUNK_BYTES))
        file = self._file(name, bytes(head[: _HEADER.size]))
        is_signed = names.manifest_id(name) is not None
        if nbytes is None or is_signed:
            require_size(f"{self.url}/{name}", file.nbytes, names.most_bytes(name))
        end = file.nbytes if nbytes is None else min(start + nbytes, file.nbytes)
        first, last = (0, file.nbytes) if is_signed else (start, end)
        out = memoryview(bytearray(max(0, last - first)))
        if file.size <= len(head):  # at once: another process may replace it
            file.open(head[: file.size], 0, first, out)
        else:
            self._fill(file, first, out)
        if is_signed and file.key.digest(name, out) not in file.key.manifests:
            raise SealError(f"{self.url}/{name} is not the manifest that was signed: somebody has changed it")
        return bytes(out[start - first : end - first])

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        try:
            self._fill(self._files[name], start, out.cast("B"))
        except (KeyError, CorruptError):  # the first read, or one of what was replaced
            self._files[name] = self._file(name, self.inner.get(name, 0, _HEADER.size))
            self._fill(self._files[name], start, out.cast("B"))

    def _file(self, name: str, header: bytes) -> SealedFile:
        if len(header) < _HEADER.size or not header.startswith(names.SEALED):
            raise SealError(
                f"{self.url}/{name} is not sealed, and seal asks for it",
                hint="`ckpt cp --seal` seals a run; if this one was sealed, somebody has changed it",
            )
        key = self._ring.opened(self.inner, f"{KEYS}{owner_of(name)}-{header[8:16].hex()}")
        return SealedFile.of(name, header, key, self._ring.root)

    def _fill(self, file: SealedFile, start: int, out: memoryview) -> None:
        if start + len(out) > file.nbytes:
            raise CorruptError(f"{self.url}/{file.name} ends at byte {file.nbytes}, needed up to {start + len(out)}")
        room = getattr(_rooms, "kept", None)
        if room is None:
            room = _rooms.kept = memoryview(private_memory(_BATCH_BYTES))
        done = 0
        while done < len(out):
            first = (_HEADER.size + start + done) // _ROOM_BYTES
            begin = first * CHUNK_BYTES
            upto = min(len(out), file.extent(first + _BATCH_BYTES // CHUNK_BYTES - 1)[1] - start)
            last = (_HEADER.size + start + upto - 1) // _ROOM_BYTES
            raw = room[: min((last + 1) * CHUNK_BYTES, file.size) - begin]
            self.inner.get_into(file.name, begin, raw)
            file.open(raw, first, start + done, out[done:upto])
            done = upto

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for item in self.inner.list(prefix):
            if not item.name.startswith(KEYS):
                nbytes = item.nbytes if item.name == names.LEASE else plain_bytes(item.nbytes)
                yield ObjectInfo(item.name, nbytes, item.version)

    def delete(self, *names_: str) -> None:
        self.inner.delete(*names_)
        if any(map(names.data_owner, names_)):
            self._delete_keys()

    def sweep(self) -> int:
        freed = self.inner.sweep()
        self._delete_keys()
        return freed

    def _delete_keys(self) -> None:
        """Remove the keys of snapshots of which nothing is left; what is newer than all others may be on its way."""
        keys = {item.name: owner_of(item.name) for item in self.inner.list(KEYS)}
        left = {owner_of(item.name) for folder in (names.MANIFESTS, names.DATA) for item in self.inner.list(folder)}
        newest = max(map(names.seq_of, left), default=0)
        if gone := [name for name, owner in keys.items() if owner not in left and -1 < names.seq_of(owner) < newest]:
            self.inner.delete(*gone)
