"""docs/format.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_engine.state.flatten import INLINE_BYTES, MAX_DEPTH
from ckpt_engine.state.rebuild import _KINDS
from ckpt_engine.store import catalog, container, decode, manifest, manifest_codec, names, tree

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_constants_on_the_page_are_those_of_the_code() -> None:
    """Numbers and names that a stranger's reader relies on."""
    assert PAGE.startswith(f"# Format {manifest.VERSION}\n")
    assert f'"format": "{manifest.FORMAT}", "version": {manifest.VERSION}' in PAGE
    assert f"multiple of {container.ALIGN_BYTES}" in PAGE
    assert f"first {manifest_codec.HEAD_BYTES} bytes" in PAGE
    assert f"at most {container.PIECE_BYTES} bytes" in PAGE
    assert f"`{container.ALGORITHM}:`" in PAGE
    assert f"if at most {INLINE_BYTES} bytes" in PAGE
    assert f"have at most {names.MANIFEST_BYTES} bytes" in PAGE
    assert f"the other JSON files at most {names.SMALL_BYTES}" in PAGE
    assert f"nested at most {tree.MAX_DEPTH} deep (writers stop at {MAX_DEPTH})" in PAGE
    assert f"at most {manifest_codec.MOST_OVERHEAD_BYTES} more as it is stored" in PAGE
    assert f"name at most {manifest_codec.MOST_SHARED} times the bytes" in PAGE
    assert f"`1` to `{manifest.MANIFEST_VERSION}`. A reader MUST refuse a higher number" in PAGE
    assert f"decoded more than {decode.MOST_DECODED} times" in PAGE
    assert f"when at least {catalog.EVERY} snapshots" in PAGE


def test_the_page_lists_exactly_the_node_kinds_of_the_reader() -> None:
    """No kind is undocumented and none is invented."""
    table = PAGE.split('| `"$"` |')[1].split("## Digests")[0]
    named = {
        kind
        for line in table.splitlines()
        for kind in re.findall(r"`([\w.]+)`", line.split("|")[1] if "|" in line else "")
    }
    assert named - {"v", "fold", "device", "state"} == set(_KINDS)
