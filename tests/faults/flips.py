"""The campaign of bit flips: `python -m tests.faults.flips --flips 2400 --seed 1`.

A small run on three tiers has every kind of file: record, lease, status, rollback, attempts, catalog, pins, manifests,
part records, and data files raw, with differences between rows, compressed, and as differences between snapshots. Each
flip changes one bit of one file. Then `ckpt verify` of that tier must name the file, and whatever is loaded from that
tier alone must be what was saved, or a coded error. Kinds get equally many flips.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main as ckpt
from ckpt_engine.copy import encode_pieces
from ckpt_engine.copy.write_snapshot import cut
from ckpt_engine.errors import CkptError
from ckpt_engine.preempt.divergence import RollbackRecord, write_rollback
from ckpt_engine.restore.load import load
from ckpt_engine.store import catalog, container, lease_holder, names, object_lease, pins
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer import part_records
from tests.snapshot.passage import same
from tests.support.bounds import bounds

STEPS = 5
TIERS = {"near": "raw", "zip": "byteplane-zstd", "far": "delta"}
CODECS = {"raw", "rows", "byteplane-zstd", "delta-byteplane-zstd"}
"""How bytes of the run are stored."""
KINDS = (
    *("record", "lease", "status", "rollback", "attempts", "catalog", "pin", "manifest", "part"),
    *("header", "raw", "encoded", "delta"),
)
"""Of files, and of bytes in data files."""


def state(step: int) -> dict[str, Any]:
    """The state after a step: a table of which few rows change, weights of which all do, a little."""
    table = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    for one in range(1, step + 1):
        random_of = torch.Generator().manual_seed(one)
        table[torch.randint(300, (3,), generator=random_of)] += one
        weights += 1e-6 * torch.randn(50, 20, generator=random_of)
    return {
        "model": {"table": table, "weights": weights, "half": weights.bfloat16()},
        "step": step,
        "text": "grüße" * 9,
    }


@contextmanager
def everything_is_shared() -> Iterator[None]:
    """However small it is, in small pieces; and the catalog is written at once."""
    with (
        patch.object(*bounds("PLAIN", least_bytes=0)),
        patch.object(encode_pieces, "LEAST_ROWS", 2),
        patch.object(catalog, "EVERY", 1),
        patch.object(cut, "__defaults__", (4000,)),
    ):
        yield


@dataclass(frozen=True)
class Span:
    """Bytes of a file that something depends on."""

    file: Path
    start: int
    stop: int


@dataclass
class Site:
    """The run, and where its files can be hit, by kind."""

    root: Path
    spans: dict[str, list[Span]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    codecs: set[str] = field(default_factory=set)

    @classmethod
    def build(cls, root: Path) -> Site:
        """Train, and add what a run has only sometimes."""
        site = cls(root)
        tiers = [{"url": str(root / name), "codec": codec, "keep": {"last": 9}} for name, codec in TIERS.items()]
        with everything_is_shared(), Checkpointer(tiers=tiers, writer="thread") as checkpointer:
            for step in range(1, STEPS + 1):
                checkpointer.save(state(step), step=step, metrics={"loss": 1 / step}).wait(60)
                assert checkpointer.wait(60)
            for name in TIERS:
                site._lease(root / name)
        with everything_is_shared():
            for name in TIERS:
                site._add_rare(Repository(LocalStorage(root / name)))
        for name in TIERS:
            site._find(root / name)
        return site

    def _lease(self, root: Path) -> None:
        """Keep what the lease says while a writer has it."""
        text = (root / names.LEASE).read_bytes()
        self.root.joinpath(f"{root.name}.lease").write_bytes(text)

    def _add_rare(self, repository: Repository) -> None:
        storage = repository.storage
        assert isinstance(storage, LocalStorage)
        newest = repository.read(repository.ids()[-1].id)
        pins.pin(repository, newest.info.id, 'the best, "so far"')
        write_rollback(storage, RollbackRecord(newest.info.id, STEPS, newest.info.id, 9, 2, 1, "the loss is nan"))
        self._add_part(repository, repository.read(repository.ids()[0].id))
        with acquire(storage):
            Repository(storage).write_catalog_if_due()
        assert (Path(storage.root) / names.CATALOG).exists()
        kept = self.root / f"{Path(storage.root).name}.lease"
        text = kept.read_bytes()
        kept.unlink()
        if Path(storage.root).name == "far":  # the other form: of a storage without locks
            place = lease_holder.ProcessIdentity.current()
            text = object_lease.Record("ab" * 16, 7, 30.0, place).encode(json.loads(text))
        (Path(storage.root) / names.LEASE).write_bytes(text)

    def _add_part(self, repository: Repository, source: Manifest) -> None:
        """What a rank has written of a snapshot that was never completed."""
        info = replace(source.info, id=names.snapshot_id(STEPS + 1, STEPS + 1), seq=STEPS + 1, step=STEPS + 1)
        (file, *more) = source.files
        assert not more
        name = names.data_name(info.id, rank=1)
        repository.storage.put(name, [memoryview((self.root / _place(repository) / file.name).read_bytes())])
        manifest = replace(source, info=info, files=(replace(file, name=name),))
        part_records.put(repository.storage, part_records.PartRecord((1,), 2, "structure", {}, manifest))

    def _find(self, root: Path) -> None:
        repository = Repository(LocalStorage(root))
        folders = {names.PINS: "pin", names.MANIFESTS: "manifest", names.PARTS: "part"}
        for item in repository.storage.list(""):
            folder = item.name.rpartition("/")[0]
            kind = folders.get(f"{folder}/") if folder else item.name.replace("ckpt", "record").removesuffix(".json")
            if kind is not None:
                self.spans[kind].append(Span(root / item.name, 0, item.nbytes))
        manifests = [repository.read(parsed.id) for parsed in repository.ids()]
        manifests += [
            part_records.read(repository.storage, one, 1).manifest for one in part_records.there(repository.storage)
        ]
        for manifest in manifests:
            for file in manifest.files:
                nbytes = container.header_nbytes((root / file.name).read_bytes()[:8])
                self.spans["header"].append(Span(root / file.name, 0, nbytes))
            for _, piece in stored_pieces(manifest):
                self.codecs.add(piece.codec)
                kind = "raw" if piece.codec == "raw" else "encoded" if piece.base is None else "delta"
                path = root / manifest.files[piece.file].name
                self.spans[kind].append(Span(path, piece.offset, piece.offset + piece.nbytes))


def _place(repository: Repository) -> str:
    assert isinstance(repository.storage, LocalStorage)
    return Path(repository.storage.root).name


def verified(root: Path) -> dict[str, Any]:
    """What `ckpt verify --json` says of a place, and that its exit code says the same."""
    out = StringIO()
    with redirect_stdout(out):
        try:
            ckpt(["verify", str(root), "--json"])
        except SystemExit as end:
            code = end.code
    row: dict[str, Any] = json.loads(out.getvalue())
    assert (code == 0) is row["ok"], row
    return row


def named(row: dict[str, Any]) -> set[str]:
    """The files that a verification complains about."""
    found = {problem["file"] for snapshot in row["snapshots"] for problem in snapshot["problems"]}
    found |= {other["file"] for other in row["others"]}
    return found | {other["message"] for other in row["others"] if other["file"].startswith("parts/")}  # of its data


def restored(root: Path, step: int | None) -> str | None:
    """What is wrong with what is loaded from one place; an error of ours is no fault."""
    try:
        found = load([Repository(LocalStorage(root))], step=step)
    except CkptError:
        return None
    if found is None:
        return "nothing was found"
    return None if same(found.state, state(found.info.step)) else f"wrong bytes of step {found.info.step}"


@dataclass
class Tally:
    """What came of the flips."""

    flips: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def campaign(site: Site, flips: int, seed: int, kinds: Sequence[str] = KINDS) -> Tally:
    """Flip bits one at a time, each undone before the next."""
    chance, tally = random.Random(seed), Tally()
    for number in range(flips):
        kind = kinds[number % len(kinds)]
        span = chance.choice(site.spans[kind])
        at, bit = chance.randrange(span.start, span.stop), chance.randrange(8)
        where = f"{kind}: bit {bit} of byte {at} of {span.file.relative_to(site.root)}"
        root = site.root / span.file.relative_to(site.root).parts[0]
        whole = span.file.read_bytes()
        span.file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        try:
            said = named(verified(root))
            name = str(span.file.relative_to(root))
            if not any(name in one for one in said):
                tally.bad.append(f"{where} was not found, only {sorted(said)}")
            for step in (None, chance.randint(1, STEPS)):
                if (wrong := restored(root, step)) is not None:
                    tally.bad.append(f"{where}: {wrong}")
        except Exception as err:  # noqa: BLE001 - anything that is no error of ours is a finding
            tally.bad.append(f"{where}: {type(err).__name__}: {err}")
        finally:
            span.file.write_bytes(whole)
        tally.flips[kind] += 1
    return tally


def main() -> int:
    """Play it and print the numbers."""
    parser = argparse.ArgumentParser(description="Flip bits of every kind of file.")
    parser.add_argument("--flips", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Site.build(Path(folder))
        assert all(verified(site.root / name)["ok"] for name in TIERS)
        tally = campaign(site, options.flips, options.seed)
    for kind, number in tally.flips.items():
        print(f"{kind:<9}{number:>6}")
    print(
        f"{sum(tally.flips.values())} flips, codecs {', '.join(sorted(site.codecs))}: {len(tally.bad)} not as promised"
    )
    for line in tally.bad:
        print(line)
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
