"""Manifest size, requests and commit time by number of ranks: `python -m tests.ranks.simulate` prints the table.

Parts are made as values, and merged and encoded by the code that a coordinator runs. The store is a latency for each
request, of which the coordinator has `READS_AT_ONCE` under way. Nothing is written.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ckpt_engine.copy.job import EntryLayout
from ckpt_engine.copy.write_snapshot import cut, part_piece_bytes
from ckpt_engine.ranks.boxes import PlacedArray, divide
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.manifest import RANKS, DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.writer import part_records
from ckpt_engine.writer.part_records import PartRecord, Slices

SNAPSHOT = names.session_id("simulated", 1, 1)
TENSORS = 1000
STATE_BYTES = 1 << 40
ROW_BYTES = 4096
DIGEST = "xxh3-128:" + "0" * 32
LATENCY_SECONDS = 0.03
"""Of one small request to an object store."""


def made(size: int) -> list[PartRecord]:
    """The parts of all ranks of a state of `STATE_BYTES` in `TENSORS` tensors, each with 16 KiB of its own."""
    rows = STATE_BYTES // TENSORS // ROW_BYTES
    info = SnapshotInfo(SNAPSHOT, 1, 1, 0, "interval", 0.0, 0)
    entries: list[dict[str, Entry]] = [{} for _ in range(size)]
    slices: list[dict[str, Slices]] = [{} for _ in range(size)]
    for number, found in enumerate(divide([PlacedArray(rows * ROW_BYTES, rows)] * TENSORS, size)):
        for one in found:
            nbytes = one.rows * ROW_BYTES
            name = f"model/layer{number:04d}/weight"
            shape, whole = (one.rows, ROW_BYTES // 4), (rows, ROW_BYTES // 4)
            layout = EntryLayout(name, "float32", shape, "F32", 0, nbytes, whole if size > 1 else None)
            least_bytes = part_piece_bytes([layout] * TENSORS)
            pieces = tuple(Piece(0, 0, it.nbytes, DIGEST, it.nbytes) for it in cut(layout, least_bytes))
            entries[one.rank][name] = Entry("float32", shape, pieces, "F32")
            runs = ((one.start * ROW_BYTES, len(pieces)),)
            slices[one.rank][name] = Slices(whole, runs)
    model = {f"layer{n:04d}": {"$": "tensor", "entry": f"model/layer{n:04d}/weight"} for n in range(TENSORS)}
    made_parts = []
    for rank in range(size):
        own = f"{RANKS}/{rank}/own/packed"
        entries[rank][own] = Entry("uint8", (16384,), (Piece(0, 0, 16384, DIGEST, 16384),), "U8")
        tree = {RANKS: {str(rank): {"own": {"packed": {"$": "tensor", "entry": own}}}}}
        files = (DataFile(names.data_name(SNAPSHOT, rank), STATE_BYTES // size + 20000),)
        manifest = Manifest(info, "0" * 32, {}, {}, files, entries[rank], tree)
        made_parts.append(PartRecord((rank,), size, "same", slices[rank], manifest))
    made_parts[0] = replace(
        made_parts[0], manifest=replace(made_parts[0].manifest, tree={"model": model, **made_parts[0].manifest.tree})
    )
    return made_parts


def main() -> None:
    """Print one row per number of ranks."""
    print("| ranks | manifest | part record | lists | reads | merge + encode | latency of the requests |")
    print("|---|---|---|---|---|---|---|")
    for size in (1, 8, 64, 512, 4096, 16384):
        ready = made(size)
        began = time.process_time()
        encoded = len(manifest_codec.encode(part_records.merge(ready)))
        seconds = time.process_time() - began
        record = sum(len(manifest_codec.encode(one.manifest)) for one in ready[1:9]) // max(1, len(ready[1:9]))
        lists = -(-size // 1000)
        latency = (lists + -(-size // part_records.READS_AT_ONCE) + 2) * LATENCY_SECONDS
        print(
            f"| {size:,} | {encoded / 1e6:.1f} MB | {record / 1e3:.0f} kB | {lists} | {size - 1:,} | "
            f"{seconds:.2f} s | {latency:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
