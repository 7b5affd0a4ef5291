"""Mutants of a run: its files changed where their structure is, and sealed again with the digest of what they say now.

A mutant is a list of edits, which JSON can hold: those that once found something are kept in `corpus.json`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt_engine.state.rebuild import _KINDS
from ckpt_engine.store.container import digest
from tests.support.forged import newest, sealed

DELETE = {"#": "delete"}
BLANK_BYTES = 1024
"""Of a lease that was given back."""
CORPUS = Path(__file__).with_name("corpus.json")


@dataclass(frozen=True)
class Edit:
    """A change of one file.

    Args:
        file: `manifest` (the newest), `data` (the last data file of that), or the name of a file in the root.
        path: keys on the way to what is replaced in its JSON; None: bytes are replaced from `offset` on.
        value: JSON, in which `{"#": "delete"}`, `{"#": "deep", ...}`, `{"#": "many", ...}`, `{"#": "copy", "of": ...}`
            stand for what would be long; for bytes hexadecimal digits, or their number if zeros, or "cut".
    """

    file: str
    path: list[Any] | None
    value: Any
    offset: int = 0


@dataclass(frozen=True)
class Mutant:
    """A run and how it is changed.

    Args:
        store: which run.
        digests: whether pieces get the digest of the bytes that they name now.
    """

    store: str
    edits: list[Edit]
    digests: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, row: dict[str, Any]) -> Mutant:
        return cls(row["store"], [Edit(**edit) for edit in row["edits"]], row["digests"])


def corpus() -> list[Mutant]:
    """Mutants that once found something."""
    return [Mutant.of_json(row) for row in json.loads(CORPUS.read_text())]


def apply(mutant: Mutant, source: Path, root: Path) -> None:
    """Make the mutant of the run at `source` at `root`, which does not exist."""
    shutil.copytree(source, root)
    for edit in mutant.edits:
        path = _file(root, edit.file)
        if edit.path is None:
            _write_bytes(path, edit)
            continue
        with suppress(LookupError, TypeError, ValueError):  # an edit before it has taken that place away
            _write_json(path, edit)
    if mutant.digests:
        _digest_again(root)


def _file(root: Path, name: str) -> Path:
    if name == "manifest":
        return newest(root)
    if name == "data":
        files = json.loads(newest(root).read_bytes())["manifest"]["files"]
        return root / files[-1]["name"]
    return root / name


def _write_bytes(path: Path, edit: Edit) -> None:
    data = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if edit.value == "cut":
        del data[edit.offset :]
    else:
        new = bytes(edit.value) if isinstance(edit.value, int) else bytes.fromhex(edit.value)
        data[edit.offset : edit.offset + len(new)] = new
    path.write_bytes(data)


def _read_json(path: Path) -> tuple[Any, str | None]:
    """A document, or its body and the key that has it."""
    document = json.loads(path.read_bytes().splitlines()[0])
    for key in ("manifest", "catalog"):
        if isinstance(document, dict) and set(document) == {"digest", key}:
            return document[key], key
    return document, None


def _write_json(path: Path, edit: Edit) -> None:
    assert edit.path is not None
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = json.dumps(_changed(json.loads(data[8:end]), edit)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        return
    body, key = _read_json(path)
    body = _changed(body, edit)
    rest = b"\n".join(path.read_bytes().splitlines()[1:])
    path.write_bytes(sealed(body, key) if key else json.dumps(body).encode() + b"\n" + rest)


def _changed(body: Any, edit: Edit) -> Any:
    assert edit.path is not None
    value = _long(edit.value, body)
    if not edit.path:
        return value
    at = body
    for key in edit.path[:-1]:
        at = at[key]
    if edit.value == DELETE:
        del at[edit.path[-1]]
    elif isinstance(at, list) and edit.path[-1] >= len(at):
        at.append(value)
    else:
        at[edit.path[-1]] = value
    return body


def _long(value: Any, body: Any) -> Any:
    """What stands for something long, written out."""
    if not isinstance(value, dict) or "#" not in value:
        return value
    if value["#"] == "deep":
        made: Any = 1
        for _ in range(value["levels"]):
            made = {"list": lambda m: [m], "dict": lambda m: {"a": m}, "tuple": lambda m: {"$": "tuple", "items": [m]},
                    "pairs": lambda m: {"$": "dict", "items": [[1, m]]}}[value["of"]](made)  # fmt: skip
        return made
    if value["#"] == "many":
        return [value["of"]] * value["count"]
    if value["#"] == "keys":
        return {str(number): value["of"] for number in range(value["count"])}
    if value["#"] == "text":
        return value["of"] * value["count"]
    if value["#"] == "copy":
        for key in value["of"]:
            body = body[key]
        return json.loads(json.dumps(body))
    return None


def _digest_again(root: Path) -> None:
    path = newest(root)
    try:
        body, _ = _read_json(path)
        files = [root / file["name"] for file in body["files"]]
        pieces = [piece for entry in body["entries"].values() for piece in entry["pieces"]]
        pieces += [piece for level in body.get("bases", {}).values() for kept in level.values() for piece in kept]
        for piece in pieces:
            with files[piece["file"]].open("rb") as file:
                file.seek(piece["offset"])
                piece["digest"] = digest(file.read(min(piece["nbytes"], 1 << 26)))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OSError, OverflowError):
        return  # what says nothing of its pieces has no digests to correct
    path.write_bytes(sealed(body))


# Drawing

_NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 63, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**30, -(2**63)),
    *(1.5, -0.5, 1e300, 5e-324, True, False),
]
_DTYPES = ["float32", "float64", "uint8", "complex128", "int4", "onnx", "_inductor"]
_TEXTS = [
    *(
        "",
        "x",
        "a/b",
        "../../etc",
        "\ud800",
        "\x00",
        "\x1b[2J",
        "nan",
        "1e400000000",
        "1/0",
        "9" * 5000,
        "é" * 50,
        "ranks",
    ),
    *("cuda:7", "cuda", "meta", "xpu", "privateuseone", "<f8", "|O8", "<U99999", "tensor", "00000001", "1e9999"),
    *("raw", "zstd", "rows", "adam", "delta-byteplane-zstd", "byteplane-zstd", "xxh3-128:" + "0" * 32),
    *("ctypes:cdll./x", "torch:onnx.x", "builtins:list", *_DTYPES),
]
_LONG = [
    {"#": "deep", "of": "list", "levels": 700},
    {"#": "deep", "of": "dict", "levels": 300},
    {"#": "deep", "of": "tuple", "levels": 205},
    {"#": "deep", "of": "pairs", "levels": 190},
    {"#": "deep", "of": "tuple", "levels": 450},
    {"#": "many", "of": [], "count": 200_000},
    {"#": "many", "of": 1, "count": 500_000},
    {"#": "many", "of": {"$": "tuple", "items": []}, "count": 50_000},
    {"#": "keys", "of": {}, "count": 50_000},
    {"#": "text", "of": "7", "count": 1_000_000},
]
_FIELDS = [
    *(
        "entry",
        "items",
        "fields",
        "type",
        "name",
        "v",
        "dtype",
        "shape",
        "stride",
        "view",
        "blocks",
        "parameter",
        "b64",
    ),
    *("device", "state", "maxlen", "factory", "hex", "fold", "pure", "container", "flags", "metadata", "re", "im"),
    *("byte_offset", "requires_grad"),
]
_BESIDE = ["ckpt.json", "lease.json", "status.json", "rollback.json", "attempts.json", "catalog.json", "pins"]


def draw(seed: int, stores: dict[str, Path]) -> Mutant:
    """Mutant number `seed`."""
    rng = random.Random(seed)
    store = rng.choices(list(stores), [4 if name in ("plain", "encoded") else 1 for name in stores])[0]
    root = stores[store]
    kind = rng.choices(["manifest", "header", "data", "beside", "bytes"], [70, 6, 10, 10, 4])[0]
    edits: list[Edit] = []
    if kind == "beside":
        there = [name for name in _BESIDE if (root / name).exists() and (root / name).stat().st_size != BLANK_BYTES]
        name = rng.choice(there)
        if name == "pins":
            name = str(next((root / "pins").iterdir()).relative_to(root))
        edits = [_json_edit(rng, root, name) for _ in range(rng.choice([1, 1, 2]))]
    elif kind == "header":
        edits = [_json_edit(rng, root, "data")]
    elif kind == "data":
        edits = [_stored_edit(rng, root) for _ in range(rng.choice([1, 1, 3]))]
    elif kind == "bytes":
        name = rng.choice(["manifest", "data", *(one for one in _BESIDE[:-1] if (root / one).exists())])
        size = _file(root, name).stat().st_size
        value = rng.choice(["cut", rng.randbytes(rng.randint(1, 8)).hex(), 16])
        edits = [Edit(name, None, value, rng.randint(0, size))]
    else:
        edits = [_json_edit(rng, root, "manifest") for _ in range(rng.choice([1, 1, 1, 2, 4]))]
    return Mutant(store, edits, digests=kind == "data" or rng.random() < 0.5)


def _document(path: Path) -> Any:
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return _read_json(path)[0]


def _json_edit(rng: random.Random, root: Path, name: str) -> Edit:
    body = _document(_file(root, name))
    path = rng.choice(list(_places(body, rng)))
    at = body
    for key in path:
        at = at[key]
    if isinstance(at, dict) and rng.random() < 0.3:
        path = [*path, rng.choice([*_FIELDS, *at, "$", "x"])]
        return Edit(name, path, _value(rng, None, body))
    if isinstance(at, list) and rng.random() < 0.3:
        path = [*path, len(at)]
        return Edit(name, path, _value(rng, None, body))
    if path and rng.random() < 0.15:
        return Edit(name, path, DELETE)
    return Edit(name, path, _value(rng, at, body))


def _places(body: Any, rng: random.Random) -> Iterator[list[Any]]:
    """Ways to some values of a document: as many in a small part of it as in a large one."""
    for _ in range(8):
        at, path = body, []
        while isinstance(at, dict | list) and at:
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            at = at[key]
            path.append(key)
            if rng.random() < 0.12:
                break
        yield path


def _value(rng: random.Random, old: Any, body: Any) -> Any:
    kind = rng.choices(["number", "text", "near", "node", "copy", "small", "long"], [20, 18, 25, 14, 12, 8, 3])[0]
    if kind == "near" and type(old) is int:
        return (
            old + rng.choice([-1, 1, 8, -8, 4096, 1 << 24])
            if rng.random() < 0.6
            else old * rng.choice([2, -1, 1 << 20])
        )
    if kind == "near" and type(old) is float:
        return rng.choice([-old, old * 1e300, int(old), str(old)])
    if kind == "near" and type(old) is str:
        return rng.choice([old + "x", old[1:], old.upper(), old * 3, int(old) if old.isdigit() else None])
    if kind == "near" and isinstance(old, list):
        return rng.choice([old[::-1], old[1:], old * 2, [old], [*old, 0], [-1, *old]])
    if kind == "node":
        return _node(rng, body)
    if kind == "copy":
        return {"#": "copy", "of": rng.choice(list(_places(body, rng)))}
    if kind == "small":
        return rng.choice([None, [], {}, [[]], {"$": None}, {"$": []}, [0, 0, 0], [None], [[0], [1]], {"a": 1}])
    if kind == "long":
        return rng.choice(_LONG)
    return rng.choice(_NUMBERS) if kind == "number" else rng.choice(_TEXTS)


def _node(rng: random.Random, body: Any) -> Any:
    """A node of any kind with fields of any kind."""
    entries = list(body["entries"]) if isinstance(body, dict) and isinstance(body.get("entries"), dict) else ["w"]

    def sizes() -> Any:
        return [rng.choice([0, 1, 2, 3, 16, 2**20, 2**40, -1]) for _ in range(rng.randint(0, 3))]

    def simple() -> Any:
        return rng.choice(
            [rng.choice(_NUMBERS), rng.choice(_TEXTS), None, [], {}, [1, 2], {"a": 1}, {"$": "tuple", "items": [1]}]
        )

    def array() -> Any:
        view = {
            "dtype": rng.choice(_DTYPES),
            "shape": sizes(),
            "stride": sizes(),
            "byte_offset": rng.choice(_NUMBERS[:9]),
        }
        more = rng.choice([{}, {"view": view}, {"stride": sizes()}, {"parameter": {"requires_grad": simple()}}])
        kind = rng.choice(["tensor", "ndarray", "bytes", "bytearray", "sharded"])
        return {"$": kind, "entry": rng.choice(entries), **more,
                **rng.choice([{}, {"dtype": rng.choice(["<f8", "<f4", "|u1", "|O8", "<U9"]), "shape": sizes()}]),
                **rng.choice([{}, {"blocks": [[sizes(), sizes()]]}])}  # fmt: skip

    if rng.random() < 0.35:
        return array()
    kind = rng.choice([*_KINDS, "unknown"])
    fields: dict[str, Any] = {
        "items": rng.choice([[], [[1, 2]], [1, 2], [[simple(), simple()]], simple()]),
        "fields": rng.choice([{}, {"a": simple()}, ["a"], ["x", "y"], simple()]),
        "type": rng.choice(["builtins:list", "tests.fuzz.stores:Color", "tests.fuzz.stores:Part", "a:b", simple()]),
        "name": rng.choice(["RED", simple()]),
        "v": rng.choice([simple(), rng.choice(_TEXTS), [simple(), simple(), simple()], [1, 2, 3]]),
        "dtype": rng.choice(["<f8", "|O8", "<M8[ns]", simple()]),
        "hex": rng.choice(["00" * 8, "0", simple()]),
        "factory": rng.choice(["list", simple()]),
        "maxlen": rng.choice([None, 1, simple()]),
        "fold": rng.choice([0, 5, simple()]),
        "pure": rng.choice([True, simple()]),
        "device": rng.choice(["cpu", "cuda", simple()]),
        "state": rng.choice([simple(), array(), [3, [1], None], {"bit_generator": "MT19937", "state": simple()}]),
        "container": rng.choice([simple(), {"a": "${b"}, {"a": {"b": [1]}}]),
        "flags": rng.choice([{}, {"struct": simple(), "readonly": simple()}]),
        "re": simple(),
        "im": simple(),
        "b64": rng.choice(["AAAA", "*", simple()]),
        "metadata": simple(),
    }
    return {"$": kind, **{key: value for key, value in fields.items() if rng.random() < 0.75}}


def _stored_edit(rng: random.Random, root: Path) -> Edit:
    """Other bytes in a piece, often an encoded one: in its header, or anywhere."""
    body, _ = _read_json(newest(root))
    pieces = [piece for entry in body["entries"].values() for piece in entry["pieces"]]
    pieces += [piece for level in body.get("bases", {}).values() for kept in level.values() for piece in kept]
    coded = [piece for piece in pieces if piece.get("codec", "raw") != "raw"]
    piece = rng.choice(coded or pieces)
    at = rng.choice([rng.randint(0, min(128, piece["nbytes"] - 1)), rng.randrange(piece["nbytes"])])
    new = rng.choice(
        [b"\xff", b"\x00", b"\xff" * 8, bytes(8), rng.randbytes(4), (2 ** rng.randint(0, 40)).to_bytes(8, "little")]
    )
    return Edit(body["files"][piece["file"]]["name"], None, new.hex(), piece["offset"] + at)
