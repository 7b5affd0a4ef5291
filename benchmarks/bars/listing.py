"""Ten thousand snapshots in one run: how long a listing and a resume take on a disk, and what they ask of S3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.counted import PAGE_NAMES, CountedStorage
from benchmarks.measure import interleave, timed
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from ckpt_engine import Checkpointer
from ckpt_engine.restore.load import load
from ckpt_engine.store import catalog, container
from ckpt_engine.store import names as layout
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage

TITLE = "Listing and resuming with 10,000 snapshots"
LIMIT_SECONDS = 2.0
ENTRIES = 24
"""Tensors of a snapshot: as many as a small model and its optimizer have."""
FEW_REQUESTS = 8
"""The record, the catalog, the manifest, its data and their like: whatever does not depend on the number."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    snapshots: int
    fewer: int
    rounds: int


SIZES = {Scale.FULL: Size(10_000, 1000, 9), Scale.QUICK: Size(10_000, 1000, 3), Scale.TINY: Size(300, 150, 1)}


def run(bench: Bench) -> BarResult:
    """Measure on a folder of real small snapshots, then count the requests to a store in memory."""
    size = SIZES[bench.scale]
    with bench.scratch("listing") as folder:
        root = folder / "run"
        storage = LocalStorage(root, disk=_UnsyncedDisk())
        _fill(storage, size.snapshots, lambda done: bench.say(f"{done:,} of {size.snapshots:,} snapshots made"))
        text = (root / layout.CATALOG).read_bytes()
        candidates = {
            "ls": lambda: timed(lambda: _ls(root)),
            "snapshots": lambda: timed(lambda: _snapshots(root, size.snapshots)),
            "load": lambda: timed(lambda: _load(root)),
        }
        taken = interleave(candidates, size.rounds, tick=bench.say)
        (root / layout.CATALOG).unlink()
        bare = interleave({"ls": candidates["ls"], "snapshots": candidates["snapshots"]}, size.rounds, tick=bench.say)
    listing, resume = {}, {}
    for count in (size.fewer, size.snapshots):
        bench.say(f"counting requests with {count:,} snapshots")
        listing[count], resume[count] = _requests(count)
    return BarResult(
        "listing",
        TITLE,
        {
            "run": f"{size.snapshots:,} snapshots of {ENTRIES} small tensors, a manifest and a data file each, "
            f"and a catalog of {len(text) / 1e6:.1f} MB; warm page cache",
            "ckpt ls": "the command from start to exit, output to a pipe",
            "load": "`Checkpointer.load()`: choose the newest, verify and rebuild it",
            "S3": f"requests to a store in memory, {PAGE_NAMES:,} names per page of a listing; "
            f"the {catalog.EVERY - 1} newest snapshots are not in the catalog yet, the most that there can be",
        },
        (
            Check("ckpt ls", "s", "at most", LIMIT_SECONDS, tuple(taken["ls"])),
            Check("Checkpointer.snapshots()", "s", "at most", LIMIT_SECONDS, tuple(taken["snapshots"])),
            Check("Checkpointer.load() of the newest", "s", "at most", LIMIT_SECONDS, tuple(taken["load"])),
            Check(
                "S3 requests of a listing, without its pages",
                "",
                "at most",
                float(catalog.EVERY + FEW_REQUESTS),
                (listing[size.snapshots] - _pages(size.snapshots),),
            ),
            Check(
                "S3 requests of a resume, without the pages of two listings",
                "",
                "at most",
                float(FEW_REQUESTS),
                (resume[size.snapshots] - 2 * _pages(size.snapshots),),
            ),
        ),
        (
            Series("ckpt ls without a catalog", "s", tuple(bare["ls"]), "a manifest read for each snapshot"),
            Series("Checkpointer.snapshots() without a catalog", "s", tuple(bare["snapshots"])),
            *(
                Series(f"S3 requests of a {what}, {count:,} snapshots", "", (float(found),))
                for what, counted in (("listing", listing), ("resume", resume))
                for count, found in counted.items()
            ),
        ),
    )


class _UnsyncedDisk(Disk):
    """Building the run is not what is measured."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: str) -> None:
        pass


def _fill(storage: Storage, count: int, say: Callable[[int], object], *, newer: int = 0) -> None:
    """A run of `count` snapshots, of which the last `newer` were written by a process that has not catalogued them."""
    repository = Repository(storage)
    repository.create_if_absent()
    for seq in range(1, count + 1):
        if seq == count + 1 - newer:
            repository.write_catalog_if_due()
        data, manifest = _snapshot(repository.run_id, seq)
        storage.put(manifest.files[0].name, [memoryview(data)])
        repository.commit(manifest)
        if seq % 500 == 0:
            say(seq)
    if not newer:
        repository.write_catalog_if_due()


def _snapshot(run: str, seq: int) -> tuple[bytes, Manifest]:
    """A data file and its manifest, such as the writer makes of a small model."""
    snapshot = layout.snapshot_id(seq, seq * 10)
    names = [f"model/layer{number:02d}.weight" for number in range(ENTRIES)]
    body = torch.full((16,), float(seq)).numpy().tobytes()
    header = container.build_header([(name, *container.container_form("float32", (16,), 64), 64) for name in names])
    data = header + body * ENTRIES
    entries = {
        name: Entry("float32", (16,), (Piece(0, len(header) + 64 * at, 64, digest(body), 64),), "F32")
        for at, name in enumerate(names)
    }
    tree = {"model": {name.partition("/")[2]: {"$": "tensor", "entry": name} for name in names}, "step": seq * 10}
    info = SnapshotInfo(
        id=snapshot,
        seq=seq,
        step=seq * 10,
        epoch=seq // 100,
        reason="interval",
        created=1_700_000_000.0 + 60 * seq,
        nbytes=64 * ENTRIES,
        metrics={"val_loss": 1 / seq, "val_acc": 1 - 1 / seq},
        components={"model": 64 * ENTRIES, "step": 0},
    )
    files = (DataFile(layout.data_name(snapshot), len(data)),)
    return data, Manifest(info, run, {"size": 1}, {"python": "3", "torch": "2"}, files, entries, tree)


def _ls(root: Path) -> None:
    subprocess.run([sys.executable, "-m", "ckpt_engine.cli.main", "ls", str(root)], check=True, capture_output=True)


def _snapshots(root: Path, count: int) -> None:
    with Checkpointer(root) as ckpt:
        found = len(ckpt.snapshots())
    if found != count:
        raise RuntimeError(f"{found} snapshots are listed instead of {count}")


def _load(root: Path) -> None:
    with Checkpointer(root) as ckpt:
        state = ckpt.load()
    if state is None or len(state["model"]) != ENTRIES:
        raise RuntimeError("the newest snapshot was not loaded")


def _requests(count: int) -> tuple[float, float]:
    """Requests of a listing and of choosing and reading the newest snapshot."""
    storage = CountedStorage()
    _fill(storage, count, lambda _: None, newer=catalog.EVERY - 1)
    storage.requests.clear()
    if len(Repository(storage).list()) != count:
        raise RuntimeError("the listing is not complete")
    listing = storage.total
    storage.requests.clear()
    if load([Repository(storage)]) is None:
        raise RuntimeError("the newest snapshot was not loaded")
    return float(listing), float(storage.total)


def _pages(count: int) -> int:
    return -(-count // PAGE_NAMES)
