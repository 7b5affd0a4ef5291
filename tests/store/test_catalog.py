"""The catalog: requests that grow with pages, and no trust beyond what the listing shows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.counted import CountedStorage
from ckpt_engine.copy.make_room import collect, measure, prune
from ckpt_engine.errors import CorruptError, StorageError
from ckpt_engine.restore import choose
from ckpt_engine.store import catalog, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import ObjectInfo, Storage
from ckpt_engine.store.storage.local import LocalStorage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.store.samples import info, manifest, save

RUN = "ab" * 16


def fill(storage: Storage, count: int, first: int = 1) -> list[str]:
    """A run of snapshots without data files, each with its own step; the catalog as its writer leaves it."""
    repository = Repository(storage)
    repository.create_if_absent()
    made = []
    for seq in range(first, first + count):
        about = info(seq, seq * 10, {"loss": 1 / seq})
        repository.commit(manifest(about, repository.run_id))
        made.append(about.id)
    repository.write_catalog_if_due()
    return made


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_grow_with_pages_not_with_snapshots(count: int) -> None:
    """A listing, a resume, and the reading of retention: pages, the record, the catalog, and what is newer than it."""
    storage = CountedStorage()
    fill(storage, count)
    newer = fill(storage, catalog.EVERY - 1, count + 1)
    pages = -(-(count + len(newer)) // 1000)

    storage.requests.clear()
    assert len(Repository(storage).list()) == count + len(newer)
    assert storage.requests == {"list": pages, "get": 2 + len(newer)}

    storage.requests.clear()
    with pytest.raises(Exception, match="data file"):  # there is no data here: every candidate is looked at
        choose.assemble(newer[-1], [Repository(storage)])
    assert Repository(storage).ids()[-1].id == newer[-1]
    assert storage.requests == {"get": 1, "list": 1 + pages}

    storage.requests.clear()
    measure(Repository(storage))
    storage.objects[names.data_name(names.snapshot_id(5, 5))] = b"garbage"
    Repository(storage).unreferenced()
    assert storage.total <= 2 * (2 + len(newer)) + 4 * (pages + 1)


def test_without_a_catalog_everything_is_read_and_right() -> None:
    """The cost of a missing catalog is requests, and nothing else."""
    storage = CountedStorage()
    made = fill(storage, 150)
    with_it = Repository(storage).scan()
    del storage.objects[names.CATALOG]
    storage.requests.clear()
    assert Repository(storage).scan() == with_it
    assert storage.requests["get"] == len(made) + 2


def test_a_young_run_has_none() -> None:
    """Below the limit nothing is written, and few snapshots are read without asking for a catalog."""
    storage = CountedStorage()
    fill(storage, catalog.EVERY - 1)
    assert names.CATALOG not in storage.objects
    few = CountedStorage()
    fill(few, catalog.FEW)
    few.requests.clear()
    Repository(few).list()
    assert few.requests == {"list": 1, "get": catalog.FEW}


def test_the_writer_keeps_it_up_to_date() -> None:
    """One catalog per hundred snapshots, by a process that goes on and by those that come after it."""
    storage = CountedStorage()
    repository = Repository(storage)
    repository.create_if_absent()
    written = 0
    for seq in range(1, 301):
        repository.commit(manifest(info(seq), repository.run_id))
        before = storage.objects.get(names.CATALOG)
        repository.write_catalog_if_due()
        written += storage.objects.get(names.CATALOG) != before
    assert written == 3
    for _ in range(2):  # processes that are killed before their hundredth snapshot
        fill(storage, 60, Repository(storage).next_seq())
    later = Repository(storage)
    later.list()
    later.write_catalog_if_due()
    storage.requests.clear()
    assert len(Repository(storage).list()) == 420
    assert storage.requests["get"] == 2


def card(name: str = "", nbytes: int = 7, version: str = "v1", **about: Any) -> catalog.CatalogEntry:
    facts = info(**about)
    item = ObjectInfo(name or names.manifest_name(facts.id), nbytes, version)
    return catalog.CatalogEntry(item, facts, (names.data_name(facts.id),))


def listed(*cards: catalog.CatalogEntry) -> dict[str, ObjectInfo]:
    return {one.info.id: one.manifest for one in cards}


def test_a_catalog_says_what_it_was_given() -> None:
    """Metrics that JSON has no numbers for come back too."""
    cards = [card(seq=1, metrics={"loss": math.inf}), card(seq=2, epoch=None)]
    assert catalog.decode(catalog.encode(RUN, cards), RUN, listed(*cards)) == cards


def test_an_entry_counts_only_for_the_very_object() -> None:
    """An entry is left out if the listing has another size, another or no version, or lacks the name."""
    one = card()
    text = catalog.encode(RUN, [one])
    assert catalog.decode(text, RUN, {one.info.id: ObjectInfo("x", 7, "v1")})
    for other in (ObjectInfo("x", 8, "v1"), ObjectInfo("x", 7, "v2"), ObjectInfo("x", 7)):
        assert catalog.decode(text, RUN, {one.info.id: other}) == []
    assert catalog.decode(text, RUN, {}) == []
    unknown = card(version="")
    assert catalog.decode(catalog.encode(RUN, [unknown]), RUN, listed(unknown)) == []


def test_what_is_not_a_whole_catalog_of_this_run_is_none() -> None:
    """Cut anywhere, any bit flipped, of another run, of a later version, or not JSON at all."""
    one = card()
    text = catalog.encode(RUN, [one])
    for cut in range(len(text)):
        with pytest.raises(CorruptError):
            catalog.decode(text[:cut], RUN, listed(one))
    for at in range(len(text) - 2):
        with pytest.raises(CorruptError):
            catalog.decode(text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :], RUN, listed(one))
    with pytest.raises(CorruptError, match="another run"):
        catalog.decode(text, "cd" * 16, listed(one))
    body = b'{"format":"ckpt-engine","version":1,"run":"%s","snapshots":[{"info":3}]}' % RUN.encode()
    for odd in (body, body.replace(b'"version":1', b'"version":2'), b"[]", b"{"):
        whole = b'{"digest":"%s","catalog":%s}\n' % (digest(odd).encode(), odd)
        with pytest.raises(CorruptError):
            catalog.decode(whole, RUN, listed(one))


@pytest.mark.parametrize("text", [b"", b"\0" * 100, b'{"digest":"x","catalog":{}}\n'])
def test_a_damaged_catalog_costs_time_only(tmp_path: Path, text: bytes) -> None:
    """The listing is the same, and the next writer replaces it."""
    storage = LocalStorage(tmp_path)
    made = fill(storage, 120)
    before = Repository(storage).scan()
    (tmp_path / names.CATALOG).write_bytes(text)
    repository = Repository(storage)
    assert repository.scan() == before
    assert [one.id for one in repository.list()] == made
    repository.write_catalog_if_due()
    assert (tmp_path / names.CATALOG).stat().st_size > 10_000


def test_a_manifest_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    """Damage with the same name and size shows in a listing although the catalog has the snapshot."""
    storage = LocalStorage(tmp_path)
    made = fill(storage, 120)
    path = tmp_path / names.manifest_name(made[50])
    path.write_bytes(b"\0" * path.stat().st_size)
    os.utime(path, ns=(1, 1))
    listing = Repository(storage).scan()
    assert [bad.id for bad in listing.damaged] == [made[50]]
    assert len(listing.snapshots) == 119


def test_collection_with_a_catalog_removes_what_it_removes_without(tmp_path: Path) -> None:
    """Data that is only shared with a snapshot of the catalog stays; garbage goes."""
    storage = LocalStorage(tmp_path)
    repository = Repository(storage)
    first = save(repository, 1)
    shared = names.data_name(first)
    second = save(repository, 2, shared=[shared])
    fill(storage, 120, 3)
    assert names.CATALOG in {item.name for item in storage.list("")}
    repository.forget([first])
    orphan = names.data_name(names.snapshot_id(4, 4))
    storage.put(orphan, [memoryview(b"garbage")])
    with acquire(storage) as lease:
        assert collect(Repository(storage), lease).removed == (orphan,)
    assert shared in {item.name for item in storage.list(names.DATA)}
    assert Repository(storage).files_of(second) == (names.data_name(second), shared)


def test_it_breaks_no_limit(tmp_path: Path) -> None:
    """Where a quota has no room for the catalog it is not written; retention goes on all the same."""
    storage = LocalStorage(tmp_path)
    repository = Repository(storage)
    for step in range(110):
        save(repository, step)
    used = measure(repository).used_bytes
    with acquire(storage) as lease:
        tight = policy_from({"last": 1000, "quota": used + 70_000})
        assert prune(Repository(storage), lease, tight).plan.remove == ()
        assert not (tmp_path / names.CATALOG).exists()
        assert measure(repository).used_bytes <= used + 70_000
        prune(Repository(storage), lease, policy_from({"last": 1000, "quota": used + 1_000_000}))
        assert (tmp_path / names.CATALOG).exists()


def test_a_catalog_that_cannot_be_written_is_no_failure() -> None:
    """It is tried again a hundred snapshots later, not with each."""

    class Refusing(CountedStorage):
        tried = 0

        def put(self, name: str, blocks: Any, *, exclusive: bool = True) -> None:
            if name == names.CATALOG:
                self.tried += 1
                raise StorageError("refused")
            super().put(name, blocks, exclusive=exclusive)

    storage = Refusing()
    repository = Repository(storage)
    repository.create_if_absent()
    for seq in range(1, 251):
        repository.commit(manifest(info(seq), repository.run_id))
        repository.write_catalog_if_due()
    assert storage.tried == 2
    assert len(Repository(storage).list()) == 250


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_listing_never_depends_on_the_catalog(data: st.DataObject) -> None:
    """Snapshots come, go and rot; catalogs of any age come back: a fresh reader sees what it sees without one."""
    storage = CountedStorage()
    writer = Repository(storage)
    writer.create_if_absent()
    catalogs: list[bytes] = [b"torn"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "EVERY", 3)
        patch.setattr(catalog, "FEW", 1)
        for _ in range(data.draw(st.integers(1, 25))):
            there = [parsed.id for parsed in writer.ids()]
            match data.draw(st.sampled_from(["commit", "commit", "catalog", "forget", "rot", "swap", "restart"])):
                case "commit":
                    about = info(writer.next_seq())
                    storage.objects[names.data_name(about.id)] = b"data"
                    writer.commit(manifest(about, writer.run_id))
                case "catalog":
                    writer.write_catalog_if_due()
                    catalogs.append(storage.objects.get(names.CATALOG, b""))
                case "forget" if there:
                    writer.forget([data.draw(st.sampled_from(there))])
                case "rot" if there:
                    name = names.manifest_name(data.draw(st.sampled_from(there)))
                    at = data.draw(st.integers(0, len(storage.objects[name]) - 1))
                    text = bytearray(storage.objects[name])
                    text[at] ^= 1
                    storage.objects[name] = bytes(text)
                    writer = Repository(storage)  # what a writer has written itself it believes
                case "swap":
                    storage.objects[names.CATALOG] = data.draw(st.sampled_from(catalogs))
                case "restart":
                    writer = Repository(storage)
        bare = CountedStorage()
        bare.objects = {name: text for name, text in storage.objects.items() if name != names.CATALOG}
        for question in (_shown, Repository.unreferenced, _measured):
            assert repr(question(Repository(storage))) == repr(question(Repository(bare)))


def _shown(place: Repository) -> Any:
    listing = place.scan()
    return listing.snapshots, [(bad.id, bad.error.code) for bad in listing.damaged]


def _measured(place: Repository) -> Any:
    usage = measure(place)
    assert isinstance(place.storage, CountedStorage)
    return sorted(usage.files.items()), usage.other_bytes - len(place.storage.objects.get(names.CATALOG, b""))


def test_requests_to_a_real_server(moto: Any, bucket: str, wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """S3 over a socket: ETags are versions; a listing reads the record, the catalog and what is newer."""
    monkeypatch.setattr(catalog, "EVERY", 20)
    options = moto.options(wire.url, verify="never")
    storage = open_storage(f"s3://{bucket}/run", options)
    made = fill(storage, 25)
    made += fill(storage, 10, 26)
    wire.log.clear()
    assert [one.id for one in Repository(open_storage(f"s3://{bucket}/run", options)).list()] == made
    gets = [path for method, path, _ in wire.log if method == "GET" and "list-type" not in path]
    lists = [path for method, path, _ in wire.log if method == "GET" and "list-type" in path]
    assert (len(gets), len(lists)) == (2 + 10, 1)
    assert wire.count("HEAD") == 0
