"""Sealed storages: what comes back is what was put there by an accepted signer, or an error with a code."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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
from ckpt_engine.store.storage.sealed import CHUNK_BYTES, SealedBlocks, SealedFile, SealedStorage, plain_bytes
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
    """A place with one of each kind of object."""
    storage = sealed(folder, **options)
    for name, text in OBJECTS.items():
        storage.put(name, [memoryview(text)])
    return storage


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
    assert plain_bytes(len(text)) == nbytes
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


def test_of_2000_flipped_bits_none_is_accepted(tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    draw = random.Random(1)
    whole = accepted(sealed(tmp_path / "run", key=key))
    assert whole == OBJECTS
    for _ in range(2000):
        path = draw.choice(files)
        text = path.read_bytes()
        bit = draw.randrange(len(text) * 8)
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = accepted(sealed(tmp_path / "run", key=key))
        path.write_bytes(text)
        assert found.items() < OBJECTS.items(), (path, bit)


def test_objects_that_change_places_are_refused(tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    for one in files:
        for other in files:
            if one != other:
                text = one.read_bytes()
                one.write_bytes(other.read_bytes())
                assert accepted(sealed(tmp_path / "run", key=key)).items() < OBJECTS.items(), (one, other)
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
    forged = filled(tmp_path / "forged", to=[KeyPair.read(key).recipient], sign=stranger)
    with pytest.raises(SealError, match="not signed by"):
        sealed(tmp_path / "forged", key=key).get(MANIFEST)
    with pytest.raises(SealError, match="no key"):
        sealed(tmp_path / "forged", sign=stranger).get(MANIFEST)
    assert forged.get(MANIFEST) == OBJECTS[MANIFEST]  # it knows the keys that it made
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
    next((tmp_path / "run/keys").glob(f"{ID}*")).unlink()
    with pytest.raises(SealError, match="is missing"):
        sealed(tmp_path / "run", key=key).get(DATA)
    plain = open_storage(str(tmp_path / "plain"))
    plain.put("ckpt.json", [memoryview(b"{}")])
    with pytest.raises(SealError, match="not sealed"):
        sealed(tmp_path / "plain", key=key).get("ckpt.json")


def test_a_manifest_that_a_recipient_has_changed_is_refused(tmp_path: Path, key: str) -> None:
    filled(tmp_path / "run", key=key)
    recipient = sealed(tmp_path / "run", key=key)
    opened = recipient._file(MANIFEST, (tmp_path / "run" / MANIFEST).read_bytes()[:64])
    text = b'{"manifest": 2}'
    made = SealedFile.of(MANIFEST, opened.header, opened.key, recipient._ring.root)
    (tmp_path / "run" / MANIFEST).write_bytes(b"".join(SealedBlocks(made, [memoryview(text)])))
    with pytest.raises(SealError, match="not the manifest that was signed"):
        sealed(tmp_path / "run", key=key).get(MANIFEST)


def test_rotation_rewrites_keys_and_nothing_else(tmp_path: Path, key: str) -> None:
    new = str(tmp_path / "new-key")
    KeyPair.make(new)
    old_signer, new_signer = KeyPair.read(key).recipient, KeyPair.read(new).recipient
    filled(tmp_path / "run", key=key)
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    ring = KeyRing(to=[new_signer], sign=new, key=key, signed_by=[old_signer])
    assert ring.rotate(open_storage(str(tmp_path / "run"))) == 3
    changed = {path.parent.name for path, text in files.items() if path.read_bytes() != text}
    assert changed == {"keys"}
    assert accepted(sealed(tmp_path / "run", key=new)) == OBJECTS
    assert accepted(sealed(tmp_path / "run", key=key)) == {}
    assert accepted(sealed(tmp_path / "run", key=key, signed_by=[new_signer])) == {}
    sealed(tmp_path / "run", key=new).put("status.json", [memoryview(b"{}")])
    numbers = {(tmp_path / "run" / name).read_bytes()[8:16] for name in ("ckpt.json", "status.json")}
    assert len(numbers) == 2, "who was removed may know the key of the first one"


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


def test_the_keys_of_a_snapshot_go_with_its_data(tmp_path: Path, key: str) -> None:
    storage = filled(tmp_path / "run", key=key)
    keys = tmp_path / "run/keys"
    storage.delete(f"snapshots/{OLDER}.json")
    assert list(keys.glob(f"{OLDER}*"))
    storage.delete(f"data/{OLDER}-r00000.safetensors")
    assert not list(keys.glob(f"{OLDER}*"))
    assert accepted(sealed(tmp_path / "run", key=key)).keys() == OBJECTS.keys() - {
        f"snapshots/{OLDER}.json",
        f"data/{OLDER}-r00000.safetensors",
    }
    assert {item.name: item.nbytes for item in storage.list("")} == {
        name: len(text) for name, text in accepted(storage).items()
    }


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
