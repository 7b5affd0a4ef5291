"""Makes the committed repositories of this folder: formats 1 and 4 as they are, and one per kind of damage of format 1.

    python -m tests.compat.make_fixtures

Everything in them is fixed, so that running it again changes no byte unless the format changes; a change of the format
gets a new version number and a new folder, and the old one stays.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_engine.store import names
from ckpt_engine.store.container import build_header, container_form, digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.manifest_codec import encode

HERE = Path(__file__).parent
RUN = "0123456789abcdef" * 2
FIRST = "00000001-s0000000100-00000001"
SECOND = "00000002-s0000000200-00000002"

ARRAYS: Mapping[str, tuple[str, tuple[int, ...], bytes]] = {
    "model/weight": ("float32", (2, 3), struct.pack("<6f", 0, 1, 2, 3, 4.5, -0.0)),
    "model/scale": ("bfloat16", (), struct.pack("<H", 0x3F80)),
    "model/half": ("float16", (2,), struct.pack("<2e", 1.5, -2)),
    "model/double": ("float64", (1,), struct.pack("<d", 1e-300)),
    "model/f8": ("float8_e4m3fn", (4,), bytes([0x38, 0x40, 0x00, 0xB8])),
    "model/f8b": ("float8_e5m2", (2,), bytes([0x3C, 0x40])),
    "model/mask": ("bool", (3,), bytes([1, 0, 1])),
    "model/ids": ("int64", (2, 2), struct.pack("<4q", 1, -2, 2**62, 0)),
    "model/small": ("int8", (2,), struct.pack("<2b", -1, 127)),
    "model/unsigned": ("uint16", (2,), struct.pack("<2H", 0, 65535)),
    "model/c64": ("complex64", (2,), struct.pack("<4f", 1, 2, -3, 0.5)),
    "model/c128": ("complex128", (1,), struct.pack("<2d", 1, -1)),
    "model/empty": ("float32", (0, 3), b""),
    "rng/torch": ("uint8", (5,), b"\0\1\2\3\xff"),
}
"""Name → (dtype, shape, bytes) of every array of the first snapshot."""

MOMENT = ("float32", (4, 2), struct.pack("<8f", *range(8)))
"""The array that only the second snapshot has; stored in two pieces."""


SCHEMA = {
    "packs": [
        {"entry": "model/packed float32", "dtype": "float32", "node": {}, "shapes": [[2], [2, 3]], "arrays": [0, 1]},
        {
            "entry": "model/packed bfloat16",
            "dtype": "bfloat16",
            "node": {"parameter": {"requires_grad": True}},
            "shapes": [[]],
            "arrays": [0, 0],
        },
    ],
    "tree": {"lr": {"$": "v", "i": 0}, "a": 0, "w": 1, "scales": [2, 3]},
}
"""Of the one component of the snapshot of format 4."""

_SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":")).encode()
PACKS: Mapping[str, tuple[str, tuple[int, ...], bytes]] = {
    "model/packed float32": ("float32", (8,), struct.pack("<8f", *range(8))),
    "model/packed bfloat16": ("bfloat16", (2,), struct.pack("<2H", 0x3F80, 0xC000)),
    "model/schema": ("uint8", (len(_SCHEMA_TEXT),), _SCHEMA_TEXT),
}


def tree(step: int, names: list[str]) -> dict[str, object]:
    """The state as JSON: one tensor per array below its component, and plain values."""
    components: dict[str, object] = {}
    for name in names:
        component, _, key = name.partition("/")
        leaves = components.setdefault(component, {})
        assert isinstance(leaves, dict)
        leaves[key] = {"$": "tensor", "entry": name}
    return components | {
        "loop": {
            "step": step,
            "lr": 0.1,
            "best": {"$": "float", "v": "inf"},
            "betas": {"$": "tuple", "items": [0.9, 0.999]},
            "history": [1, None, True, "grüße"],
        }
    }


def container(arrays: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> tuple[bytes, dict[str, int]]:
    """A data file and the offset of each array in it."""
    rows = []
    for name, (dtype, shape, data) in arrays.items():
        code, form = container_form(dtype, shape, len(data))
        rows.append((name, code, form, len(data)))
    header = build_header(rows, {"snapshot": "fixture"})
    offsets, at = {}, len(header)
    for name, _, _, nbytes in rows:
        offsets[name] = at
        at += nbytes
    return header + b"".join(data for _, _, data in arrays.values()), offsets


def entry(dtype: str, shape: tuple[int, ...], data: bytes, file: int, offset: int, piece_bytes: int = 1 << 24) -> Entry:
    """An entry whose pieces have at most `piece_bytes`."""
    pieces = tuple(
        Piece(file, offset + at, len(part), digest(part), len(part))
        for at in range(0, len(data), piece_bytes)
        if (part := data[at : at + piece_bytes])
    )
    return Entry(dtype, shape, pieces, container_form(dtype, shape, len(data))[0])


def first() -> tuple[Manifest, bytes]:
    """A snapshot with every dtype."""
    data, offsets = container(ARRAYS)
    entries = {name: entry(*array, 0, offsets[name]) for name, array in ARRAYS.items()}
    return _manifest(FIRST, 100, {}, None, entries, {names.data_name(FIRST): len(data)}), data


def second() -> tuple[Manifest, bytes]:
    """A snapshot that shares arrays with the first one, with metrics that JSON has not."""
    own = {"optimizer/moment": MOMENT}
    data, offsets = container(own)
    older, older_data = first()
    entries = {name: older.entries[name] for name in ("model/weight", "rng/torch")}
    entries["optimizer/moment"] = entry(*MOMENT, 1, offsets["optimizer/moment"], piece_bytes=16)
    files = {names.data_name(FIRST): len(older_data), names.data_name(SECOND): len(data)}
    metrics = {"val_loss": 0.25, "accuracy": float("nan"), "ratio": float("-inf")}
    return _manifest(SECOND, 200, metrics, FIRST, entries, files), data


def packed() -> tuple[Manifest, bytes]:
    """A snapshot whose component is packed."""
    data, offsets = container(PACKS)
    entries = {name: entry(*array, 0, offsets[name]) for name, array in PACKS.items()}
    manifest = _manifest(FIRST, 100, {}, None, entries, {names.data_name(FIRST): len(data)})
    others = [name for name in PACKS if name != "model/schema"]
    node = {"$": "packed", "entry": "model/schema", "entries": others, "values": [0.1]}
    return replace(manifest, tree={"model": node}), data


def _manifest(
    snapshot: str,
    step: int,
    metrics: Mapping[str, float],
    parent: str | None,
    entries: Mapping[str, Entry],
    files: Mapping[str, int],
) -> Manifest:
    sizes: dict[str, int] = {}
    for name, one in entries.items():
        component = name.partition("/")[0]
        sizes[component] = sizes.get(component, 0) + sum(piece.nbytes for piece in one.pieces)
    parsed = names.parse_id(snapshot)
    assert parsed is not None
    info = SnapshotInfo(
        snapshot, parsed.seq, step, 1, "interval", 1.75e9 + step, sum(sizes.values()), metrics, parent, sizes
    )
    software = {"ckpt-engine": "0.1.0", "python": "3.11.7", "torch": "2.6.0"}
    named = tuple(DataFile(name, nbytes) for name, nbytes in files.items())
    return Manifest(info, RUN, {"size": 1}, software, named, entries, tree(step, list(entries)), {"adapter": None})


def write(root: Path, *snapshots: tuple[Manifest, bytes]) -> None:
    """A healthy repository with these snapshots."""
    record = {"format": "ckpt-engine", "version": 1, "run": RUN, "created": 1.75e9}
    (root / "snapshots").mkdir(parents=True)
    (root / "data").mkdir()
    (root / names.RECORD).write_bytes(json.dumps(record).encode() + b"\n")
    for manifest, data in snapshots:
        (root / names.data_name(manifest.info.id)).write_bytes(data)
        (root / names.manifest_name(manifest.info.id)).write_bytes(encode(manifest))


def resigned(data: bytes, old: bytes, new: bytes) -> bytes:
    """A manifest with `old` replaced and a digest that fits: another version's, or a forger's."""
    body = data[data.index(b'"manifest":') + len(b'"manifest":') : -2].replace(old, new)
    return b'{"digest":"%s","manifest":%s}\n' % (digest(body).encode(), body)


def damages() -> dict[str, tuple[str, bytes | None]]:
    """Kind → (file, its new content, or None to remove it). All of them hit the second snapshot or the record."""
    manifest, data = names.manifest_name(SECOND), names.data_name(SECOND)
    text, raw = encode(second()[0]), second()[1]
    return {
        "manifest-empty": (manifest, b""),
        "manifest-truncated": (manifest, text[: len(text) // 2]),
        "manifest-zeros": (manifest, bytes(len(text))),
        "manifest-bit-flipped": (manifest, text.replace(b'"lr":0.1', b'"lr":0.3')),
        "manifest-foreign": (manifest, b'{"epoch": 3, "global_step": 200}\n'),
        "manifest-newer": (manifest, resigned(text, b'"version":1', b'"version":9')),
        "manifest-exchanged": (manifest, encode(first()[0])),
        "manifest-forged": (manifest, resigned(text, data.encode(), b"data/../../../../etc/passwd")),
        "data-missing": (data, None),
        "data-truncated": (data, raw[:-1]),
        "data-bit-flipped": (data, raw[:-1] + bytes([raw[-1] ^ 1])),
        "data-zeros": (data, bytes(len(raw))),
        "data-foreign": (data, b"PK\x03\x04archive/data.pkl".ljust(len(raw))),
        "record-missing": (names.RECORD, None),
        "record-damaged": (names.RECORD, b'{"format": "ckpt-engine", "vers'),
        "record-foreign": (names.RECORD, b'{"name": "somebody else\'s"}\n'),
        "record-newer": (names.RECORD, b'{"format": "ckpt-engine", "version": 2}\n'),
    }


def make(target: Path) -> None:
    """Write all fixtures below `target`."""
    write(target / "v1", first(), second())
    write(target / "v4", packed())
    for kind, (name, content) in damages().items():
        root = target / "damaged" / kind
        write(root, first(), second())
        if content is None:
            (root / name).unlink()
        else:
            (root / name).write_bytes(content)


if __name__ == "__main__":
    for old in (HERE / "v1", HERE / "v4", HERE / "damaged"):
        shutil.rmtree(old, ignore_errors=True)
    make(HERE)
