"""Another process follows a run: it gets the weights of each new durable snapshot, and of no mixture of two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer, follow
from ckpt_engine.errors import (
    ArgumentError,
    CkptError,
    ForeignError,
    MismatchError,
    NotAFolderError,
    StorageError,
)
from ckpt_engine.restore import follower as following
from ckpt_engine.state import layout
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.support import interpreters

EVERY = "10 ms"
WAIT_SECONDS = 60
State = dict[str, Any]


def state(step: int, width: int = 300) -> State:
    """A model of which a part is frozen, one tensor is tied to another, and one changes in every second step."""
    generator = torch.Generator().manual_seed(step)
    head = torch.randn(width, width, generator=generator)
    frozen = torch.arange(width * width, dtype=torch.float32).view(width, width)
    model = {
        "frozen": frozen,
        "head": head,
        "tied": head,
        "slow": torch.full((9,), float(step // 2)),
        "none": torch.empty(0),
    }
    return {"model": model, "optimizer": {"state": {0: {"exp_avg": head / 2}}}, "step": step}


def packed(step: int) -> State:
    """Very many small tensors, of which one changes with each step: they share one entry."""
    model = {f"w{number}": torch.full((3,), float(number)) for number in range(600)}
    return {"model": model | {"w5": torch.full((3,), 1000.0 + step)}}


def save(ckpt: Checkpointer, step: int, make: Callable[[int], State] = state) -> None:
    ckpt.save(make(step), step=step).wait(WAIT_SECONDS)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        one.dtype == expected[name].dtype and torch.equal(one, expected[name]) for name, one in found.items()
    )


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a follower says, which it says at once."""
    lines: list[str] = []
    monkeypatch.setattr(following, "announce", lambda _, line: lines.append(line))
    monkeypatch.setattr(following, "TELL_SECONDS", 0.0)
    return lines


class TooManyPollsError(Exception):
    """A follower has nothing to give."""


def polls(monkeypatch: pytest.MonkeyPatch, most: int, then: Callable[[int], object] = lambda _: None) -> list[float]:
    """Its pauses, which end at once; after so many it is given up."""
    seen: list[float] = []

    def pause(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) > most:
            raise TooManyPollsError
        then(len(seen))

    monkeypatch.setattr(following.time, "sleep", pause)
    return seen


@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_all_tensors_come_first_and_then_those_that_differ(tmp_path: Path, codec: str) -> None:
    """What was given so far is the newest snapshot, bit for bit; what is equal is not given again."""
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": codec}]) as ckpt:
        save(ckpt, 2)
        run = follow(tmp_path, "model", EVERY)
        step, has = next(run)
        assert step == 2 and same(has, state(2)["model"])
        for step, differing in ((3, {"head", "tied"}), (4, {"head", "tied", "slow"}), (5, {"head", "tied"})):
            save(ckpt, step)
            found, changed = next(run)
            assert (found, changed.keys()) == (step, differing)
            has |= changed
            assert same(has, state(step)["model"])
        save(ckpt, 6, lambda _: state(5))
        assert next(run) == (6, {})
    assert list(run) == []


def test_of_many_small_tensors_the_one_that_differs_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one entry, and each has its own digest."""
    monkeypatch.setattr(layout, "LEAST_ARRAYS", 100)
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1, packed)
        run = follow(tmp_path, "model", EVERY)
        has = next(run)[1]
        assert same(has, packed(1)["model"])
        save(ckpt, 2, packed)
        step, changed = next(run)
        assert step == 2 and changed.keys() == {"w5"}
        assert same(has | changed, packed(2)["model"])


def test_without_a_component_all_of_them_are_followed(tmp_path: Path) -> None:
    """Names begin with their component; what the engine adds for itself is left out."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Checkpointer(tmp_path, every_n_steps=1) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=torch.utils.data.DataLoader(torch.randn(4, 3)))
        for _ in range(run.epoch, 1):
            for batch in torch.utils.data.DataLoader(torch.randn(4, 3)):
                model(batch).sum().backward()
                optimizer.step()
                run.step()
    (*_, (_, found)) = follow(tmp_path, every=EVERY)
    weights = {"model.weight", "model.bias"}
    momenta = {f"optimizer.state.{number}.momentum_buffer" for number in (0, 1)}
    assert weights | momenta <= found.keys()
    assert {name.partition(".")[0] for name in found} <= {"model", "optimizer", "loader"}
    assert torch.equal(found["model.weight"], model.weight.detach())


def test_a_late_starter_begins_with_the_newest_and_ends_with_the_run(tmp_path: Path) -> None:
    """Of a run that is over it gets the last snapshot, and no other."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    ((step, found),) = follow(tmp_path, "model", EVERY)
    assert step == 3 and same(found, state(3)["model"])


@pytest.mark.cells(1)
@pytest.mark.parametrize("how", ["failed", "stopped", "killed"])
def test_a_run_that_continues_has_not_ended(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed, was asked to stop, or disappeared is started again: its follower gets what comes then."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save(state(1), step=1, reason="signal" if how == "stopped" else "manual").wait(WAIT_SECONDS)
    if how != "killed":
        ckpt.close(failed=how == "failed")
    run = follow(tmp_path, "model", EVERY)
    assert next(run)[0] == 1
    with monkeypatch.context() as patch:
        polls(patch, 12)
        with pytest.raises(TooManyPollsError):
            next(run)
    ckpt.close()
    run = follow(tmp_path, "model", EVERY)
    assert next(run)[0] == 1
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 2)
        assert next(run)[0] == 2
    assert list(run) == []


def test_what_is_committed_right_before_the_end_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last snapshot and the end may both come between a look and the question whether the run has ended."""
    ckpt = Checkpointer(tmp_path)
    save(ckpt, 1)
    run = follow(tmp_path, "model", EVERY)
    assert next(run)[0] == 1
    real = following.read_attempts

    def end_first(storage: Any) -> Any:
        if not ckpt.engine.tenure.closed:
            save(ckpt, 2)
            ckpt.close()
        return real(storage)

    monkeypatch.setattr(following, "read_attempts", end_first)
    assert [step for step, _ in run] == [2]


def test_what_is_equal_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest says which tensors have the same content: their bytes are not sent again."""
    real, read = following.read_entries, []

    def noting(sources: Any, manifest: Any, names: Any) -> Any:
        read.append(set(names))
        return real(sources, manifest, names)

    monkeypatch.setattr(following, "read_entries", noting)
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 2)
        run = follow(tmp_path, "model", EVERY)
        next(run)
        save(ckpt, 3)
        next(run)
    whole, less = read
    assert {"model/frozen", "model/slow"} <= whole
    assert less == {"model/head"}


def test_a_pruned_base_and_snapshots_that_were_missed(tmp_path: Path) -> None:
    """Retention leaves one snapshot, stored as a difference: its follower gets it whole, whatever it has seen."""
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta", "keep": {"last": 1}}]) as ckpt:
        save(ckpt, 1)
        run = follow(tmp_path, "model", EVERY)
        has = next(run)[1]
        for step in (2, 3, 4, 5, 6):
            save(ckpt, step)
        step, changed = next(run)
        assert step == 6 and same(has | changed, state(6)["model"])
        late = follow(tmp_path, "model", EVERY)
        assert same(next(late)[1], state(6)["model"])


@pytest.mark.parametrize("reading", ["read_entries", "candidates"])
def test_a_snapshot_that_is_removed_while_it_is_read(
    tmp_path: Path, reading: str, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is given: the next look takes the newest, whole, against what was given before."""
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 2)
        run = follow(tmp_path, "model", EVERY)
        has = next(run)[1]
        save(ckpt, 3)
        newest = Repository(open_storage(tmp_path)).list()[-1].id
        real, calls = getattr(following, reading), []

        def remove_first(*args: Any, **more: Any) -> Any:
            if not calls:
                calls.append(newest)
                (tmp_path / names.manifest_name(newest)).unlink()
                (tmp_path / names.data_name(newest)).unlink()
                save(ckpt, 4, lambda _: state(3))  # nothing that was read of the one before counts
            return real(*args, **more)

        monkeypatch.setattr(following, reading, remove_first)
        step, changed = next(run)
        assert (step, calls) == (4, [newest])
        assert same(has | changed, state(3)["model"])


def test_a_damaged_snapshot_is_left_out(tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A late starter gets the one before it, who has that waits, and it is read once and named once."""
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
        early = follow(tmp_path, "model", EVERY)
        next(early)
        save(ckpt, 2)
        newest = Repository(open_storage(tmp_path)).list()[-1].id
        piece = Repository(open_storage(tmp_path)).read(newest).entries["model/head"].pieces[0]
        with (tmp_path / names.data_name(newest)).open("r+b") as file:
            file.seek(piece.offset)
            file.write(b"\xff" * 8)
        late = follow(tmp_path, "model", EVERY)
        step, found = next(late)
        assert step == 1 and same(found, state(1)["model"])
        for run in (early, late):
            with monkeypatch.context() as patch:
                polls(patch, 3)
                with pytest.raises(TooManyPollsError):
                    next(run)
        assert [newest in line and "[CKPT401]" in line for line in heard] == [True, True]
        save(ckpt, 3)
        assert same(found | next(follow(tmp_path, "model", EVERY))[1], state(3)["model"])


def test_it_waits_for_the_first_snapshot(tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower may start before its run: it says what it waits for."""
    root = tmp_path / "run"

    def begin(number: int) -> None:
        if number == 3:
            with Checkpointer(root) as ckpt:
                save(ckpt, 1)

    polls(monkeypatch, 5, begin)
    assert next(follow(root, "model", EVERY))[0] == 1
    why = f"[CKPT303] no snapshot at file://{root} yet; it is tried again every 10 ms"
    assert heard == [f"following file://{root}: {why}"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("foreign", ForeignError), ("file", NotAFolderError), ("component", MismatchError), ("every", ArgumentError)],
)
def test_what_waiting_does_not_mend_is_raised_at_once(tmp_path: Path, kind: str, error: type[CkptError]) -> None:
    """Another folder, a file, a component that is not there, and a duration that is none."""
    root, component, every = tmp_path / "run", "model", EVERY
    if kind == "foreign":
        root.mkdir()
        (root / "thesis.tex").touch()
    elif kind == "file":
        root.touch()
    elif kind == "component":
        component = "modle"
        with Checkpointer(root) as ckpt:
            save(ckpt, 1)
    else:
        every = "often"
    with pytest.raises(error, match={"component": "it has: 'model'", "every": "'often'"}.get(kind)):
        next(follow(root, component, every))


def test_a_further_tier_says_when_the_run_has_ended(tmp_path: Path) -> None:
    """Its follower sees nothing of the machine that trains, and ends with the run all the same."""
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(tiers=[str(near), str(far)]) as ckpt:
        save(ckpt, 1)
        run = follow(far, "model", EVERY)
        assert next(run)[0] == 1
        save(ckpt, 2)
        assert next(run)[0] == 2
    shutil.rmtree(near)
    assert list(run) == []
    assert [step for step, _ in follow(far, "model", EVERY)] == [2]


@pytest.fixture
def far(moto: S3Server, bucket: str, wire: Wire) -> dict[str, Any]:  # noqa: F811
    """A store behind a network that can be cut."""
    options = moto.options(wire.url, retry_seconds=0.0, timeout_seconds=60.0, verify="never")
    return {"tiers": [{"url": f"s3://{bucket}/run", "storage_options": options}]}


def upload(root: Path, far: dict[str, Any]) -> None:
    """Have the store hold what a folder does, the manifests last."""
    storage = open_storage(far["tiers"][0]["url"], far["tiers"][0]["storage_options"])
    there = {item.name for item in storage.list("")}
    for path in sorted((one for one in root.rglob("*.*") if one.is_file()), key=lambda one: one.parent.name):
        name = str(path.relative_to(root))
        if name != names.LEASE and (name not in there or "/" not in name):
            storage.put(name, [memoryview(path.read_bytes())], exclusive=False)


def test_a_look_at_an_object_store_is_one_listing(
    far: dict[str, Any],
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in five also asks whether the run has ended."""
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
        upload(tmp_path, far)
    run = follow(far, "model", EVERY)
    assert same(next(run)[1], state(1)["model"])
    wire.log.clear()
    polls(monkeypatch, 10)
    with pytest.raises(TooManyPollsError):
        next(run)
    listings = wire.count("GET", "list-type=2&prefix=run%2Fsnapshots%2F")
    assert (listings, wire.count("GET", names.ATTEMPTS), len(wire.log)) == (10, 2, 12)


def test_a_dead_store_is_tried_again(
    far: dict[str, Any],
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    heard: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A follower says once that it does not answer; it gets what has come meanwhile."""
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 2)
        upload(tmp_path, far)
        run = follow(far, "model", EVERY)
        has = next(run)[1]
        wire.cut()
        save(ckpt, 3)

        def mend(number: int) -> None:
            if number == 3:
                wire.mend()
                upload(tmp_path, far)

        polls(monkeypatch, 5, mend)
        step, changed = next(run)
    assert step == 3 and same(has | changed, state(3)["model"])
    assert len(heard) == 1 and "[CKPT300]" in heard[0] and "it is tried again" in heard[0]


def test_a_place_that_has_never_answered_is_given_up(
    moto: S3Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some time, with a code and what to do."""
    monkeypatch.setattr(following, "TRY_SECONDS", 0.0)
    options = moto.options("http://127.0.0.1:9", retry_seconds=0.0)
    run = follow({"tiers": [{"url": "s3://no-such-bucket/run", "storage_options": options}]}, "model", EVERY)
    with pytest.raises(StorageError, match="has not answered for") as error:
        next(run)
    assert error.value.hint is not None


def test_another_follower_takes_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    """Real processes: `kill -9` of a follower; a new one gets the newest whole."""
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "follow", str(tmp_path), "--component", "model"]
    with Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
        with interpreters.Popen([*command, "--every", EVERY, "--json"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            whole = sum(one.nbytes for one in state(1)["model"].values())
            assert json.loads(process.stdout.readline()) == {"step": 1, "tensors": 5, "bytes": whole}
            save(ckpt, 2)
            assert json.loads(process.stdout.readline())["tensors"] == 3
            os.kill(process.pid, signal.SIGKILL)
        save(ckpt, 3)
        step, found = next(follow(tmp_path, "model", EVERY))
        assert step == 3 and same(found, state(3)["model"])
