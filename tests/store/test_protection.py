"""Protection: what is young stays, and room that only it could give is refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import make_room, prune
from ckpt_engine.errors import StorageFullError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.protection import DAY_SECONDS, begin, young
from ckpt_engine.store.repository import Repository, encode_record, parse_record
from ckpt_engine.store.retention_preflight import most_kept
from ckpt_engine.store.retention_rules import policy_from
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import data_file, info, manifest

SIZE = 300_000


def test_the_reason_has_the_end_of_the_protection() -> None:
    """Counted from when a snapshot was taken; without days nothing is young."""
    infos = [replace(info(seq), created=seq * 10.0 * DAY_SECONDS) for seq in (0, 1)]
    assert young(infos, 14, 15.0 * DAY_SECONDS) == {infos[1].id: "protected until 1970-01-25 00:00 UTC"}
    assert young(infos, 0, 0.0) == {}


def test_a_record_with_days_reads_back_and_one_without_is_as_before() -> None:
    """The key is there only where the option is."""
    plain = b'{"format": "ckpt-engine", "version": 1, "run": "ab", "created": 5.0}'
    record = parse_record(plain, "here")
    assert record.protect_days == 0 and b"protect" not in encode_record(record)
    made = type(record)("ab", 5.0, protect_days=14)
    assert parse_record(encode_record(made), "here") == made


def _save(repository: Repository, age_days: float, nbytes: int = 12, shared: Sequence[str] = ()) -> str:
    """Write and commit a snapshot that was taken so long ago; returns its id."""
    about = replace(info(repository.next_seq()), created=time.time() - age_days * DAY_SECONDS)
    text = bytes(nbytes)
    repository.storage.put(names.data_name(about.id), [memoryview(data_file(text))])
    repository.commit(manifest(about, repository.run_id, shared, text))
    return about.id


def test_a_quota_does_not_make_room_of_protected_snapshots(tmp_path: Path) -> None:
    """The next one is refused, with the name and the date of what stays."""
    storage = LocalStorage(tmp_path)
    repository, policy = Repository(storage), policy_from({"last": 9, "quota": 3 * SIZE, "protect_days": 14})
    with acquire(storage) as lease:
        begin(repository, 14, pytest.fail)
        old, kept = _save(repository, 15, SIZE), _save(repository, 3, SIZE)
        done = make_room(repository, lease, policy, SIZE)
        assert done is not None and done.plan.remove == (old,)
        _save(repository, 0, SIZE)
        with pytest.raises(StorageFullError) as caught:
            make_room(repository, lease, policy, SIZE)
        assert f"{kept} (protected until" in caught.value.message
        assert prune(repository, lease, policy_from({"last": 1})).plan.remove == ()
    assert len(repository.list()) == 2


def test_data_that_a_protected_snapshot_refers_to_stays(tmp_path: Path) -> None:
    """Also that of a snapshot which is gone."""
    storage = LocalStorage(tmp_path)
    repository = Repository(storage)
    with acquire(storage) as lease:
        begin(repository, 14, pytest.fail)
        old = _save(repository, 20)
        young_one = _save(repository, 2, shared=[names.data_name(old)])
        newest = _save(repository, 0)
        prune(repository, lease, policy_from({"last": 1}))
    assert [one.id for one in repository.list()] == [young_one, newest]
    assert {item.name for item in storage.list(names.DATA)} == set(map(names.data_name, (old, young_one, newest)))


def test_how_many_snapshots_are_kept_has_no_bound() -> None:
    """The days say how many."""
    assert most_kept(policy_from({"last": 3, "protect_days": 2})) == (2, False)
