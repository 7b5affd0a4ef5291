"""`ckpt diff`: where two snapshots differ, and which bytes they share."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import click

from ckpt_engine.cli.output import json_option, print_json
from ckpt_engine.cli.root import LATEST, open_run, storage_options
from ckpt_engine.observe import units
from ckpt_engine.observe.units import count
from ckpt_engine.restore.choose import Candidate, assemble
from ckpt_engine.store import names
from ckpt_engine.store.decode import stored_pieces
from ckpt_engine.store.manifest import Manifest

SHOWN = 20


@click.command("diff", short_help="Say where two snapshots differ.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--all", "everything", is_flag=True, help=f"Show every difference, not only the first {SHOWN}.")
@storage_options
@json_option
def command(first: str, second: str, everything: bool, as_json: bool) -> None:
    """Compare two snapshots bit for bit: ROOT#SNAPSHOT each, or ROOT for its latest.

    Tensors, values, random streams and data positions are compared by their place in the state. Tensors whose digests
    are equal are not read. The times that a run measured, which no two runs share, are left out. Says, too, which
    snapshots' files each of them needs, and what they share. Ends with exit code 1 if there is a difference.
    """
    from ckpt_engine.cli.compare import Comparison  # torch

    a, b = _snapshot(first), _snapshot(second)
    comparison = Comparison(a, b)
    found = [one for one in comparison if not one.measured]
    origins = Origins.of(a.manifest), Origins.of(b.manifest)
    shared = shared_bytes(a.manifest, b.manifest)
    if as_json:
        rows = [asdict(one) for one in found]
        stored = {"a": asdict(origins[0]), "b": asdict(origins[1]), "shared_bytes": shared}
        both = {"a": a.info.id, "b": b.info.id}
        print_json({**both, "compared": comparison.compared, "differences": rows, "stored": stored})
    elif not found:
        click.echo(f"{a.info.id} and {b.info.id} are equal, bit for bit ({count(comparison.compared, 'value')})")
    else:
        for one in found if everything else found[:SHOWN]:
            click.echo(str(one))
        hidden = 0 if everything else max(len(found) - SHOWN, 0)
        more = f", {hidden:,} of them not shown (--all shows them)" if hidden else ""
        click.echo(f"{count(len(found), 'difference')} between {a.info.id} and {b.info.id}{more}")
    if not as_json and (shared or any(len(one.written_by) > 1 for one in origins)):
        click.echo(f"{origins[0]}\n{origins[1]}\n{units.size(shared)} of it is the same data")
    if found:
        sys.exit(1)


def _snapshot(name: str) -> Candidate:
    root, _, wanted = name.partition("#")
    return assemble(*open_run(root).find(wanted or LATEST))


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the stored bytes of a snapshot come from.

    Args:
        id: the snapshot.
        nbytes: of its state.
        stored_bytes: what is needed to read it, bases of deltas included.
        written_by: the same by the snapshot that wrote them, the oldest first.
    """

    id: str
    nbytes: int
    stored_bytes: int
    written_by: Mapping[str, int]

    @classmethod
    def of(cls, manifest: Manifest) -> Origins:
        """Those of a snapshot."""
        counted: Counter[str] = Counter()
        for name, _, nbytes in _ranges(manifest):
            owner = names.data_owner(name)
            assert owner is not None  # the manifest was verified
            counted[owner.id] += nbytes
        info = manifest.info
        return cls(info.id, info.nbytes, sum(counted.values()), dict(sorted(counted.items())))

    def __str__(self) -> str:
        share = f", {units.share(self.stored_bytes / self.nbytes)} of its size" if self.nbytes else ""
        by = ", ".join(
            f"{units.size(nbytes)} by {'itself' if one == self.id else one}" for one, nbytes in self.written_by.items()
        )
        return f"{self.id} needs {units.size(self.stored_bytes)}{share}: {by or 'nothing was written'}"


def shared_bytes(a: Manifest, b: Manifest) -> int:
    """Stored bytes that both need: they lie there once."""
    return sum(nbytes for _, _, nbytes in _ranges(a) & _ranges(b))


def _ranges(manifest: Manifest) -> set[tuple[str, int, int]]:
    return {(manifest.files[piece.file].name, piece.offset, piece.nbytes) for _, piece in stored_pieces(manifest)}
