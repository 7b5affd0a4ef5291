"""Finds weights that are not the same on all ranks of a snapshot: each rank stores words of its own."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ckpt_engine.observe.units import first
from ckpt_engine.store.decode import decoder_of
from ckpt_engine.store.manifest import OWN_KEY, RANKS, Entry, Manifest
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.tree import reader_of

REPLICAS = "replicas"
"""Key in a rank's own component: a table for each component that has weights or moments."""
NAMES, WORDS = "names", "words"
"""Keys of a table: the names of the arrays, a line each, and `ROW_BYTES` of each array."""
ROW_BYTES = 16
_ENTRY = re.compile(rf"{RANKS}/([0-9]+)/{OWN_KEY}/{REPLICAS}/([^/]*)/({NAMES}|{WORDS})")
_Tables = Mapping[int, Mapping[str, tuple[str, Entry]]]


def differing(manifest: Manifest) -> dict[str, _Tables]:
    """The tables, by rank, of each component that differs over the ranks. Digests tell: no data is read."""
    found: dict[str, dict[int, dict[str, tuple[str, Entry]]]] = defaultdict(lambda: defaultdict(dict))
    for name, entry in manifest.entries.items():
        if (parts := _ENTRY.fullmatch(name)) is not None:
            component = parts[2].replace("~1", "/").replace("~0", "~")
            found[component][int(parts[1])][parts[3]] = (name, entry)
    return {
        component: tables
        for component, tables in found.items()
        if len({tuple(piece.content_digest for piece in table[WORDS][1].pieces) for table in tables.values()}) > 1
    }


def difference(storage: Storage, manifest: Manifest) -> str:
    """Which arrays differ and the ranks, in words; empty: none does.

    Raises:
        CkptError: the words cannot be read.
    """
    return "; ".join([_difference(storage, manifest, tables) for tables in differing(manifest).values()])


def _difference(storage: Storage, manifest: Manifest, tables: _Tables) -> str:
    read = reader_of(manifest, decoder_of(storage.get_into, manifest))
    words = {rank: read(tables[rank][WORDS][0]) for rank in sorted(tables)}
    names = read(tables[min(tables)][NAMES][0]).decode().split("\n")
    rows = [
        {rank: data[at : at + ROW_BYTES] for rank, data in words.items()}
        for at in range(0, len(names) * ROW_BYTES, ROW_BYTES)
    ]
    apart = [(name, row) for name, row in zip(names, rows, strict=True) if len(set(row.values())) > 1]
    usual = Counter(apart[0][1].values()).most_common(1)[0][0]
    groups = [listed(rank for rank, data in apart[0][1].items() if (data == usual) is same) for same in (False, True)]
    return f"{first([name for name, _ in apart], 1)} is not the same on {groups[0]} as on {groups[1]}"


def listed(ranks: Iterable[int]) -> str:
    """Ranks, for people."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {first(list(map(str, found)), 8)}"
