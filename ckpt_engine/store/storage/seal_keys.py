"""The keys of sealed places.

Each process that writes makes a key to sign with, and a secret to encrypt with. An object `keys/<public half>`
has the secret, wrapped for each recipient by HPKE (MLKEM768_X25519, HKDF-SHA256, AES-256-GCM). At its end is the
Ed25519 signature of the place, the name and the bytes by a key of `seal.signed_by`. What is below `keys/` is stored
twice, because nothing opens without it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

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
SIGNATURE_BYTES = 64
_ROOT = f"{KEYS}root"
_COPIES = ("", ".copy")
"""What the names of both copies of an object end with."""
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SECRET = "CKPT-SECRET-KEY-1-"
_RECIPIENT = "ckpt1-"
_SECRET_BYTES = 64 + 32 + 32
"""The seed of ML-KEM-768, the X25519 key and the Ed25519 key."""
_MLKEM_BYTES = 1184
_PUBLIC_BYTES = _MLKEM_BYTES + 32 + 32
_CHECK_BYTES = 4
_KEY_BYTES = 32
_WRAP_BYTES = 1088 + 32 + _KEY_BYTES + 16
"""Both encapsulations, and the key with its tag."""
_COMMAND_SECONDS = 60.0
"""How long a command may take that prints a key."""


def _text_of(data: bytes) -> str:
    return urlsafe_b64encode(data + _check_of(data)).decode()


def _data_of(text: str, prefix: str, nbytes: int, what: str) -> bytes:
    with suppress(ValueError):
        data = urlsafe_b64decode(text.removeprefix(prefix))
        if text == prefix + _text_of(data[:-_CHECK_BYTES]) and len(data) == nbytes + _CHECK_BYTES:
            return data[:-_CHECK_BYTES]
    raise ConfigError(f"{what} begins with {prefix} and is copied whole: this is none", hint="`ckpt keys show FILE`")


def _printed_by(command: Sequence[str]) -> str:
    """What a command prints, without a shell. No error has any of it, as it may be a secret."""
    with suppress(subprocess.SubprocessError):  # which has what it printed
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    raise ConfigError(
        f"{command[0]} gave no key: it failed, or took more than {_COMMAND_SECONDS:.0f} s",
        hint="run the command that seal names, to see why",
    )


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
    def read(cls, source: str | Sequence[str]) -> Self:
        """The keys in a file, or in what a command prints.

        Raises:
            ConfigError: it has none.
            StorageError: it cannot be read or called.
        """
        where = source if isinstance(source, str) else source[0]
        with translating("read the key", where):
            text = Path(where).expanduser().read_text(errors="replace") if where == source else _printed_by(source)
        lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
        return cls.of(_data_of("".join(lines), _SECRET, _SECRET_BYTES, f"{where}: the text of a key"))

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


class KeyRing:
    """The keys of one sealed place. Any thread.

    Args:
        to: recipients; none: that of `key`, else of `sign`.
        sign: file of the key that signs, or a command that prints it; None: `key`.
        key: the same of the key that opens; None: nothing can be opened but what this process has sealed.
        signed_by: recipients whose signatures count; none: the signer's own.

    Attributes:
        root: tells this place from others, so that nothing of one is accepted in another; empty before a key is used.

    Raises:
        ConfigError, StorageError: these are no keys.
    """

    def __init__(
        self,
        to: Sequence[str] = (),
        sign: str | Sequence[str] | None = None,
        key: str | Sequence[str] | None = None,
        signed_by: Sequence[str] = (),
    ) -> None:
        self._pair = KeyPair.read(key) if key else None
        self._signer = KeyPair.read(sign) if sign else self._pair
        pairs = [one.recipient for one in (self._signer, self._pair) if one is not None]
        self._to = [parse_recipient(text)[0] for text in to or pairs[-1:]]
        self._accepted = [parse_recipient(text)[1] for text in signed_by or pairs[:1]]
        if not self._accepted:
            raise ConfigError(
                "seal accepts no signature", hint=f"give key, sign or signed_by, or set {names.KEY_VARIABLE}"
            )
        self._aim = hashlib.sha256(" ".join([*sorted(to or pairs[-1:]), *pairs[:1]]).encode()).digest()
        """Tells for whom keys are wrapped, and who signs that."""
        self.root = b""
        self._own: dict[bytes, Ed25519PrivateKey] = {}
        """The key with which this process signs, by the root: the place may be removed, and made again."""
        self._secrets: dict[bytes, bytes] = {}

    def own(self, storage: Storage) -> Ed25519PrivateKey:
        """The key with which this process signs; the secret to encrypt with is stored under its public half.

        Raises:
            SealError: there is no key that vouches for it.
            StorageError
        """
        root = self.root = _root_in(storage) or _make_root(storage)
        if root not in self._own:  # two threads may make one each: both count
            for copy in _COPIES:
                storage.put(_ROOT + copy, [memoryview(root + _check_of(root))], exclusive=False)
            signing, secret = Ed25519PrivateKey.generate(), os.urandom(_KEY_BYTES)
            public = signing.public_key().public_bytes_raw()
            self._publish(storage, f"{KEYS}{public.hex()}", secret)
            self._secrets[public] = secret
            self._own[root] = signing
        return self._own[root]

    def secret(self, storage: Storage, public: bytes) -> bytes:
        """What a process encrypts with that signs with the key of this public half.

        Raises:
            SealError: it is missing, not signed by those that count, or not for the key at hand.
        """
        if public not in self._secrets:
            self._secrets[public] = self._opened(storage, f"{KEYS}{public.hex()}")
        return self._secrets[public]

    def _opened(self, storage: Storage, name: str) -> bytes:
        bodies, where = self._bodies(storage, name), f"{storage.url}/{name}"
        if self._pair is None:
            raise SealError(
                f"{where} cannot be opened: there is no key", hint=f"give seal.key, or set {names.KEY_VARIABLE}"
            )
        starts = range(len(self._aim), max(map(len, bodies)), _WRAP_BYTES)
        for wrap in (body[start : start + _WRAP_BYTES] for body in bodies for start in starts):
            with suppress(InvalidTag, ValueError):
                return _SUITE.decrypt(wrap, self._pair.encryption, self.root + name.encode())
        raise SealError(f"{where} is not sealed to the key at hand", hint="use the key of one of its recipients")

    def _bodies(self, storage: Storage, name: str) -> list[bytes]:
        """Of the copies of an object those that are signed; one at least."""
        self.root = _root_in(storage)
        refused, found = _missing(storage, name), list[bytes]()
        for copy in _COPIES:
            try:
                data = storage.get(name + copy, 0, names.SMALL_BYTES)
                found.append(self.verified(self._accepted, name, data, storage.url))
            except StorageMissingError:
                continue
            except SealError as err:
                refused = err
        if not found:
            raise refused
        return found

    def _publish(self, storage: Storage, name: str, secret: bytes) -> None:
        if self._signer is None:
            raise SealError(f"{storage.url} is only read: no key signs", hint="give seal.sign or seal.key")
        wraps = [_SUITE.encrypt(secret, one, self.root + name.encode()) for one in self._to]
        text = self.signed(self._signer.signing, name, self._aim + b"".join(wraps))
        for copy in reversed(_COPIES):  # an interrupted rotation is recognised by the first one
            storage.put(name + copy, text, exclusive=False)

    def signed(self, signing: Ed25519PrivateKey, name: str, body: bytes | memoryview) -> list[memoryview]:
        """The bytes of an object, and their signature."""
        return [memoryview(body), memoryview(signing.sign(self._statement(name, body)))]

    def verified(self, signers: Sequence[Ed25519PublicKey], name: str, data: bytes, url: str) -> bytes:
        """The bytes of an object without their signature.

        Raises:
            SealError: none of these has signed them under this name, for this place.
        """
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        for signer in signers:
            with suppress(InvalidSignature):
                signer.verify(signature, self._statement(name, body))
                return body
        raise SealError(
            f"{url}/{name} is not signed by one of seal.signed_by",
            hint="name its signer there if you trust it; else somebody has changed, moved or written this",
        )

    def _statement(self, name: str, body: bytes | memoryview) -> bytes:
        return b"%s%s %s" % (self.root, name.encode(), hashlib.sha256(body).digest())

    def rotate(self, storage: Storage) -> int:
        """Wrap each key for the recipients of now, signed by the signer of now; how many there are.

        After an interruption it continues.

        Raises:
            SealError: one of them cannot be opened; none is changed then.
        """
        if self._signer is not None:  # what an interrupted rotation has wrapped
            self._accepted.append(self._signer.signing.public_key())
        found = {item.name.removesuffix(_COPIES[1]) for item in storage.list(KEYS)} - {_ROOT}
        stale = [name for name in sorted(found) if not self._is_current(self._bodies(storage, name))]
        for name, secret in [(name, self._opened(storage, name)) for name in stale]:
            self._publish(storage, name, secret)
        return len(found)

    def _is_current(self, bodies: Sequence[bytes]) -> bool:
        return len(bodies) == len(_COPIES) and all(body.startswith(self._aim) for body in bodies)


def _make_root(storage: Storage) -> bytes:
    root = os.urandom(_KEY_BYTES)
    with suppress(StorageExistsError):  # another rank has just made it
        storage.put(_ROOT, [memoryview(root + _check_of(root))])
    if not (there := _root_in(storage)):
        raise _missing(storage, _ROOT)
    return there


def _root_in(storage: Storage) -> bytes:
    """What tells a place from others; empty: there is none that is whole. Earlier versions have stored no checksum."""
    for copy in _COPIES:
        with suppress(StorageMissingError):
            data = storage.get(_ROOT + copy, 0, _KEY_BYTES + _CHECK_BYTES)
            root, check = data[:_KEY_BYTES], data[_KEY_BYTES:]
            if len(root) == _KEY_BYTES and check in (b"", _check_of(root)):
                return root
    return b""


def _check_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]


def _missing(storage: Storage, name: str) -> SealError:
    return SealError(
        f"what it takes to open {storage.url} is missing or damaged: {name} or {_ROOT}",
        hint="bring it back from a copy, or move this place away where a further tier has the run",
    )
