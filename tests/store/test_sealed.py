"""Sealed storages: what comes back is what was put there by an accepted signer, or an error with a code."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.errors import (
    CkptError,
    ConfigError,
    CorruptError,
    SealError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
)
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.seal_keys import KeyPair, KeyRing, parse_recipient
from ckpt_engine.store.storage.sealed import CHUNK_BYTES, SealedBlocks, SealedStorage, plain_bytes
from ckpt_engine.store.storage.sealed import sealed_bytes as sealed_size
from ckpt_engine.testing import StorageContract

ID = "00000001-s0000000001-aaaaaaaa"
OLDER = "00000000-s0000000000-bbbbbbbb"
DATA = f"data/{ID}-r00000.safetensors"
MANIFEST = f"snapshots/{ID}.json"
OBJECTS = {
    "ckpt.json": b'{"run": 1}',
    f"data/{OLDER}-r00000.safetensors": b"o" * 3000,
    f"snapshots/{OLDER}.json": b'{"older": 1}',
    DATA: bytes(range(256)) * 40,
    MANIFEST: b'{"manifest": 1}',
    f"pins/{ID}.json": b"{}",
}


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A key file."""
    KeyPair.make(str(tmp_path / "key"))
    return str(tmp_path / "key")


def sealed(folder: Path | str, **options: object) -> SealedStorage:
    """A place, opened as another process would: nothing is remembered."""
    return SealedStorage(open_storage(str(folder)), KeyRing(**options))  # type: ignore[arg-type]


def filled(folder: Path | str, **options: object) -> SealedStorage:
    """A place with one of each kind of object, written by two processes one after another."""
    older, newer = sealed(folder, **options), sealed(folder, **options)
    for name, text in OBJECTS.items():
        (older if OLDER in name else newer).put(name, [memoryview(text)])
    return newer


def key_of(folder: Path, name: str) -> Path:
    """The object of the key with which the object of this name is sealed."""
    return folder / "keys" / (folder / name).read_bytes()[8:40].hex()


def accepted(storage: Storage) -> dict[str, bytes]:
    """What can be read, by name; whatever else is refused with a code."""
    found = {}
    for name in OBJECTS:
        try:
            found[name] = storage.get(name)
            part = memoryview(bytearray(7))
            storage.get_into(name, 1, part)
            assert bytes(part) == found[name][1:8] or len(found[name]) < 8
        except CkptError as error:
            assert error.code in {"CKPT401", "CKPT405", "CKPT303"}, error
    return found


class Memory:
    """As many objects as a law needs, in memory."""

    url = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @property
    def capabilities(self) -> object:
        raise NotImplementedError

    def put(self, name: str, blocks: list[memoryview], *, exclusive: bool = True) -> None:
        assert not exclusive or name not in self.objects
        self.objects[name] = b"".join(bytes(block) for block in blocks)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name not in self.objects:
            raise StorageMissingError(name)
        return self.objects[name][start:][:nbytes]

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        part = self.objects[name][start : start + len(out)]
        if len(part) < len(out):
            raise CorruptError("too short")
        out[:] = part

    def list(self, prefix: str) -> Iterator[object]:
        return iter(())


LAW_KEY = tempfile.mkdtemp() + "/key"
KeyPair.make(LAW_KEY)


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_range_of_any_object_comes_back_and_any_flip_is_refused(data: st.DataObject) -> None:
    near = st.integers(-70, 70).flatmap(lambda off: st.integers(0, 3).map(lambda n: max(0, n * CHUNK_BYTES + off)))
    nbytes = data.draw(st.one_of(st.integers(0, 2000), near))
    plain = random.Random(nbytes).randbytes(nbytes)
    cut = data.draw(st.integers(0, nbytes))
    inner = Memory()
    storage = SealedStorage(inner, KeyRing(key=LAW_KEY))  # type: ignore[arg-type]
    storage.put(DATA, [memoryview(plain)[:cut], memoryview(plain)[cut:]])
    text = inner.objects[DATA]
    assert len(text) == sealed_size(nbytes)
    assert plain_bytes(DATA, len(text)) == nbytes
    start = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(start, nbytes))
    out = memoryview(bytearray(end - start))
    storage.get_into(DATA, start, out)
    assert bytes(out) == plain[start:end]
    assert storage.get(DATA, start, end - start) == plain[start:end]
    assert storage.get(DATA) == plain
    bit = data.draw(st.integers(0, len(text) * 8 - 1))
    changed = bytearray(text)
    changed[bit // 8] ^= 1 << bit % 8
    inner.objects[DATA] = bytes(changed)
    with pytest.raises((CorruptError, SealError)):
        SealedStorage(inner, KeyRing(key=LAW_KEY)).get(DATA)  # type: ignore[arg-type]
    inner.objects[DATA] = text[: data.draw(st.integers(0, len(text) - 1))]
    with pytest.raises((CorruptError, SealError)):
        SealedStorage(inner, KeyRing(key=LAW_KEY)).get(DATA)  # type: ignore[arg-type]
    inner.objects[DATA] = text + b"more"
    assert SealedStorage(inner, KeyRing(key=LAW_KEY)).get(DATA) == plain  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("bits", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_of_many_flipped_bits_none_is_accepted(bits: int, tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    draw = random.Random(1)
    whole = accepted(sealed(tmp_path / "run", key=key))
    assert whole == OBJECTS
    for _ in range(bits):
        path = draw.choice(files)
        text = path.read_bytes()
        bit = draw.randrange(len(text) * 8)
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = accepted(sealed(tmp_path / "run", key=key))
        path.write_bytes(text)
        assert found == OBJECTS if path.parent.name == "keys" else found.items() < OBJECTS.items(), (path, bit)


def test_objects_that_change_places_are_refused(tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    for one in files:
        for other in files:
            if one != other:
                text = one.read_bytes()
                one.write_bytes(other.read_bytes())
                found = accepted(sealed(tmp_path / "run", key=key))
                assert found == OBJECTS if one.parent.name == "keys" else found.items() < OBJECTS.items(), (one, other)
                one.write_bytes(text)


def test_a_snapshot_of_another_run_of_the_same_key_is_refused(tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    filled(tmp_path / "other", key=key)
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != "root":
            path.unlink()
    for path in (tmp_path / "other").rglob("*"):
        if path.is_file() and path.name != "root":
            there = tmp_path / "run" / path.relative_to(tmp_path / "other")
            there.write_bytes(path.read_bytes())
    assert accepted(sealed(tmp_path / "run", key=key)) == {}


def test_what_is_sealed_to_a_recipient_and_signed_by_a_stranger_is_refused(tmp_path: Path, key: str) -> None:
    stranger = str(tmp_path / "stranger")
    KeyPair.make(stranger)
    filled(tmp_path / "run", key=key)
    (tmp_path / "forged/keys").mkdir(parents=True)
    (tmp_path / "forged/keys/root").write_bytes((tmp_path / "run/keys/root").read_bytes())
    filled(tmp_path / "forged", to=[KeyPair.read(key).recipient], sign=stranger)
    with pytest.raises(SealError, match="not signed by"):
        sealed(tmp_path / "forged", key=key).get(MANIFEST)
    with pytest.raises(SealError, match="no key"):
        sealed(tmp_path / "forged", sign=stranger).get(MANIFEST)
    assert sealed(tmp_path / "forged", key=key, signed_by=[KeyPair.read(stranger).recipient]).get(MANIFEST)
    trusting = sealed(tmp_path / "run", key=key, signed_by=[KeyPair.read(stranger).recipient])
    with pytest.raises(SealError, match="not signed by"):
        trusting.get(MANIFEST)


def test_plain_objects_a_wrong_key_and_no_key_are_refused_by_name(tmp_path: Path, key: str) -> None:
    other = str(tmp_path / "other-key")
    KeyPair.make(other)
    signer = KeyPair.read(key).recipient
    filled(tmp_path / "run", key=key)
    (tmp_path / "run" / MANIFEST).write_bytes(b'{"manifest": 1}')
    with pytest.raises(SealError, match="not sealed"):
        sealed(tmp_path / "run", key=key).get(MANIFEST)
    with pytest.raises(SealError, match="not sealed to the key at hand"):
        sealed(tmp_path / "run", key=other, signed_by=[signer]).get(DATA)
    with pytest.raises(SealError, match="no key"):
        sealed(tmp_path / "run", signed_by=[signer]).get(DATA)
    with pytest.raises(SealError, match="no key signs"):
        sealed(tmp_path / "run", signed_by=[signer]).put("status.json", [memoryview(b"{}")])
    with pytest.raises(ConfigError):
        sealed(tmp_path / "run")
    for copy in key_of(tmp_path / "run", DATA).parent.glob(f"{key_of(tmp_path / 'run', DATA).name}*"):
        copy.unlink()
    with pytest.raises(SealError, match="is missing"):
        sealed(tmp_path / "run", key=key).get(DATA)
    plain = open_storage(str(tmp_path / "plain"))
    plain.put("ckpt.json", [memoryview(b"{}")])
    with pytest.raises(SealError, match="not sealed"):
        sealed(tmp_path / "plain", key=key).get("ckpt.json")


@pytest.mark.parametrize("name", [MANIFEST, "ckpt.json", f"pins/{ID}.json"])
def test_what_a_recipient_has_changed_is_refused_but_in_data_files(tmp_path: Path, key: str, name: str) -> None:
    """Who can open a snapshot can seal with its key, and not sign; of data files the signed manifest has digests."""
    filled(tmp_path / "run", key=key)
    path = tmp_path / "run" / name
    recipient = sealed(tmp_path / "run", key=key)
    file = recipient._file(name, path.read_bytes()[:64])
    text = bytes(len(OBJECTS[name]))
    forged = b"".join(SealedBlocks(file, [memoryview(text)]))
    path.write_bytes(forged + path.read_bytes()[-64:])
    with pytest.raises(SealError, match="not signed by"):
        sealed(tmp_path / "run", key=key).get(name)
    for signing in (KeyPair.read(key).signing, Ed25519PrivateKey.generate()):
        path.write_bytes(b"".join(recipient._ring.signed(signing, name, forged)))
        with pytest.raises(SealError, match="not signed by"):
            sealed(tmp_path / "run", key=key).get(name)


def test_an_older_state_that_somebody_puts_back_is_not_noticed(tmp_path: Path, key: str) -> None:
    """The page on sealed runs says so: it was signed, and what is gone leaves no trace."""
    storage = filled(tmp_path / "run", key=key)
    pin = tmp_path / f"run/pins/{ID}.json"
    before = pin.read_bytes()
    storage.put(f"pins/{ID}.json", [memoryview(b"newer")], exclusive=False)
    pin.write_bytes(before)
    assert sealed(tmp_path / "run", key=key).get(f"pins/{ID}.json") == OBJECTS[f"pins/{ID}.json"]
    for name in (MANIFEST, DATA):
        (tmp_path / "run" / name).unlink()
    left = sealed(tmp_path / "run", key=key)
    assert sorted(item.name for item in left.list("")) == sorted(OBJECTS.keys() - {MANIFEST, DATA})
    assert accepted(left) == {name: text for name, text in OBJECTS.items() if name not in (MANIFEST, DATA)}


def test_two_genuine_manifests_of_a_name_say_the_same_and_a_chain_would_refuse_one(tmp_path: Path, key: str) -> None:
    """A repair seals the same bytes again: the earlier object, put back, is accepted, and has another digest."""
    storage, path = filled(tmp_path / "run", key=key), tmp_path / "run" / MANIFEST
    earlier = path.read_bytes()
    storage.put(MANIFEST, [memoryview(storage.get(MANIFEST))], exclusive=False)
    assert path.read_bytes() != earlier
    path.write_bytes(earlier)
    assert sealed(tmp_path / "run", key=key).get(MANIFEST) == OBJECTS[MANIFEST]


def test_rotation_rewrites_keys_and_nothing_else(tmp_path: Path, key: str) -> None:
    new = str(tmp_path / "new-key")
    KeyPair.make(new)
    old_signer, new_signer = KeyPair.read(key).recipient, KeyPair.read(new).recipient
    filled(tmp_path / "run", key=key)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    ring = KeyRing(to=[new_signer], sign=new, key=key, signed_by=[old_signer])
    assert ring.rotate(open_storage(str(tmp_path / "run"))) == 2
    changed = {path.parent.name for path, text in files.items() if path.read_bytes() != text}
    assert changed == {"keys"}
    both = [old_signer, new_signer]
    assert accepted(sealed(tmp_path / "run", key=new)) == OBJECTS
    assert accepted(sealed(tmp_path / "run", key=key)) == {}
    assert accepted(sealed(tmp_path / "run", key=key, signed_by=both)) == {}
    sealed(tmp_path / "run", key=new).put("status.json", [memoryview(b"{}")])
    numbers = {(tmp_path / "run" / name).read_bytes()[8:40] for name in ("ckpt.json", "status.json")}
    assert len(numbers) == 2, "who was removed may know the key of the first one"


@pytest.mark.cells(1)
@pytest.mark.parametrize("how", ["flipped", "shortened", "missing"])
def test_what_opens_a_place_is_there_twice(tmp_path: Path, key: str, how: str) -> None:
    """Any one object below `keys/` may be damaged: the other copy does, and a start and a rotation write both again."""
    filled(tmp_path / "run", key=key)
    whole = {path: path.read_bytes() for path in (tmp_path / "run/keys").iterdir()}
    assert len(whole) == 6
    for path, text in whole.items():
        for bit in range(0, 8 * len(text), 8 * len(text) // 40) if how == "flipped" else [0]:
            flipped = bytearray(text)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped if how == "flipped" else text[: len(text) // 2])
            if how == "missing":
                path.unlink()
            assert accepted(sealed(tmp_path / "run", key=key)) == OBJECTS, (path.name, bit)
        sealed(tmp_path / "run", key=key).put("status.json", [memoryview(b"{}")], exclusive=False)
        assert KeyRing(key=key).rotate(open_storage(str(tmp_path / "run"))) >= 3
        assert accepted(sealed(tmp_path / "run", key=key)) == OBJECTS
        assert len(path.read_bytes()) == len(text)


def test_a_place_whose_root_is_damaged_twice_is_not_begun_anew(tmp_path: Path, key: str) -> None:
    """A new root would make all that is there unreadable for good, where one copy may still be brought back."""
    filled(tmp_path / "run", key=key)
    for name in ("root", "root.copy"):
        (tmp_path / "run/keys" / name).write_bytes(b"damaged")
    with pytest.raises(SealError, match="missing or damaged"):
        sealed(tmp_path / "run", key=key).put("status.json", [memoryview(b"{}")])


class Stopping:
    """A storage that stops after so many puts, as a process that is killed."""

    def __init__(self, inner: Storage, puts: int) -> None:
        self.inner, self.left, self.url = inner, puts, inner.url
        self.get, self.list = inner.get, inner.list

    def put(self, name: str, blocks: Any, *, exclusive: bool = True) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.inner.put(name, blocks, exclusive=exclusive)


@pytest.mark.parametrize("puts", range(11))
def test_a_rotation_that_was_interrupted_continues(tmp_path: Path, key: str, puts: int) -> None:
    """The same command opens what is not wrapped yet, and leaves the rest."""
    new = str(tmp_path / "new-key")
    to, signed_by = [KeyPair.make(new).recipient], [KeyPair.read(key).recipient]
    for count in range(5):
        sealed(tmp_path / "run", key=key).put(f"data/{count}", [memoryview(b"kept")])
    options: dict[str, Any] = {"to": to, "sign": new, "key": key, "signed_by": signed_by}
    inner = open_storage(str(tmp_path / "run"))
    with pytest.raises(KeyboardInterrupt) if puts < 10 else nullcontext():
        KeyRing(**options).rotate(Stopping(inner, puts))  # type: ignore[arg-type]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/keys").iterdir()}
    assert KeyRing(**options).rotate(inner) == 5
    assert sum(path.stat().st_mtime_ns != before[path] for path in before) == 10 - puts // 2 * 2
    storage = sealed(tmp_path / "run", key=new)
    assert [storage.get(f"data/{count}") for count in range(5)] == [b"kept"] * 5


def test_a_rotation_without_the_key_changes_nothing(tmp_path: Path, key: str) -> None:
    """Of two keys the second one cannot be opened: the first one stays as it is, too."""
    other = str(tmp_path / "other-key")
    both = [KeyPair.make(other).recipient, KeyPair.read(key).recipient]
    sealed(tmp_path / "run", key=key).put("data/a", [memoryview(b"a")])
    sealed(tmp_path / "run", key=other).put("data/b", [memoryview(b"b")])
    before = {path: path.read_bytes() for path in (tmp_path / "run/keys").iterdir()}
    with pytest.raises(SealError, match="not sealed to the key at hand"):
        KeyRing(to=both[1:], key=key, signed_by=both).rotate(open_storage(str(tmp_path / "run")))
    assert before == {path: path.read_bytes() for path in (tmp_path / "run/keys").iterdir()}


def test_a_place_that_was_removed_is_sealed_anew_by_each_of_its_writers(tmp_path: Path, key: str) -> None:
    """What they know of the place before is of no use: readers need keys that are there."""
    writers = [sealed(tmp_path / "run", key=key) for _ in range(2)]
    for count, writer in enumerate(writers):
        writer.put(f"data/{count}", [memoryview(b"gone")])
    shutil.rmtree(tmp_path / "run")
    for count, writer in enumerate(writers):
        writer.put(f"data/{count}", [memoryview(b"kept")])
    for reader in (sealed(tmp_path / "run", key=key), *writers):
        assert [reader.get(f"data/{count}") for count in range(2)] == [b"kept"] * 2


def test_a_protected_snapshot_keeps_what_opens_it(tmp_path: Path, key: str) -> None:
    """The store refuses to delete its keys for as long as its data."""
    storage = filled(tmp_path / "run", key=key)
    kept: list[str] = []
    own = replace(storage.inner.capabilities, retain=lambda names: kept.extend(names))
    storage.inner.capabilities = own  # type: ignore[misc]
    assert storage.capabilities.retain is not None
    storage.capabilities.retain([DATA])
    keys = {key_of(tmp_path / "run", name).name for name in OBJECTS}
    assert len(keys) == 2
    assert sorted(kept) == sorted([DATA, *(f"keys/{name}{copy}" for name in (*keys, "root") for copy in ("", ".copy"))])


def test_memory_that_changes_under_a_nonce_leaves_nothing(key: str) -> None:
    ring = KeyRing(key=key)
    inner = Memory()
    storage = SealedStorage(inner, ring)  # type: ignore[arg-type]
    storage.put(DATA, [memoryview(b"x" * 100)])
    file = storage._file(DATA, inner.objects[DATA][:64])
    plain = bytearray(b"x" * 100)
    blocks = SealedBlocks(file, [memoryview(plain)])
    first = b"".join(map(bytes, blocks.views(0, blocks.nbytes, 50)))
    assert first == b"".join(map(bytes, blocks.views(0, blocks.nbytes, 1 << 20))) == b"".join(blocks)
    plain[3] = 1
    with pytest.raises(StorageError, match="has changed"):
        list(blocks.views(0, blocks.nbytes, 50))


def test_a_listing_has_what_was_put(tmp_path: Path, key: str) -> None:
    """Names, and sizes before they were sealed; nothing of keys."""
    storage = filled(tmp_path / "run", key=key)
    assert {item.name: item.nbytes for item in storage.list("")} == {name: len(text) for name, text in OBJECTS.items()}
    storage.delete(MANIFEST, DATA)
    assert accepted(sealed(tmp_path / "run", key=key)).keys() == OBJECTS.keys() - {MANIFEST, DATA}


def test_blocks_may_be_kept_while_the_next_are_made(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages of other packages join them; what fails on the thread that is ahead is raised."""
    monkeypatch.setattr("ckpt_engine.store.storage.sealed._WRITE_BYTES", 2 * CHUNK_BYTES)
    storage = sealed(tmp_path / "run", key=key)
    plain = bytearray(random.Random(1).randbytes(5 * CHUNK_BYTES))
    storage.put(DATA, [memoryview(plain)])
    raw = (tmp_path / "run" / DATA).read_bytes()
    blocks = SealedBlocks(storage._file(DATA, raw[:64]), [memoryview(plain)])
    assert len(blocks) == 3
    assert b"".join(blocks) == raw == b"".join(blocks[index] for index in range(3))
    assert sealed(tmp_path / "run", key=key).get(DATA) == plain
    plain[3 * CHUNK_BYTES] ^= 1
    with pytest.raises(StorageError, match="has changed"):
        list(blocks)


def test_a_key_file_is_private_and_its_recipient_is_checked(tmp_path: Path, key: str) -> None:
    assert Path(key).stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageExistsError):
        KeyPair.make(key)
    pair = KeyPair.read(key)
    parse_recipient(pair.recipient)
    assert pair.recipient in Path(key).read_text()
    for text in (pair.recipient[:-1], pair.recipient.replace("a", "b", 1), "age1" + pair.recipient[4:], ""):
        with pytest.raises(ConfigError, match="recipient"):
            parse_recipient(text)
    Path(key).write_text("nothing\n")
    with pytest.raises(ConfigError, match="key"):
        KeyPair.read(key)


class TestSealed(StorageContract):
    """What every storage keeps, a sealed one keeps too."""

    @pytest.fixture
    def storage(self, tmp_path: Path, key: str) -> SealedStorage:
        return sealed(tmp_path / "run", key=key)

    def test_the_url_leads_to_the_same_objects(self, storage: Any) -> None:
        """The test of the contract is left out."""
        pytest.skip("this storage needs its keys beside the URL")


def run_python(code: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_the_library_is_imported_only_where_something_is_sealed(tmp_path: Path) -> None:
    """Without it the error names the extra."""
    begin = f"import sys; from ckpt_engine.store.storage import open_storage; folder = {str(tmp_path)!r};"
    plain = "open_storage(folder).put('a', [memoryview(b'b')]); print('cryptography' in sys.modules)"
    assert run_python(begin + plain) == "False\n"
    without = "sys.modules['cryptography'] = None; open_storage(folder, {'seal': {}})"
    assert "pip install 'ckpt-engine[seal]'" in run_python(begin + without)
