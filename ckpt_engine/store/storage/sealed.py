"""A storage whose objects are encrypted and signed, around one that keeps them.

Each object but the lease begins with a header: magic, the public key of the process that wrote it, its size and a salt.
AES-256-GCM chunks follow, so that the header and the first one, and each of the others, have 64 KiB. Their key is
derived (HKDF-SHA256) from the secret of that process, the header, the place and the name; the nonce is the number of
the chunk. At the end of all but data files is a signature of that process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ckpt_engine.errors import CorruptError, SealError, StorageError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Capabilities, ObjectInfo, Storage, WrapperStorage
from ckpt_engine.store.storage.disk import private_memory, require_size
from ckpt_engine.store.storage.retries import ask_apart
from ckpt_engine.store.storage.seal_keys import KEYS, SIGNATURE_BYTES, KeyRing
from ckpt_engine.store.storage.upload_parts import MemoryBlocks

CHUNK_BYTES = 64 << 10
"""What is read at least: looking at some rows of each tensor takes one for each of them."""
_TAG_BYTES = 16
_ROOM_BYTES = CHUNK_BYTES - _TAG_BYTES
_BATCH_BYTES = 4 << 20
"""What is opened at once, or sealed for a part of an upload."""
_WRITE_BYTES = 16 << 20
"""What is sealed for a disk at once: it takes that faster than less."""
_HEADER = struct.Struct(">8s32sQ16s")
"""Magic, the public key of who has sealed it, the bytes that are sealed, and a salt."""


def sealed_bytes(nbytes: int) -> int:
    """The size of so many bytes once they are sealed, without a signature."""
    chunks = max(1, -(-(_HEADER.size + nbytes) // _ROOM_BYTES))
    return _HEADER.size + nbytes + chunks * _TAG_BYTES


def plain_bytes(name: str, nbytes: int) -> int:
    """The bytes that are sealed in an object of this name and size."""
    if name == names.LEASE:
        return nbytes
    sealed = nbytes - SIGNATURE_BYTES * is_signed(name)
    return max(0, sealed - _HEADER.size - -(-sealed // CHUNK_BYTES) * _TAG_BYTES)


def is_signed(name: str) -> bool:
    """Whether an object of this name ends with a signature."""
    return not name.startswith(names.DATA)


@dataclass(frozen=True, slots=True)
class SealedFile:
    """How the chunks of one object are sealed.

    Args:
        header: what it begins with.
        cipher: with the key that no other object has.
        nbytes: of what is sealed.
        size: of the object, without a signature.
    """

    name: str
    header: bytes
    cipher: AESGCM
    nbytes: int
    size: int

    def chunk(self, index: int) -> tuple[int, int, bytes, bytes]:
        """The first of the sealed bytes that a chunk has, the end, its nonce, and what is authenticated with it."""
        start, place = index * _ROOM_BYTES - _HEADER.size, f"{self.name} {index} of {self.size}"
        return max(0, start), min(self.nbytes, start + _ROOM_BYTES), index.to_bytes(12, "big"), place.encode()

    def open(self, raw: memoryview, first: int, start: int, out: memoryview) -> None:
        """Fill `out` with what is sealed from `start` on, as far as `raw` has it.

        Args:
            raw: the object from the chunk `first` on.

        Raises:
            CorruptError: these are not the bytes that were sealed.
        """
        for at in range(0, len(raw), CHUNK_BYTES):
            index = first + at // CHUNK_BYTES
            sealed = raw[at + (0 if index else _HEADER.size) : at + CHUNK_BYTES]
            low, high, nonce, place = self.chunk(index)
            begin, end = max(low, start), min(high, start + len(out))
            try:
                if (begin, end) == (low, high):
                    self.cipher.decrypt_into(nonce, sealed, place, out[low - start : high - start])
                else:
                    whole = self.cipher.decrypt(nonce, sealed, place)
                    out[begin - start : end - start] = whole[begin - low : end - low]
            except (InvalidTag, ValueError) as err:
                raise CorruptError(f"{self.name} was changed after it was sealed, near byte {low}") from err


class SealedBlocks(MemoryBlocks, Sequence[memoryview]):
    """The bytes of a sealed object, which are made when they are asked for."""

    def __init__(self, file: SealedFile, blocks: Sequence[memoryview]) -> None:
        super().__init__(blocks)
        self._file = file
        self._tags: dict[int, bytes] = {}
        self.nbytes = file.size

    def __len__(self) -> int:
        return len(range(0, self.nbytes, _WRITE_BYTES))

    def __getitem__(self, index: Any) -> Any:
        return self.part(range(0, self.nbytes, _WRITE_BYTES)[index], _WRITE_BYTES)

    def __iter__(self) -> Iterator[memoryview]:
        """Makes each one while the caller has the one before."""
        made = self[0]
        for index in range(1, len(self)):
            ahead = ask_apart(partial(self.__getitem__, index), "ckpt-encrypt")
            try:
                yield made
            finally:
                ahead.exception()  # until then it reads the caller's memory
            made = ahead.result()
        yield made

    def views(self, start: int, nbytes: int, most: int) -> Iterator[memoryview]:
        end = start + nbytes
        for base in range(start - start % _BATCH_BYTES, end, _BATCH_BYTES):
            made = self.part(base, _BATCH_BYTES)
            yield from MemoryBlocks([made[max(0, start - base) : end - base]]).views(0, len(made), most)

    def part(self, base: int, nbytes: int) -> memoryview:
        """At most so many bytes of the object from `base` on, where a chunk begins."""
        file, end = self._file, min(base + nbytes, self.nbytes)
        room = memoryview(private_memory(end - base))
        if not base:
            room[: _HEADER.size] = file.header
        for index in range(base // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            at = max(index * CHUNK_BYTES, _HEADER.size) - base
            low, high, nonce, place = file.chunk(index)
            parts = list(super().views(low, high - low, CHUNK_BYTES))
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            sealed = room[at : at + high - low + _TAG_BYTES]
            file.cipher.encrypt_into(nonce, data, place, sealed)
            tag = bytes(sealed[-_TAG_BYTES:])
            # Of other bytes under the same nonce nothing may leave this process.
            if self._tags.setdefault(index, tag) != tag:
                raise StorageError(f"memory has changed while it was written to {file.name}")
        return room


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
        retain = partial(self._retain, own.retain) if own.retain is not None else None
        rotate = partial(self._ring.rotate, self.inner)
        return replace(own, folder=None, view=None, rotate=rotate, retain=retain, duplicate=lambda _: None)

    def _retain(self, retain: Callable[[Sequence[str]], str | None], names_: Sequence[str]) -> str | None:
        """Keep what opens them, too."""
        return retain([*names_, *(item.name for item in self.inner.list(KEYS))])

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        if name == names.LEASE:
            self.inner.put(name, blocks, exclusive=exclusive)
            return
        signing = self._ring.own(self.inner)
        public, nbytes = signing.public_key().public_bytes_raw(), sum(block.nbytes for block in blocks)
        file = self._file(name, _HEADER.pack(names.SEALED, public, nbytes, os.urandom(16)))
        sealed = SealedBlocks(file, blocks)
        parts = self._ring.signed(signing, name, sealed.part(0, sealed.nbytes)) if is_signed(name) else sealed
        self.inner.put(name, parts, exclusive=exclusive)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name == names.LEASE:
            return self.inner.get(name, start, nbytes)
        most = names.most_bytes(name)
        if not is_signed(name):
            nbytes = most + 1 if nbytes is None else nbytes
            part = bytearray(len(range(start, self._known(name).nbytes)[:nbytes]))
            require_size(f"{self.url}/{name}", len(part), most)
            self.get_into(name, start, memoryview(part))
            return bytes(part)
        raw = self.inner.get(name, 0, sealed_bytes(most) + SIGNATURE_BYTES)
        file = self._file(name, raw[: _HEADER.size])
        require_size(f"{self.url}/{name}", file.nbytes, most)
        signer = Ed25519PublicKey.from_public_bytes(_HEADER.unpack(file.header)[1])
        body, whole = self._ring.verified([signer], name, raw, self.url), bytearray(file.nbytes)
        file.open(memoryview(body), 0, 0, memoryview(whole))
        return bytes(whole[start:][:nbytes])

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        if is_signed(name):
            part = self.get(name, start, out.nbytes)
            if len(part) < out.nbytes:
                raise CorruptError(f"{self.url}/{name} ends before byte {start + out.nbytes}")
            out.cast("B")[:] = part
            return
        try:
            self._fill(self._known(name), start, out.cast("B"))
        except CorruptError:  # of what was replaced the header is another one
            self._files.pop(name, None)
            self._fill(self._known(name), start, out.cast("B"))

    def _known(self, name: str) -> SealedFile:
        if name not in self._files:
            self._files[name] = self._file(name, self.inner.get(name, 0, _HEADER.size))
        return self._files[name]

    def _file(self, name: str, header: bytes) -> SealedFile:
        if len(header) < _HEADER.size or not header.startswith(names.SEALED):
            raise SealError(
                f"{self.url}/{name} is not sealed, and seal asks for it",
                hint="`ckpt cp --seal` seals a run; commands read one that never was sealed without "
                f"{names.KEY_VARIABLE}; else somebody has changed it",
            )
        _, public, nbytes, _ = _HEADER.unpack(header)
        secret = self._ring.secret(self.inner, public)
        key = HKDF(SHA256(), 32, header, self._ring.root + name.encode()).derive(secret)
        return SealedFile(name, header, AESGCM(key), nbytes, sealed_bytes(nbytes))

    def _fill(self, file: SealedFile, start: int, out: memoryview) -> None:
        end = start + len(out)
        if end > file.nbytes:
            raise CorruptError(f"{self.url}/{file.name} ends at byte {file.nbytes}, needed up to {end}")
        first = (_HEADER.size + start) // _ROOM_BYTES * CHUNK_BYTES
        last = min(file.size, ((_HEADER.size + end - 1) // _ROOM_BYTES + 1) * CHUNK_BYTES)
        nbytes = min(_BATCH_BYTES, last - first)
        room = memoryview(private_memory(nbytes) if nbytes > CHUNK_BYTES else bytearray(max(0, nbytes)))
        for begin in range(first, last, _BATCH_BYTES):
            raw = room[: last - begin]
            self.inner.get_into(file.name, begin, raw)
            file.open(raw, begin // CHUNK_BYTES, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for item in self.inner.list(prefix):
            if not item.name.startswith(KEYS):
                yield ObjectInfo(item.name, plain_bytes(item.name, item.nbytes), item.version)
