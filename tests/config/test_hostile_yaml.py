"""A ckpt.yaml that is hostile or broken ends in a short coded error that names the file and the line."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from ckpt_engine.config import load_config
from ckpt_engine.errors import ConfigError

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)
MERGES = "a: &a {x0: 1, x1: 1, x2: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 9)}], y{i}: 1}}\n" for i in range(8)
)
DOCUMENTS: dict[str, bytes] = {
    name: text if isinstance(text, bytes) else text.encode()
    for name, text in {
        "aliases that multiply": ALIASES + "tiers: /x\n",
        "merge keys that multiply": MERGES + "tiers: /x\n",
        "aliases of one list": "tiers: &a [" + "x," * 2000 + "]\nkeep: [*a, *a, *a]\n",
        "an alias within itself": "tiers: &a [*a]\n",
        "a mapping within itself": "keep: &a {last: *a}\n",
        "nested in brackets": "tiers: " + "[" * 5000 + "]" * 5000,
        "nested in braces": "tiers: " + "{a: " * 5000,
        "nested by indentation": "".join(" " * i + "a:\n" for i in range(400)),
        "nested by dashes": "tiers:\n" + "- " * 3000 + "x\n",
        "a long integer": "tiers: /x\nslots: " + "9" * 100_000,
        "an exponent": "tiers: /x\nslots: 1e999999\noverhead: 1e999999\nkeep: {last: 1e999999}\n",
        "minus an exponent": "tiers: /x\nmtbf: -1e999999\nevery_seconds: .inf\n",
        "unknown keys": "tiers: /x\n" + "".join(f"k{i}: 1\n" for i in range(50_000)),
        "some unknown keys": "tiers: /x\n" + "".join(f"k{i}: 1\n" for i in range(2000)),
        "keys that are no texts": "tiers: /x\n" + "".join(f"{i}: 1\n" for i in range(2000)),
        "an unknown key in each tier": "tiers:\n" + "".join(f"- {{url: /x{i}, k: 1}}\n" for i in range(900)),
        "a long key": "tiers: /x\n? " + "k" * 100_000 + "\n: 1\n",
        "a long key, twice": ("? " + "k" * 100_000 + "\n: 1\n") * 2,
        "a long text": "tiers: /x\nslots: " + "k" * 100_000,
        "a long alias": "tiers: *" + "k" * 100_000,
        "a long tag": "tiers: !!" + "k" * 100_000 + " x",
        "many documents": "tiers: /x\n" + "---\na: 1\n" * 5000,
        "a Python object": "tiers: !!python/object/apply:os.system ['true']\n",
        "an integer that is none": "tiers: /x\nslots: !!int x\n",
        "a boolean that is none": "tiers: /x\nat_end: !!bool x\n",
        "a float that is none": "tiers: /x\nslots: !!float x\n",
        "a time that is none": "tiers: /x\nslots: !!timestamp x\n",
        "a day that is none": "tiers: /x\nslots: !!timestamp 2001-99-99\n",
        "bytes that are none": "tiers: /x\nslots: !!binary x\n",
        "a set": "tiers: !!set {/x}\n",
        "an integer to base 60": "tiers: /x\nslots: 190:20:30\n",
        "a day": "tiers: /x\nslots: 2001-01-01\n",
        "half of a surrogate pair": 'tiers: /x\nslots: "\\ud800"\n"\\udc00": 1\n',
        "a NUL": "tiers: /x\nslots: 1\0\n",
        "control characters": "tiers: /x\n\x1b]0;x\x07: 1\n",
        "a binary file": bytes(range(256)) * 40,
        "UTF-16": "tiers: /x\nslots: none\n".encode("utf-16"),
        "no text at all": b"\xff\xfe\x00\xd8" * 10,
        "a large file": b"#" * (1 << 23),
        "a duplicate key": "tiers: /x\nslots: 2\nslots: 3\n",
    }.items()
}


def refuse(file: Path) -> str:
    """What is said of a file that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(str(file))
    text = str(caught.value)
    assert text.startswith("[CKPT100] ") and len(text) < 12_000
    return text


@pytest.mark.cells(4)
@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_a_hostile_document_is_refused_in_a_few_lines(tmp_path: Path, document: bytes) -> None:
    """With the file and a line, and no text of it that is long."""
    file = tmp_path / "c.yaml"
    file.write_bytes(document)
    text = refuse(file)
    assert re.search(rf"{re.escape(str(file))}, line \d+", text), text[:300]
    assert len(max(text.splitlines(), key=len)) < 1500


@pytest.mark.parametrize("kind", ["pipe", "socket path", "device", "missing", "long"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    """A pipe that has no writer, a device that never ends, a name that no file can have."""
    file = tmp_path / "c.yaml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "socket path":
        file.symlink_to(file)
    elif kind == "long":
        file = tmp_path / ("x" * 5000 + ".yaml")
    assert "file" in refuse(file)


def test_a_document_that_is_long_and_honest_is_read(tmp_path: Path) -> None:
    """Aliases, merge keys, many tiers and long values are options like others."""
    file = tmp_path / "c.yaml"
    tiers = "".join(f"  - {{<<: *one, url: /x{i}}}\n" for i in range(100))
    file.write_text(f"tiers:\n  - &one {{url: /x, storage_options: {{key: {'k' * 50_000}}}}}\n{tiers}")
    assert len(load_config(str(file)).tiers) == 101


def drawn(seed: int) -> bytes:
    """A document of parts of the others."""
    chance = random.Random(seed)
    parts = []
    for _ in range(chance.randint(1, 4)):
        text = chance.choice(list(DOCUMENTS.values()))
        start = chance.randrange(max(1, len(text)))
        parts.append(text[start : start + chance.choice((20, 500, 100_000))] if chance.random() < 0.6 else text)
    return chance.choice((b"", b"\n", b"- ", b"a: ")).join(parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(250))
def test_documents_of_hostile_parts_are_refused(tmp_path: Path, seed: int) -> None:
    """Or read, where no part says anything that is wrong."""
    file = tmp_path / "c.yaml"
    file.write_bytes(drawn(seed))
    try:
        load_config(str(file))
    except ConfigError as err:
        assert len(str(err)) < 12_000
