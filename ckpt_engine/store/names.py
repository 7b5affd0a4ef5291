"""The names of the objects under a run's root.

```
ckpt.json                            the run record
lease.json                           who writes the run
snapshots/<id>.json                  manifests; <id> = <seq>-s<step>-<random>
snapshots/<id>.copy.json             the same again, at a place with parity
snapshots/<id>.damaged.json          what of a snapshot is damaged at this place, where nothing mends it
data/<id>-r<rank>[-p<part>].safetensors   data files
data/<data file>.parity-<data>-<parity>-<bytes>   the parity of a data file of so many bytes
parts/<id>-r<rank>.json              part records: what one of several ranks has written of a snapshot to be committed
parts/<id>-wanted.json               asks the nodes for their parts of a snapshot that each of them has some of
pins/<id>.json                       pins: snapshots that retention leaves alone
status.json                          what the writer of several tiers was doing last
catalog.json                         what many manifests say: a cache
rollback.json                        the last time that the run had to go back
attempts.json                        who trained, how long, and how that ended
scrub.json                           what `ckpt scrub` has verified, and when
replay/<milliseconds>-<random>-r<rank>.rows   what each of the last steps of a process did
```
Whatever does not match is foreign: never read as ours, never deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache

from ckpt_engine.errors import SealError

RECORD = "ckpt.json"
LEASE = "lease.json"
STATUS = "status.json"
CATALOG = "catalog.json"
ROLLBACK = "rollback.json"
ATTEMPTS = "attempts.json"
SCRUB = "scrub.json"
MANIFESTS = "snapshots/"
DATA = "data/"
PINS = "pins/"
PARTS = "parts/"
ROWS = "replay/"
SEALED = b"CKPTSEAL"
"""What each sealed object begins with."""
KEY_VARIABLE = "CKPT_KEY_FILE"
"""The environment variable that names the file of the key that opens."""

MANIFEST_BYTES = 128 << 20
"""The most that a manifest, a part record or the catalog may have. Data files have no limit."""
SMALL_BYTES = 1 << 20
"""The most that any other of our JSON files may have, and what a pin may add to its manifest."""
ROWS_BYTES = 8 << 20
"""The most that a file of rows may have."""

_REMEMBERED = 4096
"""Names that were taken apart: a listing shows the same ones again and again."""
_ID = re.compile(r"([0-9]{8,})-s([0-9]{10,})-([0-9a-f]{8})")
_MANIFEST = re.compile(rf"snapshots/({_ID.pattern})\.json")
_COPY = re.compile(rf"snapshots/({_ID.pattern})\.copy\.json")
_QUARANTINE = re.compile(rf"snapshots/({_ID.pattern})\.damaged\.json")
_PIN = re.compile(rf"pins/({_ID.pattern})\.json")
_PART = re.compile(rf"parts/({_ID.pattern})-r([0-9]{{5,}})\.json")
_WANTED = re.compile(rf"parts/({_ID.pattern})-wanted\.json")
_ROWS = re.compile(r"replay/[0-9]{13}-[0-9a-f]{8}-r([0-9]{5,})\.rows")
_DATA = re.compile(rf"data/({_ID.pattern})-r([0-9]{{5,}})(-p[0-9]{{3,}})?\.safetensors")
_OF_PARITY = r"\.parity-([1-9]|1[0-9]|2[0-4])-([1-8])-([1-9][0-9]*)"
_PARITY = re.compile(rf"({_DATA.pattern}){_OF_PARITY}")
_OWNED = re.compile(rf"{_DATA.pattern}({_OF_PARITY})?")


@dataclass(frozen=True, slots=True)
class ParsedId:
    """What a snapshot's id says: its age (`seq`) and its training step."""

    id: str
    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class ParityName:
    """What the name of a parity object says.

    Args:
        file: the name of the data file.
        data, parity: so many ranges that the file is cut into, and so many parts that were made from them.
        nbytes: of the data file.
    """

    file: str
    data: int
    parity: int
    nbytes: int

    @property
    def range_bytes(self) -> int:
        """The bytes of each range; the last one may have fewer."""
        return -(-self.nbytes // self.data)

    def __str__(self) -> str:
        return f"{self.file}.parity-{self.data}-{self.parity}-{self.nbytes}"


def snapshot_id(seq: int, step: int) -> str:
    """A new unique id. Its randomness comes from the operating system, never from the program's random streams.

    Raises:
        ValueError: a negative number.
    """
    return _numbered(seq, step, os.urandom(4).hex())


def session_id(session: str, seq: int, step: int) -> str:
    """The id that every rank of a session gives to a snapshot without asking the others.

    Args:
        session: unique text that the ranks have agreed on at their start.

    Raises:
        ValueError: a negative number.
    """
    return _numbered(seq, step, hashlib.sha256(f"{session}/{seq}/{step}".encode()).hexdigest()[:8])


def _numbered(seq: int, step: int, ending: str) -> str:
    if seq < 0 or step < 0:
        raise ValueError(f"seq and step must not be negative: seq={seq}, step={step}")
    return f"{seq:08d}-s{step:010d}-{ending}"


@lru_cache(_REMEMBERED)
def parse_id(snapshot: str) -> ParsedId | None:
    """The parts of a snapshot's id, or None if this is no id."""
    match = _ID.fullmatch(snapshot)
    return ParsedId(snapshot, int(match[1]), int(match[2])) if match else None


@lru_cache(_REMEMBERED)
def seq_of(snapshot: str | None) -> int:
    """The number in a snapshot's id; -1: there is none."""
    parsed = parse_id(snapshot or "")
    return -1 if parsed is None else parsed.seq


def manifest_name(snapshot: str) -> str:
    """The object name of a snapshot's manifest."""
    return f"{MANIFESTS}{snapshot}.json"


def data_name(snapshot: str, rank: int = 0, part: int = 0) -> str:
    """The object name of the `part`-th data file that `rank` wrote for a snapshot."""
    return f"{DATA}{snapshot}-r{rank:05d}{f'-p{part:03d}' if part else ''}.safetensors"


def part_name(snapshot: str, rank: int) -> str:
    """The object name of the part record of `rank`."""
    return f"{PARTS}{snapshot}-r{rank:05d}.json"


@lru_cache(_REMEMBERED)
def part_owner(name: str) -> tuple[ParsedId, int] | None:
    """The snapshot and the rank whose part record has this object name, or None if it is not a part record's name."""
    match = _PART.fullmatch(name)
    owner = _owner(match)
    return (owner, int(match[5])) if match and owner else None


def wanted_name(snapshot: str) -> str:
    """The object name of what asks for the parts of a snapshot."""
    return f"{PARTS}{snapshot}-wanted.json"


@lru_cache(_REMEMBERED)
def wanted_id(name: str) -> ParsedId | None:
    """The snapshot whose parts the object of this name asks for, or None if it asks for none."""
    return _owner(_WANTED.fullmatch(name))


def pin_name(snapshot: str) -> str:
    """The object name of a snapshot's pin."""
    return f"{PINS}{snapshot}.json"


@lru_cache(_REMEMBERED)
def pin_id(name: str) -> ParsedId | None:
    """The snapshot whose pin has this object name, or None if it is not a pin's name."""
    return _owner(_PIN.fullmatch(name))


@lru_cache(_REMEMBERED)
def manifest_id(name: str) -> ParsedId | None:
    """The snapshot whose manifest has this object name, or None if it is not a manifest's name."""
    return _owner(_MANIFEST.fullmatch(name))


def copy_name(snapshot: str) -> str:
    """The object name of the second copy of a snapshot's manifest."""
    return f"{MANIFESTS}{snapshot}.copy.json"


@lru_cache(_REMEMBERED)
def copy_id(name: str) -> ParsedId | None:
    """The snapshot whose manifest the object of this name has a second time, or None if it has none."""
    return _owner(_COPY.fullmatch(name))


def quarantine_name(snapshot: str) -> str:
    """The object name of what is said of the damage of a snapshot."""
    return f"{MANIFESTS}{snapshot}.damaged.json"


@lru_cache(_REMEMBERED)
def quarantine_id(name: str) -> ParsedId | None:
    """The snapshot of whose damage the object of this name tells, or None if it tells of none."""
    return _owner(_QUARANTINE.fullmatch(name))


@lru_cache(_REMEMBERED)
def parity_of(name: str) -> ParityName | None:
    """What the name of a parity object says, or None if this is none."""
    match = _PARITY.fullmatch(name)
    return ParityName(match[1], int(match[8]), int(match[9]), int(match[10])) if match else None


def data_file_of(name: str) -> str:
    """The object name of the data file whose parity this object has; else the name itself."""
    return parity.file if (parity := parity_of(name)) is not None else name


@lru_cache(_REMEMBERED)
def data_owner(name: str) -> ParsedId | None:
    """The snapshot that wrote the data file of this object name, or None if it is not a data file's name."""
    return _owner(_DATA.fullmatch(name))


@lru_cache(_REMEMBERED)
def owner_of(name: str) -> ParsedId | None:
    """As `data_owner`, and of the name of a parity object the snapshot that wrote the data file."""
    return _owner(_OWNED.fullmatch(name))


def data_rank(name: str) -> int | None:
    """The rank that wrote the data file of this object name, or None if it is not a data file's name."""
    match = _DATA.fullmatch(name)
    return int(match[5]) if match else None


def rows_name(milliseconds: int, token: str, rank: int) -> str:
    """The object name of the rows of a process that began then, in milliseconds since the epoch."""
    return f"{ROWS}{milliseconds:013d}-{token}-r{rank:05d}.rows"


@lru_cache(_REMEMBERED)
def rows_rank(name: str) -> int | None:
    """The rank whose rows the object of this name has, or None if it is not a name of rows."""
    match = _ROWS.fullmatch(name)
    return int(match[1]) if match else None


def _owner(match: re.Match[str] | None) -> ParsedId | None:
    return ParsedId(match[1], int(match[2]), int(match[3])) if match else None


def most_bytes(name: str) -> int:
    """How many bytes of the object of this name are read at most when it is read whole."""
    if name in (RECORD, LEASE, STATUS, ROLLBACK, ATTEMPTS) or wanted_id(name):
        return SMALL_BYTES
    if rows_rank(name) is not None:
        return ROWS_BYTES
    return MANIFEST_BYTES + (SMALL_BYTES if pin_id(name) else 0)


def refuse_sealed(data: bytes) -> None:
    """Raises `SealError` for the bytes of a sealed object, which nothing but its storage reads."""
    if data.startswith(SEALED):
        raise SealError(
            "this run is sealed, and no section seal is given",
            hint=f"name a ckpt.yaml with the section seal, or set {KEY_VARIABLE} for the command line",
        )


def is_ours(name: str) -> bool:
    """Whether an object of this name may have been written by us."""
    return name in (RECORD, LEASE, STATUS, CATALOG, ROLLBACK, ATTEMPTS, SCRUB) or any(
        part(name) is not None
        for part in (manifest_id, copy_id, quarantine_id, owner_of, pin_id, part_owner, wanted_id, rows_rank)
    )
