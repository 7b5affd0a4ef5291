"""Restoring from several places: nearest whole copy first, damage mended from the next, older snapshots last."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.config import Tier
from ckpt_engine.errors import NoUsableSnapshotError, SnapshotFailedError, StorageError
from ckpt_engine.loop.open_report import publish, report_of
from ckpt_engine.observe.events import Event, LogSink, TierDegraded, level_of
from ckpt_engine.restore import ask_tiers, choose, far_storage
from ckpt_engine.restore import load as restore
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import ObjectInfo
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.watchdog import ResponsivenessProbe
from tests.snapshot.passage import same
from tests.support.hanging import hanging

N = 30_000
WAIT_SECONDS = 60.0


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {name: torch.randn(N, generator=generator) for name in "abc"}, "step": step}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three snapshots on two tiers, made once."""
    root = tmp_path_factory.mktemp("written")
    tiers = [str(root / "near"), {"url": str(root / "far"), "keep": {"last": 9}}]
    with Checkpointer(tiers=tiers, keep={"last": 9}) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state(step), step=step).wait(30)
            assert ckpt.wait(30)
    for path in (root / "near", root / "far"):
        for step in {1, 2, 3} - {info.step for info in Repository(LocalStorage(path)).list()}:
            raise AssertionError(f"step {step} is not on {path}")
    return root


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy of that run to break."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def where(run: Path) -> list[Repository]:
    return [Repository(LocalStorage(run / name)) for name in ("near", "far")]


def ids(run: Path, place: str = "near") -> list[str]:
    return [parsed.id for parsed in Repository(LocalStorage(run / place)).ids()]


def flip(run: Path, place: str, snapshot: str, entry: str) -> None:
    """Change one bit in the middle of an entry."""
    piece = Repository(LocalStorage(run / "far")).read(snapshot).entries[entry].pieces[0]
    path = run / place / names.data_name(snapshot)
    data = bytearray(path.read_bytes())
    data[piece.offset + piece.nbytes // 2] ^= 8
    path.write_bytes(data)


def loaded(run: Path, **options: Any) -> restore.Loaded:
    found = restore.load(where(run), **options)
    assert found is not None
    assert same(found.state, state(found.info.step))
    return found


def test_nothing_is_said_when_all_is_well(run: Path) -> None:
    """No notes, no repairs, nothing away."""
    found = loaded(run)
    assert (found.notes, found.repairs, found.away, found.rejected) == ((), (), (), ())


@pytest.mark.parametrize("gone", ["", "data", "snapshots", "ckpt.json"])
def test_a_near_place_that_lost_something_is_served_from_far(run: Path, gone: str) -> None:
    """The whole folder, its data, its manifests or its record: the newest snapshot comes back, and whence."""
    path = run / "near" / gone
    path.unlink() if path.is_file() else shutil.rmtree(path)
    found = loaded(run)
    assert found.info.step == 3
    if gone == "ckpt.json":
        assert found.place == f"file://{run / 'near'}"
    else:
        assert found.place == f"file://{run / 'far'}"
        assert f"restored from file://{run / 'far'}" in found.notes[0]
    assert found.rejected == ()


def test_damaged_tensors_are_mended_from_the_other_copy(run: Path) -> None:
    """Each copy has another tensor damaged: together they are whole, bit for bit, and every repair is reported."""
    newest = ids(run)[-1]
    flip(run, "near", newest, "model/a")
    flip(run, "far", newest, "model/b")
    found = loaded(run)
    assert found.info.step == 3
    assert [(r.entry, r.bad, r.good) for r in found.repairs] == [
        ("model/a", f"file://{run / 'near'}", f"file://{run / 'far'}")
    ]
    assert found.repairs[0].nbytes == 4 * N
    assert any("'model/a'" in note and "do not match their digest" in note for note in found.notes)


def test_a_tensor_that_is_damaged_everywhere_costs_the_snapshot(run: Path) -> None:
    """The next older snapshot is taken, and the entry is named."""
    newest = ids(run)[-1]
    for place in ("near", "far"):
        flip(run, place, newest, "model/a")
    found = loaded(run)
    assert found.info.step == 2
    assert [(r.id, r.code) for r in found.rejected] == [(newest, "CKPT401")]
    assert "model/a" in found.rejected[0].reason


def test_a_damaged_manifest_is_taken_from_the_other_place(run: Path) -> None:
    """The manifest of any place will do for the data of all."""
    newest = ids(run)[-1]
    (run / "near" / names.manifest_name(newest)).write_bytes(b"{}")
    found = loaded(run)
    assert (found.info.step, found.place) == (3, f"file://{run / 'far'}")
    assert any("CKPT40" in note for note in found.notes)


def test_two_halves_make_a_whole(run: Path) -> None:
    """A truncated copy on the nearest tier still serves what is damaged on the further one."""
    newest = ids(run)[-1]
    flip(run, "far", newest, "model/a")
    near = run / "near" / names.data_name(newest)
    near.write_bytes(near.read_bytes()[: -N // 2])
    found = loaded(run)
    assert found.info.step == 3
    assert {r.good for r in found.repairs} == {f"file://{run / 'near'}"}


def test_the_newest_of_all_places_wins(run: Path) -> None:
    """The newest snapshot counts, also where the nearest tier lacks it."""
    repository = where(run)[0]
    repository.forget(ids(run)[1:])
    found = loaded(run)
    assert (found.info.step, found.place) == (3, f"file://{run / 'far'}")
    assert choose.choose(where(run), 1).sources[0].storage.url == f"file://{run / 'near'}"  # type: ignore[union-attr]
    assert [info.step for info in ask_tiers.snapshots(where(run))] == [1, 2, 3]


class Broken(LocalStorage):
    """A place that fails from the n-th read of data on, or cannot be listed at all."""

    def __init__(self, root: Path, *, reads: int = 0, lists: bool = True) -> None:
        super().__init__(root)
        self.reads, self.lists, self.asked = reads, lists, 0

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        self.asked += 1
        if self.asked > self.reads:
            raise StorageError("the cable is out")
        super().get_into(name, start, out)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not self.lists:
            raise StorageError("the cable is out")
        return super().list(prefix)


def test_a_place_that_dies_while_it_is_read_is_left_for_the_next(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read stays, the rest comes from the next place, and the dead one is not asked again and again."""
    monkeypatch.setattr("ckpt_engine.restore.read.READ_BYTES", 4096)
    monkeypatch.setattr("ckpt_engine.restore.ask_tiers.READS_ON_MACHINE", 1)
    near = Broken(run / "near", reads=1)
    found = restore.load([Repository(near), where(run)[1]])
    assert found is not None
    assert same(found.state, state(3))
    assert near.asked == 2
    assert found.repairs
    assert "the cable is out" in found.repairs[0].why


def test_a_manifest_that_places_have_alike_is_decoded_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is so where one of them lacks data, and the others have to be looked at."""
    decode, decoded = manifest_codec.decode, list[int]()

    def counting(data: bytes) -> Manifest:
        decoded.append(len(data))
        return decode(data)

    monkeypatch.setattr(manifest_codec, "decode", counting)
    next((run / "near" / "data").glob(f"{ids(run)[-1]}*")).unlink()
    found = restore.load(where(run))
    assert found is not None and found.info.step == 3 and same(found.state, state(3))
    assert len(decoded) == 1


class Crowded(LocalStorage):
    """A place that counts how many read from it at once; each waits a little for one too many."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lock, self.too_many = threading.Lock(), threading.Event()
        self.now = self.most = 0

    def get_into(self, name: str, start: int, out: memoryview) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now > 2:
                self.too_many.set()
        self.too_many.wait(0.05)
        super().get_into(name, start, out)
        with self.lock:
            self.now -= 1


def test_others_read_while_some_decode(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many read at once as suits the place, and there are threads besides that verify and decode meanwhile."""
    monkeypatch.setattr("ckpt_engine.restore.read.READ_BYTES", 4096)
    monkeypatch.setattr("ckpt_engine.restore.ask_tiers.READS_ON_MACHINE", 2)
    near = Crowded(run / "near")
    found = restore.load([Repository(near)])
    assert found is not None and same(found.state, state(3))
    assert near.most == 2 and Sources([near]).threads > 2


def test_a_place_that_does_not_answer_is_said(run: Path) -> None:
    """Training resumes from what there is; that something newer may exist is in the notes."""
    found = restore.load([Repository(Broken(run / "near", lists=False)), where(run)[1]])
    assert found is not None and found.info.step == 3
    assert [away.url for away in found.away] == [f"file://{run / 'near'}"]
    assert any("may have something newer" in line for line in found.left_out)


def test_nothing_here_and_a_place_away_is_no_fresh_start(run: Path, tmp_path: Path) -> None:
    """A run must not start from scratch because its further tier was away for a moment."""
    empty = Repository(LocalStorage(tmp_path / "new machine"))
    with pytest.raises(NoUsableSnapshotError, match="not every place answers"):
        restore.load([empty, Repository(Broken(run / "far", lists=False))])
    with pytest.raises(NoUsableSnapshotError, match="the cable is out"):
        choose.choose([empty, Repository(Broken(run / "far", lists=False))])
    assert restore.load([empty, Repository(LocalStorage(tmp_path / "also new"))]) is None
    with pytest.raises(StorageError, match="the cable is out"):
        restore.load([Repository(Broken(run / place, lists=False)) for place in ("near", "far")])


def test_a_place_that_hangs_is_not_waited_for_forever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is asked on a thread of its own, for a limited time."""
    with hanging(monkeypatch) as hangs:

        def question(place: Repository) -> int:
            if place.storage.url.endswith("near"):
                hangs.here()
            return len(place.ids())

        near, far = ask_tiers.ask(where(run), question)
        assert near.error is not None and "did not answer within 20 s" in near.error.message
        assert far.value == 3


class Slow(LocalStorage):
    """A place whose listing comes when `answers` is set; `asked` counts."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers, self.asked = threading.Event(), 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.asked += 1
        assert self.answers.wait(WAIT_SECONDS)
        return super().list(prefix)


@pytest.fixture
def slow(run: Path) -> Iterator[Slow]:
    """The far place of the run."""
    made = Slow(run / "far")
    yield made
    made.answers.set()


def test_a_resume_goes_on_from_the_nearest_when_the_rest_is_late(
    run: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said which place was left out, and that one gets no second question before it has answered the first."""
    monkeypatch.setattr(ask_tiers, "ANSWER_SECONDS", 0.0)
    for _ in range(2):
        found = restore.load([where(run)[0], Repository(slow)])
        assert found is not None and same(found.state, state(3))
        (line,) = found.left_out
        assert line.startswith(f"{slow.url} did not answer and may have something newer: [CKPT300]")
    assert slow.asked == 1


def test_a_resume_does_not_wait_for_a_further_place_that_gives_no_sign(
    run: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot on the nearest tier serves, however long the further one may take to answer."""
    for limit in ("ANSWER_SECONDS", "LONGER_SECONDS"):
        monkeypatch.setattr(ask_tiers, limit, 100 * WAIT_SECONDS)
    monkeypatch.setattr(ask_tiers, "SILENT_SECONDS", 0.01)
    found = restore.load([where(run)[0], Repository(slow)])
    assert found is not None and same(found.state, state(3))
    assert [one.url for one in found.away] == [slow.url]
    assert not slow.answers.is_set()


@pytest.mark.parametrize(
    ("near", "far", "left"),
    [
        (None, (1,), []),  # a nearer place may have something newer
        ((), None, []),  # nothing was found yet
        ((1,), None, [1]),
    ],
)
def test_only_places_behind_one_with_a_snapshot_are_left_for_their_silence(
    run: Path, near: Any, far: Any, left: list[int]
) -> None:
    """The answers of the other places are waited for."""
    answers = [ask_tiers.TierReply(place, value) for place, value in zip(where(run), (near, far), strict=True)]
    waiting = [number for number, value in enumerate((near, far)) if value is None]
    assert list(ask_tiers._silent(answers, waiting, 2.5, 2.0)) == left
    assert list(ask_tiers._silent(answers, waiting, 1.5, 2.0)) == []


def test_a_far_place_is_opened_by_the_thread_that_asks_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of an object store is slow to import. That is no silence of the store, but a listing is."""
    opened: list[str] = []
    silence: list[float] = []
    now = [0.0]

    class Slow(LocalStorage):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            now[0] += 3.0
            seconds = place.storage.capabilities.silent_seconds
            assert seconds is not None
            silence.append(seconds())
            return super().list(prefix)

    def opens(url: str, _: object) -> LocalStorage:
        opened.append(threading.current_thread().name)
        now[0] += 50.0
        return Slow(run / "far")

    monkeypatch.setattr(far_storage, "open_storage", opens)
    monkeypatch.setattr(far_storage, "ResponsivenessProbe", lambda: ResponsivenessProbe(lambda: now[0]))
    place = Repository(far_storage.storage_of(Tier(url="s3://bucket/far/")))
    assert place.storage.url == "s3://bucket/far"
    assert opened == []
    (answer,) = ask_tiers.ask([place], ask_tiers.ids)
    assert answer.value is not None and len(answer.value) == 3
    assert len(opened) == 1 and opened[0].startswith("ckpt-places")
    far = place.storage
    assert isinstance(far, far_storage.FarStorage)
    silent_seconds = far.capabilities.silent_seconds
    assert silent_seconds is not None
    assert silent_seconds() == 0.0
    assert silence == [3.0]


def test_a_resume_that_finds_nothing_nearer_waits_longer_and_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far place answers after its time would have been over, and it serves."""
    empty, far = Repository(LocalStorage(tmp_path / "new")), where(run)[1]
    said: list[str] = []
    with hanging(monkeypatch) as hangs:
        hangs.later = ask_tiers.ANSWER_SECONDS + 1.0

        def question(place: Repository) -> tuple[names.ParsedId, ...]:
            if place is far:
                hangs.here()
            return ask_tiers.ids(place)

        def say(line: str) -> None:
            said.append(line)
            hangs.end()

        nothing, found = ask_tiers.ask([empty, far], question, ask_tiers.until_one_has_some, say)
    assert nothing.value == () and found.value is not None and len(found.value) == 3
    assert said == [f"waiting for {far.storage.url}, up to 120 s: no other place has a snapshot"]


def test_what_goes_on_without_the_missing_place_is_said(
    run: Path, slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume that finds nothing, and one place that does not answer: the error names it, and what works does."""
    empty = Repository(LocalStorage(tmp_path / "new"))
    patience = lambda answers: WAIT_SECONDS if answers[0].value is None else 0.0  # noqa: E731
    monkeypatch.setattr(ask_tiers, "until_one_has_some", patience)
    with pytest.raises(NoUsableSnapshotError, match="remove it from `tiers`") as caught:
        choose.choose([empty, Repository(slow)])
    assert slow.url in str(caught.value.hint)
    assert choose.choose([empty]) is None


def test_a_place_that_breaks_the_question_is_not_taken_for_empty(run: Path) -> None:
    """What is none of ours is raised where it was asked."""

    def question(place: Repository) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask_tiers.ask(where(run)[:1], question)


def test_the_place_that_served_is_in_the_headline(run: Path) -> None:
    """The line names the tier that served and not the empty nearest one."""
    shutil.rmtree(run / "near")
    found = loaded(run)
    line = report_of(f"file://{run / 'near'}", found).line()
    assert f" in {run / 'far'} (" in line and str(run / "near") not in line


def test_a_place_that_was_left_out_is_in_the_line_for_people(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line is a warning, for a tracked run and for a plain load."""
    away = Broken(run / "far", lists=False)
    found = restore.load([where(run)[0], Repository(away)])
    assert found is not None
    report = report_of(f"file://{run / 'near'}", found)
    assert f"{away.url} did not answer" in report.line()
    publish(report, run, logging.getLogger("test"))
    assert [(one.levelno, away.url in one.getMessage()) for one in caplog.records] == [(logging.WARNING, True)]
    shutil.rmtree(run / "far")
    (run / "far").write_text("not a folder")
    caplog.clear()
    with Checkpointer(tiers=[str(run / "near"), str(run / "far")]) as ckpt:
        assert ckpt.load() is not None
    assert f"{away.url} did not answer" in caplog.text


def test_that_a_place_is_away_is_said_once(run: Path) -> None:
    """The resume says it; that the writer does not reach it either is no news. That it fails again later is."""
    shutil.rmtree(run / "far")
    (run / "far").write_text("no folder")
    heard: list[Event] = []

    class Sink(LogSink):
        def emit(self, event: Event) -> None:
            heard.append(event)

    with Checkpointer(tiers=[str(run / "near"), str(run / "far")], writer="thread", wait_at_end=0) as ckpt:
        ckpt.engine.events = Sink()
        ckpt.load()
        assert ckpt.loaded is not None and len(ckpt.loaded.left_out) == 1
        ckpt.save(state(4), step=4).wait(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (reported := [one for one in heard if isinstance(one, TierDegraded)]):
            assert time.monotonic() < deadline
            ckpt.engine.poll()
            time.sleep(0.005)
        assert [(one.tier, one.known, level_of(one)) for one in reported] == [
            (f"file://{run / 'far'}", True, logging.INFO)
        ]
        ckpt.engine._emit(replace(reported[0], known=False))
        assert level_of(heard[-1]) == logging.WARNING
        ckpt.engine._closing = True  # the line about what is missing at the end says it
        ckpt.engine._emit(replace(reported[0], known=False))
        assert level_of(heard[-1]) == logging.INFO
        ckpt.engine._emit(replace(reported[0], tier=f"file://{run / 'near'}", known=False))
        assert level_of(heard[-1]) == logging.WARNING
        ckpt.engine._closing = False


def test_a_far_place_is_opened_while_the_writer_starts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks it later finds it open."""
    opened: list[str] = []
    done = threading.Event()

    def opens(url: str, _: object) -> LocalStorage:
        if not url.startswith("s3://"):
            return LocalStorage(url)
        opened.append(threading.current_thread().name)
        done.set()
        return LocalStorage(run / "far")

    monkeypatch.setattr(far_storage, "open_storage", opens)
    ckpt = Checkpointer(tiers=[str(run / "near"), "s3://bucket/run"])
    monkeypatch.setattr(ckpt.engine._pipeline, "start", lambda: done.wait(WAIT_SECONDS))
    ckpt.engine.start(resumes=True)
    found = ckpt.load()
    assert found is not None and same(found, state(3))
    assert ckpt.loaded is not None and ckpt.loaded.away == ()
    assert opened == ["ckpt-open"]


def test_the_run_goes_on_when_the_near_folder_is_gone(run: Path) -> None:
    """A new machine: state, run and numbers come from far, and the next snapshot is the newest everywhere."""
    shutil.rmtree(run / "near")
    tiers = [str(run / "near"), str(run / "far")]
    with Checkpointer(tiers=tiers) as ckpt:
        assert same(ckpt.load(), state(3))
        ckpt.save(state(4), step=4).wait(30)
    for place in ("near", "far"):
        newest = Repository(LocalStorage(run / place)).list()[-1]
        assert (newest.seq, newest.step) == (4, 4)
        assert newest.parent is not None
    assert (run / "near/ckpt.json").read_bytes() == (run / "far/ckpt.json").read_bytes()


def test_a_tier_that_must_not_fail_stops_training(tmp_path: Path) -> None:
    """`on_failure: fail` raises at a later step, once; the snapshot is durable on the nearest tier all the same."""
    (tmp_path / "far").write_text("not a folder")
    tiers = [str(tmp_path / "near"), {"url": str(tmp_path / "far"), "on_failure": "fail"}]
    degraded = threading.Event()

    class Sink:
        def emit(self, event: Any) -> None:
            if isinstance(event, TierDegraded):
                degraded.set()

    def until_raised(ckpt: Checkpointer) -> None:
        step = 1
        while not degraded.is_set():
            step += 1
            ckpt.save(state(step), step=step).wait(30)
        ckpt.engine.poll()

    with Checkpointer(tiers=tiers, writer="thread") as ckpt:
        ckpt.engine.events = Sink()
        with pytest.raises(SnapshotFailedError, match="on_failure is fail"):
            until_raised(ckpt)
        ckpt.save(state(99), step=99).wait(30)
    assert Repository(LocalStorage(tmp_path / "near")).list()[-1].step == 99


def test_a_snapshot_without_its_optimizer_does_not_resume_a_run(tmp_path: Path) -> None:
    """What component retention has slimmed is passed over, with the reason; asked for by its step it is loaded."""
    keep = {"last": 2, "components": {"extra": {"last": 1}}}
    with Checkpointer(tmp_path / "run", keep=keep) as ckpt:
        for step in (1, 2):
            ckpt.save({**state(step), "extra": torch.ones(1000)}, step=step).wait(30)
    repository = Repository(LocalStorage(tmp_path / "run"))
    assert [("extra" in info.components) for info in repository.list()] == [False, True]
    (tmp_path / "run" / names.data_name(repository.ids()[-1].id)).unlink()
    with pytest.raises(NoUsableSnapshotError, match="retention took extra from it"):
        restore.load([repository])
    found = restore.load([repository], 1)
    assert found is not None and same(found.state, state(1))


def test_a_whole_copy_comes_before_a_slimmed_one(tmp_path: Path) -> None:
    """The nearest tier has lost a component of a snapshot that the further one still has whole: that one serves."""
    keep = {"last": 2, "components": {"extra": {"last": 1}}}
    tiers = [str(tmp_path / "near"), {"url": str(tmp_path / "far"), "keep": {"last": 9}}]
    states = {step: {**state(step), "extra": torch.full((1000,), step)} for step in (1, 2)}
    for step, value in states.items():
        with Checkpointer(tiers=tiers, keep=keep) as ckpt:
            ckpt.load()
            ckpt.save(value, step=step).wait(30)
    where = [Repository(LocalStorage(tmp_path / name)) for name in ("near", "far")]
    assert ["extra" in info.components for info in where[0].list()] == [False, True]
    assert len(where[1].list()) == 2
    found = restore.load(where, 1)
    assert found is not None and same(found.state, states[1])
    where[1].forget([where[1].list()[0].id])
    found = restore.load(where, 1)
    assert found is not None and same(found.state, state(1))


def test_a_far_place_is_asked_for_its_run_and_its_snapshots_side_by_side(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer may take a second: the record of the run is not waited for before the names are asked for."""
    listed = threading.Event()

    class Waiting(LocalStorage):
        def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
            assert listed.wait(30)
            return super().get(name, start, nbytes)

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            listed.set()
            return super().list(prefix)

    monkeypatch.setattr(far_storage, "open_storage", lambda url, _: Waiting(run / "far"))
    (answer,) = ask_tiers.ask([Repository(far_storage.storage_of(Tier(url="s3://bucket/far/")))], ask_tiers.ids)
    assert answer.value is not None and len(answer.value) == 3
    assert answer.place.record() is not None


def test_an_object_store_is_not_asked_for_what_a_near_place_has_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked only which snapshots it has, and stays a source all the same."""
    asked: list[str] = []

    class Listening(LocalStorage):
        def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
            asked.append(name)
            return super().get(name, start, nbytes)

    monkeypatch.setattr(far_storage, "open_storage", lambda url, options: Listening(run / "far"))
    far = Repository(far_storage.storage_of(Tier(url="s3://bucket/far/")))
    found = choose.choose([Repository(LocalStorage(run / "near")), far])
    assert found is not None and found.sources[-1] is far
    assert not [name for name in asked if name.startswith("snapshots/")]
