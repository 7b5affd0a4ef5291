"""What somebody who can write a sealed place tries with chunks, plain objects and key streams is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ckpt_engine.errors import CorruptError, SealError
from ckpt_engine.store import names
from ckpt_engine.store.storage.seal_keys import KeyPair, KeyRing
from ckpt_engine.store.storage.sealed import _HEADER, _ROOM_BYTES, CHUNK_BYTES, SealedBlocks
from tests.store.test_sealed import DATA, MANIFEST, OBJECTS, filled, key, sealed  # noqa: F401

WAIT_SECONDS = 60
PROCESSES = 3
ROUNDS = 5
"""Of each of them and its child; twelve objects each."""
RECORDING = """
import hashlib, json, os, sys
from ckpt_engine.store.storage import open_storage, sealed
from ckpt_engine.store.storage.seal_keys import KeyRing

class Recorder:
    def __init__(self, key):
        self.key, self.real = key, sealed.AES(key)
        self.decrypt, self.decrypt_into = self.real.decrypt, self.real.decrypt_into

    def encrypt_into(self, nonce, data, place, out):
        pair = hashlib.sha256(self.key + nonce).hexdigest()
        what = hashlib.sha256(bytes(data) + b"|" + place).hexdigest()
        line = json.dumps([os.getpid(), hashlib.sha256(self.key).hexdigest(), pair, what])
        os.write(1, f"{line}\\n".encode())  # whole, beside those of the other process
        return self.real.encrypt_into(nonce, data, place, out)

sealed.AES, sealed.AESGCM = sealed.AESGCM, Recorder
folder, key = sys.argv[1:]
storage = sealed.SealedStorage(open_storage(folder), KeyRing(key=key))

def put_all(fill):
    for size in (0, 1, sealed.CHUNK_BYTES, 3 * sealed.CHUNK_BYTES + 1):
        for name in ("data/a", "snapshots/b.json", "pins/c.json"):
            storage.put(name, [memoryview(fill * size)], exclusive=False)

put_all(b"x")
child = os.fork()
put_all(b"x")
put_all(b"y")
if child:
    assert os.waitpid(child, 0)[1] == 0
    real = storage.inner.put

    def put_again(name, blocks, *, exclusive=True):  # as an upload does of which a part failed
        for most in (50_000, 1 << 20):
            again = b"".join(map(bytes, blocks.views(0, blocks.nbytes, most)))
        assert again == b"".join(map(bytes, blocks))

    storage.inner.put = put_again
    storage.put("data/a", [memoryview(b"z" * (3 * sealed.CHUNK_BYTES))])
"""


def test_no_nonce_of_a_key_is_used_for_two_texts(tmp_path: Path, key: str) -> None:  # noqa: F811
    """Processes at once and forked ones write the same names; each object has a key of its own, each chunk a nonce."""
    commands = [[sys.executable, "-c", RECORDING, str(tmp_path / "run"), key] for _ in range(PROCESSES)]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
    texts, users = defaultdict[str, set[str]](set), defaultdict[str, set[int]](set)
    for process in running:
        for line in process.communicate(timeout=WAIT_SECONDS)[0].splitlines():
            pid, stream, pair, what = json.loads(line)
            texts[pair].add(what)
            users[stream].add(pid)
        assert process.returncode == 0
    assert all(len(found) == 1 for found in users.values())
    assert all(len(found) == 1 for found in texts.values())
    assert len(users) == PROCESSES * (ROUNDS * 12 + 1)


@pytest.mark.parametrize("name", [DATA, MANIFEST, f"pins/{MANIFEST[10:]}"])
def test_an_object_that_ends_at_the_border_of_a_chunk_is_refused(tmp_path: Path, key: str, name: str) -> None:  # noqa: F811
    """Also where its header says that it has no more: the key follows from the header."""
    plain = bytes(range(256)) * (4 * CHUNK_BYTES // 256)
    storage, path = sealed(tmp_path / "run", key=key), tmp_path / "run" / name
    storage.put(name, [memoryview(plain)])
    whole = path.read_bytes()
    magic, public, _, salt = _HEADER.unpack(whole[: _HEADER.size])
    for chunks in range(1, 5):
        cut = whole[: chunks * CHUNK_BYTES]
        fitting = _HEADER.pack(magic, public, chunks * _ROOM_BYTES - _HEADER.size, salt)
        for text in (cut, fitting + cut[_HEADER.size :], fitting + cut[_HEADER.size :] + whole[-64:]):
            path.write_bytes(text)
            with pytest.raises((CorruptError, SealError)):
                sealed(tmp_path / "run", key=key).get(name)
            with pytest.raises((CorruptError, SealError)):
                sealed(tmp_path / "run", key=key).get_into(name, 0, memoryview(bytearray(len(plain))))


def test_chunks_that_change_places_within_an_object_are_refused(tmp_path: Path, key: str) -> None:  # noqa: F811
    """Number, name and size are authenticated with each one, and an older object of the name has another key."""
    plain = bytes(4 * CHUNK_BYTES)
    storage, path = sealed(tmp_path / "run", key=key), tmp_path / "run" / DATA
    storage.put(DATA, [memoryview(plain)])
    older = path.read_bytes()
    storage.put(DATA, [memoryview(plain)], exclusive=False)
    whole = path.read_bytes()
    second, third = slice(CHUNK_BYTES, 2 * CHUNK_BYTES), slice(2 * CHUNK_BYTES, 3 * CHUNK_BYTES)
    for place, chunk in ((second, whole[third]), (third, whole[second]), (second, older[second])):
        changed = bytearray(whole)
        changed[place] = chunk
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match="was changed after it was sealed"):
            sealed(tmp_path / "run", key=key).get(DATA)
    path.write_bytes(whole)
    assert sealed(tmp_path / "run", key=key).get(DATA) == plain


@pytest.mark.parametrize("name", OBJECTS)
def test_a_plain_object_in_a_sealed_place_is_refused(tmp_path: Path, key: str, name: str) -> None:  # noqa: F811
    """Whether it takes the place of a sealed one or is the only one of its name."""
    filled(tmp_path / "run", key=key)
    (tmp_path / "run" / name).write_bytes(OBJECTS[name])
    with pytest.raises(SealError, match="is not sealed"):
        sealed(tmp_path / "run", key=key).get(name)
    with pytest.raises(SealError, match="is not sealed"):
        sealed(tmp_path / "run", key=key).get_into(name, 0, memoryview(bytearray(1)))


@pytest.mark.parametrize("name", [name for name in OBJECTS if not name.startswith(names.DATA)])
def test_no_way_to_read_passes_the_signature(tmp_path: Path, key: str, name: str) -> None:  # noqa: F811
    """A recipient has sealed other bytes and cannot sign them: neither the whole nor a part is given out."""
    filled(tmp_path / "run", key=key)
    path = tmp_path / "run" / name
    good = path.read_bytes()
    file = sealed(tmp_path / "run", key=key)._file(name, good[: _HEADER.size])
    path.write_bytes(b"".join(SealedBlocks(file, [memoryview(bytes(len(OBJECTS[name])))])) + good[-64:])
    out = memoryview(bytearray(b"?" * len(OBJECTS[name])))
    for start, end in ((0, len(out)), (0, 1), (1, len(out))):
        with pytest.raises(SealError, match="not signed by"):
            sealed(tmp_path / "run", key=key).get_into(name, start, out[start:end])
        with pytest.raises(SealError, match="not signed by"):
            sealed(tmp_path / "run", key=key).get(name, start, end - start)
    assert bytes(out) == b"?" * len(out)
    path.write_bytes(good)
    sealed(tmp_path / "run", key=key).get_into(name, 0, out)
    assert bytes(out) == OBJECTS[name]
    with pytest.raises(CorruptError, match="ends before byte"):
        sealed(tmp_path / "run", key=key).get_into(name, 1, out)


def test_the_lease_is_read_as_it_is(tmp_path: Path, key: str) -> None:  # noqa: F811
    """In whole and in part: it is the one plain object."""
    storage = sealed(tmp_path / "run", key=key)
    storage.put(names.LEASE, [memoryview(b"who writes")])
    out = memoryview(bytearray(6))
    storage.get_into(names.LEASE, 4, out)
    assert (storage.get(names.LEASE), bytes(out)) == (b"who writes", b"writes")


def test_no_secret_is_in_the_text_of_what_holds_one(tmp_path: Path, key: str) -> None:  # noqa: F811
    """Of keys, rings, storages and the files that they open."""
    storage = filled(tmp_path / "run", key=key)
    ring: KeyRing = storage._ring
    pair = KeyPair.read(key)
    secrets = [
        Path(key).read_text().splitlines()[-1],
        *(one.hex() for one in ring._secrets.values()),
        *map(repr, ring._secrets.values()),
        *(one.private_bytes_raw().hex() for one in (pair.signing, *ring._own.values())),
    ]
    shown = "".join(
        f"{one!r}{one}"
        for one in (pair, ring, storage, storage._file(DATA, (tmp_path / "run" / DATA).read_bytes()[:64]))
    )
    assert not [one for one in secrets if one in shown]
