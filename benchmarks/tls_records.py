"""The server's side of TLS 1.3 that decrypts only what it looks at: a body is counted by the lengths of its records.

So that an endpoint which discards bodies costs the client as little under TLS as it does without.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import struct
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.x509.oid import NameOID

_HEADER_BYTES = 5
_SEAL_BYTES = 17
"""Of each record: its real type, and the tag."""
_DATA = 23
_CHUNK_BYTES = 1 << 20
_KEYS = {"TLS_AES_256_GCM_SHA384": (32, hashes.SHA384()), "TLS_AES_128_GCM_SHA256": (16, hashes.SHA256())}


def make_certificate(folder: Path, host: str) -> Path:
    """A file with a certificate for the address `host` that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(tz=datetime.UTC)
    day = datetime.timedelta(days=1)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "certificate.pem"
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


class Records:
    """A connection after its handshake.

    Args:
        connection: of a client that has just connected.
        certificate: made by `make_certificate`.

    Raises:
        OSError: the client left, or does not like the certificate.
    """

    def __init__(self, connection: socket.socket, certificate: str) -> None:
        self._socket = connection
        self._buffer = bytearray(_CHUNK_BYTES)
        self._from = self._to = 0
        self._plain = b""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        secrets = os.memfd_create("secrets", os.MFD_CLOEXEC)
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.load_cert_chain(certificate)
            context.keylog_filename = f"/proc/self/fd/{secrets}"
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._shake_hands()
            lines = os.pread(secrets, 1 << 16, 0).decode()
        finally:
            os.close(secrets)
        [secret] = [line.split()[2] for line in lines.splitlines() if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")]
        cipher = self._tls.cipher()
        assert cipher is not None
        nbytes, hashed = _KEYS[cipher[0]]

        def derived(label: bytes, length: int) -> bytes:
            info = struct.pack(">HB", length, 6 + len(label)) + b"tls13 " + label + b"\0"
            return HKDFExpand(hashed, length, info).derive(bytes.fromhex(secret))

        self._key = AESGCM(derived(b"key", nbytes))
        self._iv = int.from_bytes(derived(b"iv", 12), "big")
        self._number = 0

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._flush()
                record = self._next()
                if not record:
                    raise ConnectionResetError("the client left") from None
                self._incoming.write(record)
            finally:
                self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    def sendall(self, data: bytes) -> None:
        """Encrypt and send."""
        self._tls.write(data)
        self._flush()

    def recv(self, nbytes: int) -> bytes:
        """At most so many bytes, decrypted; none: the client has ended."""
        if not self._plain:
            self._plain = self._opened(self._next())
        found, self._plain = self._plain[:nbytes], self._plain[nbytes:]
        return found

    def discard(self, nbytes: int) -> bool:
        """Pass so many bytes over; false if the client left."""
        here = min(nbytes, len(self._plain))
        self._plain = self._plain[here:]
        nbytes -= here
        while nbytes > 0:
            if not self._has_whole_record():
                return False
            length = self._length() - _HEADER_BYTES - _SEAL_BYTES
            if length > nbytes:
                self._plain = self._opened(self._next())[nbytes:]
                return True
            self._from += length + _HEADER_BYTES + _SEAL_BYTES
            self._number += 1
            nbytes -= length
        return True

    def _opened(self, record: bytes) -> bytes:
        if not record:
            return b""
        nonce = (self._iv ^ self._number).to_bytes(12, "big")
        self._number += 1
        inner = self._key.decrypt(nonce, record[_HEADER_BYTES:], record[:_HEADER_BYTES]).rstrip(b"\0")
        return inner[:-1] if inner[-1] == _DATA else b""

    def _next(self) -> bytes:
        """A whole record, as it came; nothing: the client has ended."""
        if not self._has_whole_record():
            return b""
        start, self._from = self._from, self._from + self._length()
        return bytes(self._buffer[start : self._from])

    def _length(self) -> int:
        return _HEADER_BYTES + (self._buffer[self._from + 3] << 8 | self._buffer[self._from + 4])

    def _has_whole_record(self) -> bool:
        while self._to - self._from < _HEADER_BYTES or self._to - self._from < self._length():
            if self._from:
                self._buffer[: self._to - self._from] = self._buffer[self._from : self._to]
                self._from, self._to = 0, self._to - self._from
            got = self._socket.recv_into(memoryview(self._buffer)[self._to :])
            if not got:
                return False
            self._to += got
        return True
