"""The keys of sealed places.

An object `keys/<snapshot>-<random>` is a statement in JSON, and at its end the Ed25519 signature of its bytes. The
statement has the key, wrapped for each recipient by HPKE (MLKEM768_X25519, HKDF-SHA256, AES-256-GCM), its commitment,
the place that it belongs to, and the manifests that were sealed with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from ckpt_engine.errors import ConfigError, SealError, StorageExistsError, StorageMissingError
from ckpt_engine.store import names
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import translating

KEYS = "keys/"
KEY_VARIABLE = "CKPT_KEY_FILE"
RUN = "run"
"""In place of a snapshot: what is sealed that belongs to none."""
_ROOT = f"{KEYS}root"
_ROOT_BYTES = 32
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SECRET = "CKPT-SECRET-KEY-1-"
_RECIPIENT = "ckpt1-"
_SECRET_BYTES = 64 + 32 + 32
"""The seed of ML-KEM-768, the X25519 key and the Ed25519 key."""
_MLKEM_BYTES = 1184
_PUBLIC_BYTES = _MLKEM_BYTES + 32 + 32
_CHECK_BYTES = 4
_SIGNATURE_BYTES = 64


def _text_of(data: bytes) -> str:
    return urlsafe_b64encode(data + hashlib.sha256(data).digest()[:_CHECK_BYTES]).decode()


def _data_of(text: str, prefix: str, nbytes: int, what: str) -> bytes:
    with suppress(ValueError):
        data = urlsafe_b64decode(text.removeprefix(prefix))
        if text == prefix + _text_of(data[:-_CHECK_BYTES]) and len(data) == nbytes + _CHECK_BYTES:
            return data[:-_CHECK_BYTES]
    raise ConfigError(f"{what} begins with {prefix} and is copied whole: this is none", hint="`ckpt keys show FILE`")


def parse_recipient(text: str) -> tuple[MLKEM768X25519PublicKey, Ed25519PublicKey]:
    """The public keys of a recipient: what is sealed to, and what checks signatures.

    Raises:
        ConfigError: it is none.
    """
    data = _data_of(text, _RECIPIENT, _PUBLIC_BYTES, "a recipient")
    kem = MLKEM768PublicKey.from_public_bytes(data[:_MLKEM_BYTES])
    agreement = X25519PublicKey.from_public_bytes(data[_MLKEM_BYTES:-32])
    return MLKEM768X25519PublicKey(kem, agreement), Ed25519PublicKey.from_public_bytes(data[-32:])


@dataclass(frozen=True, slots=True)
class KeyPair:
    """What a key file has: `recipient` is its public half, as text."""

    encryption: MLKEM768X25519PrivateKey = field(repr=False)
    signing: Ed25519PrivateKey = field(repr=False)
    recipient: str

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """The keys that follow from these bytes."""
        kem = MLKEM768PrivateKey.from_seed_bytes(secret[:64])
        agreement = X25519PrivateKey.from_private_bytes(secret[64:96])
        signing = Ed25519PrivateKey.from_private_bytes(secret[96:])
        public = b"".join(one.public_key().public_bytes_raw() for one in (kem, agreement, signing))
        return cls(MLKEM768X25519PrivateKey(kem, agreement), signing, _RECIPIENT + _text_of(public))

    @classmethod
    def read(cls, path: str) -> Self:
        """The keys in a file.

        Raises:
            ConfigError: it has none.
            StorageError: it cannot be read.
        """
        with translating("read the key", path), Path(path).expanduser().open(errors="replace") as file:
            lines = [line.strip() for line in file if not line.startswith("#")]
        return cls.of(_data_of("".join(lines), _SECRET, _SECRET_BYTES, f"{path}: the text of a key"))

    @classmethod
    def make(cls, path: str) -> Self:
        """New keys in a new file that only its owner can read.

        Raises:
            StorageExistsError: there is such a file.
            StorageError: it cannot be written.
        """
        secret = os.urandom(_SECRET_BYTES)
        made = cls.of(secret)
        text = f"# Secret: opens what is sealed to it, and signs.\n# {made.recipient}\n{_SECRET}{_text_of(secret)}\n"
        with translating("make the key", path):
            Path(path).expanduser().touch(0o600, exist_ok=False)
            Path(path).expanduser().write_text(text)
        return made


@dataclass(slots=True)
class SnapshotKey:
    """A key and what its object says.

    Args:
        name: of its object.
        manifests: digests of the manifests that were sealed with it.
        is_stored: whether its object is there.
    """

    name: str
    secret: bytes = field(repr=False)
    manifests: list[str] = field(default_factory=list)
    is_stored: bool = False

    def digest(self, name: str, text: bytes | memoryview) -> str:
        """What its object says of a manifest; tells nothing of it to those without the key."""
        return hashlib.sha256(b"%s%s %s" % (self.secret, name.encode(), text)).hexdigest()


class KeyRing:
    """The keys of one sealed place. Any thread.

    Args:
        to: recipients; none: that of `key`, else of `sign`.
        sign: file of the key that signs; None: `key`.
        key: file of the key that opens; None: nothing can be opened.
        signed_by: recipients whose signatures count; none: the signer's own.

    Attributes:
        root: tells this place from others, so that nothing of one is accepted in another; empty before a key is used.

    Raises:
        ConfigError, StorageError: these are no keys.
    """

    def __init__(
        self, to: Sequence[str] = (), sign: str | None = None, key: str | None = None, signed_by: Sequence[str] = ()
    ) -> None:
        self._pair = KeyPair.read(key) if key else None
        self._signer = KeyPair.read(sign) if sign else self._pair
        pairs = [one.recipient for one in (self._signer, self._pair) if one is not None]
        self._to = [parse_recipient(text)[0] for text in to or pairs[-1:]]
        self._accepted = [parse_recipient(text)[1] for text in signed_by or pairs[:1]]
        if not self._accepted:
            raise ConfigError("seal accepts no signature", hint=f"give key, sign or signed_by, or set {KEY_VARIABLE}")
        self._lock = threading.RLock()
        self.root = b""
        self._own: dict[str, SnapshotKey] = {}
        self._opened: dict[str, SnapshotKey] = {}

    def _read_root(self, storage: Storage) -> None:
        try:
            self.root = storage.get(_ROOT, 0, _ROOT_BYTES)
        except StorageMissingError as err:
            raise SealError(f"{storage.url}/{_ROOT} is missing: nothing there can be opened") from err

    def key_for(self, storage: Storage, owner: str) -> SnapshotKey:
        """This process's key to seal with what belongs to a snapshot, or to the run.

        Raises:
            SealError: nothing can be signed.
        """
        with self._lock:
            if self._signer is None:
                raise SealError(f"{storage.url} is only read: no key signs", hint="give seal.sign or seal.key")
            name = f"{KEYS}{owner}-{os.urandom(8).hex()}"
            made = self._own.setdefault(owner, SnapshotKey(name, os.urandom(32)))
            return self._opened.setdefault(made.name, made)

    def opened(self, storage: Storage, name: str) -> SnapshotKey:
        """The key of this name.

        Raises:
            SealError: it is missing, not signed by those that count, or not for the key at hand.
        """
        with self._lock:
            if name not in self._opened:
                self._opened[name] = self._open(storage, name)
            return self._opened[name]

    def _open(self, storage: Storage, name: str) -> SnapshotKey:
        where = f"{storage.url}/{name}"
        self._read_root(storage)
        try:
            data = storage.get(name, 0, names.SMALL_BYTES)
        except StorageMissingError as err:
            raise SealError(f"{where} is missing: what it is the key of cannot be opened") from err
        text, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        for signer in self._accepted:
            with suppress(InvalidSignature):
                signer.verify(signature, text)
                break
        else:
            raise SealError(
                f"{where} is not signed by one of seal.signed_by",
                hint="name its signer there if you trust it; else somebody else wrote this",
            )
        row = json.loads(text)
        if (row["key"], row["root"]) != (name, self.root.hex()):
            raise SealError(f"{where} belongs to another place or snapshot: somebody has moved it")
        if self._pair is None:
            raise SealError(f"{where} cannot be opened: there is no key", hint=f"give seal.key, or set {KEY_VARIABLE}")
        secret = _unwrapped(row["to"], self._pair, self.root + name.encode())
        if secret is None or hashlib.sha256(secret).hexdigest() != row["commitment"]:
            raise SealError(f"{where} is not sealed to the key at hand", hint="use the key of one of its recipients")
        return SnapshotKey(name, secret, row["manifests"], is_stored=True)

    def publish(self, storage: Storage, key: SnapshotKey) -> None:
        """Store the object of a key, signed; it replaces an earlier one.

        Raises:
            StorageError
        """
        assert self._signer is not None
        with self._lock:
            try:
                self._read_root(storage)
            except SealError:  # a new place, or one that was removed
                for one in self._own.values():
                    one.is_stored = False
                with suppress(StorageExistsError):  # another rank has just made it
                    storage.put(_ROOT, [memoryview(os.urandom(_ROOT_BYTES))])
                self._read_root(storage)
            statement = {
                "key": key.name,
                "root": self.root.hex(),
                "commitment": hashlib.sha256(key.secret).hexdigest(),
                "manifests": key.manifests,
                "to": [
                    urlsafe_b64encode(_SUITE.encrypt(key.secret, one, self.root + key.name.encode())).decode()
                    for one in self._to
                ],
            }
            text = json.dumps(statement).encode()
            signature = self._signer.signing.sign(text)
            storage.put(key.name, [memoryview(text), memoryview(signature)], exclusive=False)
            key.is_stored = True

    def rotate(self, storage: Storage) -> int:
        """Wrap each key for the recipients of now, signed by the signer of now; how many there are.

        Raises:
            SealError: one of them cannot be opened.
        """
        found = [item.name for item in storage.list(KEYS) if item.name != _ROOT]
        for key in [self.opened(storage, name) for name in found]:
            self.publish(storage, key)
        return len(found)


def _unwrapped(wraps: Iterable[Any], pair: KeyPair, info: bytes) -> bytes | None:
    for wrap in wraps:
        with suppress(InvalidTag, ValueError):
            return _SUITE.decrypt(urlsafe_b64decode(wrap), pair.encryption, info)
    return None
