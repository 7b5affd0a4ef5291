"""Lines of history: retention of one job never removes what another one has made."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_engine.copy.make_room import make_room, plan_prune, prune
from ckpt_engine.errors import StorageFullError
from ckpt_engine.store import catalog, manifest_codec
from ckpt_engine.store.branches import MOST_ATTEMPTS, OTHER_LINE, UNNAMED_BRANCH, branches, continued
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Line, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast, policy_from
from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import data_file, info, manifest
from tests.store.samples import save as save_unnamed


def of(line: Line, seq: int) -> SnapshotInfo:
    """A snapshot of that line."""
    return dataclasses.replace(info(seq, seq), line=line)


def save(repository: Repository, line: Line, step: int = 1) -> str:
    """Commit a snapshot of that line; its id."""
    repository.create_if_absent()
    about = dataclasses.replace(info(repository.next_seq(), step), line=line)
    made = manifest(about, repository.run_id)
    repository.storage.put(made.files[0].name, [memoryview(data_file())])
    repository.commit(made)
    return about.id


@dataclasses.dataclass
class Job:
    """A job of a random schedule: its line, and all that this line has ever had."""

    line: Line
    history: list[SnapshotInfo]


def began(number: int, what: str, there: Sequence[SnapshotInfo], jobs: Sequence[Job], rng: random.Random) -> Job:
    """A new job that begins fresh, resumes the newest snapshot, or goes back to some other one."""
    attempt = f"attempt{number}"
    if what == "fresh" or not there:
        return Job(Line(attempt), [])
    resumed = there[-1] if what == "resume" else rng.choice(there)
    before = continued(resumed, [one for one in there if one.seq > resumed.seq], ())
    continues = next(job for job in reversed(jobs) if resumed in job.history)
    return Job(Line(attempt, before), list(continues.history) if before else [])


def goes_on(one: Job, other: Job) -> bool:
    """Whether the history of a job begins with all that of another one, and is longer."""
    return len(one.history) > len(other.history) and one.history[: len(other.history)] == other.history


@pytest.mark.parametrize("seed", range(100))
def test_the_newest_of_every_line_are_there_whatever_jobs_do(seed: int) -> None:
    """Jobs, one after another, begin fresh, resume or go back, save, and keep the last two of their line, at random."""
    rng = random.Random(seed)
    there: list[SnapshotInfo] = []
    jobs: list[Job] = []
    for number in range(1, 60):
        what = rng.choice(["fresh", "resume", "back", "save", "save", "save", "prune", "prune"])
        if what in ("fresh", "resume", "back"):
            jobs.append(began(number, what, there, jobs, rng))
        elif jobs and what == "save":
            there.append(of(jobs[-1].line, number))
            jobs[-1].history.append(there[-1])
        elif jobs:
            ours = jobs[-1].line
            kept = KeepLast(2).keep([one for one in there if ours.has(one)])
            there = [one for one in there if one.id in kept or not ours.has(one)]
        tips = [job for job in jobs if not any(goes_on(other, job) for other in jobs)]
        assert all(info in there for job in tips for info in job.history[-2:])


def test_a_job_beside_another_of_the_same_start_has_a_line_of_its_own() -> None:
    """Two jobs resume the same snapshot at the same time: what each makes after it is not of the other's line."""
    start = of(Line("a"), 1)
    one, two = (Line(name, continued(start, [], ())) for name in ("b", "c"))
    assert one.has(start)
    assert two.has(start)
    assert not one.has(of(two, 2))
    assert not two.has(of(one, 2))
    assert not one.has(of(Line("a"), 2))  # the first one was alive, and went on


def test_going_on_from_what_was_continued_begins_a_line() -> None:
    """Who goes back to an older snapshot leaves the newer ones alone, unless they cannot be used."""
    old, newer = of(Line("a"), 1), of(Line("b", (("a", 1),)), 2)
    assert continued(old, [newer], ()) == ()
    assert continued(old, [newer], {newer.id}) == (("b", 2), ("a", 1))
    assert continued(old, [of(Line("x"), 9)], ()) == (("a", 1),)


def test_a_line_names_only_so_many_attempts() -> None:
    """The manifest of the thousandth attempt is not longer than that of the hundredth."""
    line = Line("0")
    for number in range(1, 3 * MOST_ATTEMPTS):
        line = Line(str(number), continued(of(line, number), [], ()))
    assert len(line.before) == MOST_ATTEMPTS
    assert line.before[0] == (str(3 * MOST_ATTEMPTS - 2), 3 * MOST_ATTEMPTS - 1)


def test_a_line_survives_manifest_and_catalog() -> None:
    """What is written is read; without a line a manifest has the bytes that it had before there were any."""
    line = Line("abc", (("def", 7), ("", 3)))
    about = of(line, 8)
    assert manifest_codec.decode(manifest_codec.encode(manifest(about))).info == about
    assert manifest_codec.decode_info(manifest_codec.encode(manifest(about))) == about
    item = ObjectInfo(f"snapshots/{about.id}.json", 5, "v")
    text = catalog.encode("ab" * 16, [catalog.CatalogEntry(item, about, ())])
    assert catalog.decode(text, "ab" * 16, {about.id: item})[0].info == about
    assert "line" not in json.loads(json.dumps(manifest_codec.info_to_json(info())))


def test_branches_are_distinguished() -> None:
    """The branch of the newest snapshot is first; what two branches share belongs to none alone."""
    trunk = of(Line(), 1)
    one = [of(Line("b" * 16, (("", 1),)), 2), of(Line("b" * 16, (("", 1),)), 4)]
    two = of(Line("c" * 16, (("", 1),)), 3)
    fresh = of(Line("d" * 16), 5)
    found = branches([two, fresh, *one, trunk])
    assert [branch.id for branch in found] == ["d" * 8, "b" * 8, "c" * 8]
    assert found[1].snapshots == (trunk, *one)
    assert found[1].own == {snapshot.id for snapshot in one}
    assert found[2].own == {two.id}
    assert branches([trunk])[0].id == UNNAMED_BRANCH
    assert branches([]) == []


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(LocalStorage(tmp_path))


def test_retention_keeps_the_last_of_each_line(repository: Repository) -> None:
    """`last: 2` counts the snapshots of one line only, and leaves those of all others alone, with a reason."""
    old = [save_unnamed(repository) for _ in range(3)]
    mine = [save(repository, Line("mine")) for _ in range(3)]
    plan = plan_prune(repository, KeepLast(2), line=Line("mine"))
    assert plan.remove == (mine[0],)
    assert [plan.keep[one] for one in old] == [OTHER_LINE] * 3
    with acquire(repository.storage) as lease:
        prune(repository, lease, KeepLast(1), line=Line("mine"))
    assert [one.id for one in repository.ids()] == [*old, mine[2]]


def test_without_a_line_retention_is_about_that_of_the_newest_snapshot(repository: Repository) -> None:
    """`prune` by hand applies the rules to the line that a resume continues."""
    old = [save(repository, Line("old")) for _ in range(2)]
    new = [save(repository, Line("new")) for _ in range(2)]
    assert plan_prune(repository, KeepLast(1)).remove == (new[0],)
    assert set(old) <= plan_prune(repository, KeepLast(1)).keep.keys()


def test_no_limit_is_a_reason_to_remove_another_line(repository: Repository) -> None:
    """With a quota that the other line fills, the snapshot is refused, and the message says how to remove that line."""
    old = [save(repository, Line("0123456789abcdef")) for _ in range(3)]
    policy = policy_from({"last": 1, "quota": 100_000})
    with acquire(repository.storage) as lease, pytest.raises(StorageFullError, match="--branch 01234567"):
        make_room(repository, lease, policy, 90_000, line=Line("mine"))
    assert [one.id for one in repository.ids()] == old
    with acquire(repository.storage) as lease:
        prune(repository, lease, policy_from({"last": 1, "quota": 1}), line=Line("mine"))
    assert [one.id for one in repository.ids()] == old
