"""`ckpt cp`: copy a run, or some of its snapshots, to another place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from ckpt_engine.cli.output import count, json_option, print_json, progress
from ckpt_engine.cli.root import find_snapshot, open_root
from ckpt_engine.config import load_config
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.store import layout, pins
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.open import open_storage
from ckpt_engine.store.throttle import paced
from ckpt_engine.store.transfer import RunText, SourceError, adopt_run, copy_snapshot, scratch_of


@dataclass(frozen=True, slots=True)
class _Failed:
    """A snapshot that could not be copied: it is damaged where it comes from."""

    snapshot: str
    code: str
    why: str


@click.command("cp")
@click.argument("source")
@click.argument("target")
@click.option(
    "--snapshot", "wanted", multiple=True, metavar="SNAPSHOT", help="Only this one; repeatable. Default: all of them."
)
@json_option
def command(source: str, target: str, wanted: tuple[str, ...], as_json: bool) -> None:
    """Copy the run at SOURCE to TARGET: a folder, a storage URL, or a ckpt.yaml that names one.

    Newest first, byte for byte, verified on the way. What TARGET has already stays as it is, so that an interrupted
    copy goes on with the same command. TARGET must be empty or hold the same run. Ends with exit code 1 if a snapshot
    was damaged at SOURCE.
    """
    near = open_root(source)
    tier = load_config(target).tiers[0]
    storage = open_storage(tier.url, tier.for_storage())
    ids = [find_snapshot(near, one) for one in wanted] or [parsed.id for parsed in near.ids()]
    with acquire(storage):
        far = adopt_run(RunText.of(near), storage)
        there = {parsed.id for parsed in far.ids()}
        missing = [one for one in sorted(set(ids), reverse=True) if one not in there]
        with progress(hidden=as_json) as bar:
            task = bar.add_task("copying", total=_data_bytes(near, missing))
            sink = open_storage(tier.url, tier.for_storage())
            sink = paced(sink, _counting(lambda nbytes: bar.advance(task, nbytes)))
            sent_bytes, failed = 0, []
            for snapshot in missing:
                try:
                    sent_bytes += copy_snapshot(
                        near, far, snapshot, sink=sink, scratch=scratch_of(near.storage) or scratch_of(storage)
                    ).sent_bytes
                except SourceError as err:
                    if not isinstance(err.error, StorageMissingError) or snapshot in {p.id for p in near.ids()}:
                        failed.append(_Failed(snapshot, err.error.code, err.error.message))
        _copy_pins(near, far)
    copied = [one for one in missing if one in {parsed.id for parsed in far.ids()}]
    _print(near, far, copied, len(ids) - len(missing), sent_bytes, failed, as_json=as_json)
    if failed:
        sys.exit(1)


def _counting(advance: Callable[[int], object]) -> Callable[[int], float]:
    def pace(nbytes: int) -> float:
        advance(nbytes)
        return 0.0

    return pace


def _data_bytes(repository: Repository, ids: Sequence[str]) -> int:
    wanted = set(ids)
    found = ((item.nbytes, layout.data_owner(item.name)) for item in repository.storage.list(layout.DATA))
    return sum(nbytes for nbytes, owner in found if owner is not None and owner.id in wanted)


def _copy_pins(near: Repository, far: Repository) -> None:
    """What is kept on purpose stays so at the copy."""
    pinned = pins.pinned_ids(far.storage)
    there = {parsed.id for parsed in far.ids()}
    for pin in pins.pins(near.storage):
        if pin.id in there and pin.id not in pinned:
            pins.pin(far, pin.id, pin.note, created=pin.created)


def _print(
    near: Repository,
    far: Repository,
    copied: Sequence[str],
    present: int,
    sent_bytes: int,
    failed: Sequence[_Failed],
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "source": near.storage.url,
                "target": far.storage.url,
                "copied": list(copied),
                "present": present,
                "sent_bytes": sent_bytes,
                "failed": [{"id": one.snapshot, "code": one.code, "why": one.why} for one in failed],
            }
        )
        return
    for one in failed:
        click.secho(f"{one.snapshot}  not copied: [{one.code}] {one.why}", fg="red")
    before = f", {present:,} there already" if present else ""
    click.echo(f"{count(len(copied), 'snapshot')} copied to {far.storage.url}, {units.size(sent_bytes)} sent{before}")
