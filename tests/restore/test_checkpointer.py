"""The Checkpointer, end to end on a real disk with a real writer process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import (
    ConfigError,
    ForeignError,
    MismatchError,
    NotAFolderError,
    NoUsableSnapshotError,
    ResumeError,
    SnapshotFailedError,
    UnstorableLeafError,
)
from ckpt_engine.observe.events import Event, SnapshotCommitted, SnapshotSkipped
from ckpt_engine.store import manifest_codec
from tests.snapshot.passage import same
from tests.support import interpreters
from tests.support.writers import no_writing


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def state(seed: int = 0, n: int = 1000) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(n, generator=g), "b": torch.randn(3, generator=g)}, "step": seed, "name": "x"}


@pytest.fixture(params=["process", "thread"])
def writer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_save_wait_load_returns_the_same_state(tmp_path: Path, writer: str) -> None:
    """What was saved comes back bitwise, from a new Checkpointer, with any writer."""
    with Checkpointer(tmp_path / "run", writer=writer) as ckpt:
        assert ckpt.load() is None
        handle = ckpt.save(state(1), step=1, metrics={"loss": 0.5})
        assert handle.wait(30) == handle.snapshot and handle.done()
    again = Checkpointer(tmp_path / "run")
    assert same(again.load(), state(1))
    info = again.snapshots()[-1]
    assert (info.step, info.metrics, info.nbytes) == (1, {"loss": 0.5}, 1003 * 4)
    assert again.loaded is not None and again.loaded.info.id == info.id and again.loaded.state is None


def test_what_a_load_found_and_a_list_of_snapshots_can_be_printed(tmp_path: Path) -> None:
    """A line, however many arrays the state has, and none of their values."""
    flat = {f"layer.{number}": torch.full((2,), 0.12345) for number in range(1000)}
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(flat, step=1).wait(30)
        assert ckpt.load() is not None
        for shown in (repr(ckpt.loaded), repr(ckpt.snapshots())):
            assert "step=1" in shown and len(shown) < 2000 and "0.123" not in shown and "layer" not in shown


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    """`keep` applies after each commit; the newest snapshot always stays."""
    keep = {"last": 1, "best": {"monitor": "loss", "mode": "min", "k": 1}}
    with Checkpointer(tmp_path / "run", keep=keep) as ckpt:
        for step, loss in enumerate([3.0, 1.0, 2.0, float("nan")], 1):
            ckpt.save(state(step), step=step, metrics={"loss": loss}).wait(30)
    assert [s.step for s in Checkpointer(tmp_path / "run").snapshots()] == [2, 4]
    assert len(list((tmp_path / "run" / "data").iterdir())) == 2


def test_state_may_change_right_after_save(tmp_path: Path) -> None:
    """A snapshot is the instant of `save`, although it is written later."""
    live = state(1, 1_000_000)
    expected = live["model"]["w"].clone()
    with Checkpointer(tmp_path / "run") as ckpt:
        handle = ckpt.save(live, step=1)
        live["model"]["w"].zero_()
        handle.wait(30)
        assert torch.equal(ckpt.load()["model"]["w"], expected)


def lazy_model(path: tuple) -> bool:
    return path[0] == "model"


def test_lazy_parts_are_those_of_the_instant(tmp_path: Path) -> None:
    """With `lazy` the snapshot is still one instant."""
    live = state(1, 1_000_000)
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in range(1, 6):
            expected = live["model"]["w"].clone()
            handle = ckpt.save(live, step=step, lazy=lazy_model)
            live["model"]["w"].add_(1)
            handle.wait(30)
            assert torch.equal(ckpt.load()["model"]["w"], expected)


def test_a_busy_arena_skips_and_says_so(tmp_path: Path) -> None:
    """Back-pressure never blocks: a snapshot that does not fit is skipped, reported, and the next one works."""
    recorder = Recorder()
    with Checkpointer(tmp_path / "run", slots=1) as ckpt:
        ckpt.engine.events = recorder
        with no_writing(ckpt):
            handles = [ckpt.save(state(i), step=i) for i in range(5)]
        assert [bool(handle.skipped) for handle in handles] == [False, True, True, True, True]
        assert [event.step for event in recorder.events if isinstance(event, SnapshotSkipped)] == [1, 2, 3, 4]
        assert ckpt.wait(60)
        ckpt.save(state(99), step=99).wait(30)
    assert Checkpointer(tmp_path / "run").load()["step"] == 99


def test_commit_events_tell_bytes_and_times(tmp_path: Path) -> None:
    """Every commit is an event with its cost."""
    recorder = Recorder()
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.engine.events = recorder
        ckpt.save(state(1), step=7).wait(30)
    (event,) = [e for e in recorder.events if isinstance(e, SnapshotCommitted)]
    assert event.step == 7 and event.written_bytes >= event.nbytes == 1003 * 4 and event.latency_seconds > 0


def test_structure_may_change_between_snapshots(tmp_path: Path) -> None:
    """Optimizer state that appears at the first step, and a new parameter group, are no problem."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in range(4):
            ckpt.save({"m": model.state_dict(), "o": optimizer.state_dict()}, step=step).wait(30)
            expected = json.dumps(str(optimizer.state_dict()))
            assert json.dumps(str(ckpt.load()["o"])) == expected
            if step == 1:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))]})
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()


def damage_data(root: Path, step: int, how: str) -> None:
    (path,) = root.glob(f"data/*-s{step:010d}-*")
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    elif how == "truncate":
        path.write_bytes(data[:-10])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "missing"])
def test_a_damaged_snapshot_is_passed_over_for_the_older_one(tmp_path: Path, how: str) -> None:
    """Every byte is checked; the reason of the rejection is kept."""
    root = tmp_path / "run"
    with Checkpointer(root) as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step=step).wait(30)
    damage_data(root, 2, how)
    ckpt = Checkpointer(root)
    assert same(ckpt.load(), state(1))
    assert ckpt.loaded is not None
    (rejected,) = ckpt.loaded.rejected
    assert "-s0000000002-" in rejected.id and rejected.reason


def test_nothing_usable_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    """A store that is not empty never silently becomes a fresh start."""
    root = tmp_path / "run"
    with Checkpointer(root) as ckpt:
        ckpt.save(state(1), step=1).wait(30)
    damage_data(root, 1, "flip")
    with pytest.raises(NoUsableSnapshotError, match=r"model/b|model/w"):
        Checkpointer(root).load()


def test_a_step_can_be_asked_for(tmp_path: Path) -> None:
    """`load(step)` gives that step, or says that there is none."""
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step=step).wait(30)
        assert ckpt.load(1)["step"] == 1
        with pytest.raises(ResumeError, match="no snapshot of step 5"):
            ckpt.load(5)


def test_what_was_chosen_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that follows a choice decodes the manifest of that snapshot no second time."""
    with Checkpointer(tmp_path / "run", writer="thread") as ckpt:
        ckpt.save(state(1), step=1).wait(30)
    decoded: list[bytes] = []
    decode = manifest_codec.decode
    monkeypatch.setattr(manifest_codec, "decode", lambda data: decoded.append(data) or decode(data))
    again = Checkpointer(tmp_path / "run")
    assert again.engine.choose() is not None
    assert same(again.load(), state(1))
    assert len(decoded) == 1
    assert same(again.load(), state(1))
    assert len(decoded) == 2


def test_into_overwrites_live_tensors_and_refuses_another_model_before_reading(tmp_path: Path) -> None:
    """`into` keeps the live tensors; a state with other keys is refused by name and left as it was."""
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(state(1), step=1).wait(30)
    ckpt = Checkpointer(tmp_path / "run")
    live = state(5)
    weight = live["model"]["w"]
    back = ckpt.load(into=live)
    assert back["model"]["w"] is weight and same(back, state(1))
    other = {"model": {"weight": torch.zeros(1000), "b": torch.zeros(4)}}
    damage_data(tmp_path / "run", 1, "flip")  # never gets as far as reading
    with pytest.raises(MismatchError) as caught:
        ckpt.load(into=other)
    assert "model/weight" in str(caught.value) and "model/b: [3] saved, [4] here" in str(caught.value)
    assert torch.equal(other["model"]["weight"], torch.zeros(1000))


def test_into_takes_any_mix_of_tensors(tmp_path: Path) -> None:
    """Contiguous tensors are streamed; tied, strided, overlapping and retyped ones get their values all the same."""

    def tree(fill: float) -> dict:
        tied, base = torch.full((5,), fill), torch.full((10,), fill)
        return {
            "big": torch.full((9_000_000,), fill),
            "tied": [tied, tied],
            "t": torch.full((3, 4), fill).t(),
            "views": (base[2:6], base[4:8]),
            "p": torch.nn.Parameter(torch.full((2,), fill)),
            "empty": torch.empty(0),
            "n": fill,
        }

    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(tree(3.0), step=1).wait(30)
        live = tree(0.0)
        live["p"] = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        parts = {key: live[key] for key in ("big", "t", "p")}
        back = ckpt.load(into=live)
    expected = tree(3.0)
    assert all(back[key] is part for key, part in parts.items())
    assert back["p"].tolist() == [3.0, 3.0] and back["p"].dtype is torch.float64 and back["n"] == 3.0
    assert all(same(back[key], expected[key]) for key in ("big", "tied", "t", "views", "empty"))


def test_a_damaged_piece_is_noticed_when_streaming_into_live_tensors(tmp_path: Path) -> None:
    """The older snapshot then fills all live tensors."""
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(state(step), step=step).wait(30)
    damage_data(tmp_path / "run", 2, "flip")
    live = state(7)
    back = Checkpointer(tmp_path / "run").load(into=live)
    assert same(back, state(1)) and same(live["model"], state(1)["model"])


SECOND = """
import sys
from ckpt_engine import Checkpointer
from ckpt_engine.snapshot import writer_link as settings
settings.LEASE_WAIT_SECONDS = 0.2
second = Checkpointer(sys.argv[1])
try:
    second.save({"w": 1}, step=2)
finally:
    print(second.load())
"""


def test_a_second_process_is_refused_naming_the_first(tmp_path: Path) -> None:
    """Two jobs cannot write one run; both can read it."""
    with Checkpointer(tmp_path / "run") as first:
        first.save({"w": 1}, step=1).wait(30)
        command = [sys.executable, "-c", SECOND, str(tmp_path / "run")]
        child = interpreters.run(command, capture_output=True, text=True)
        assert "LeaseHeldError" in child.stderr and f"process {os.getpid()} on" in child.stderr
        assert child.stdout.strip() == "{'w': 1}"
        first.save({"w": 2}, step=2).wait(30)
    with Checkpointer(tmp_path / "run") as third:
        third.save(state(3), step=3).wait(30)


def test_bad_places_are_refused_clearly(tmp_path: Path) -> None:
    """A file instead of a folder, and a folder with other files, are left alone."""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(NotAFolderError):
        Checkpointer(file).save(state(), step=1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(ForeignError, match=r"thesis\.tex"):
        Checkpointer(foreign).save(state(), step=1)
    assert sorted(p.name for p in foreign.iterdir()) == ["thesis.tex"]
    with pytest.raises(ConfigError):
        Checkpointer(tmp_path / "run", overhed="1%")


def test_an_unstorable_leaf_is_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    """The error names the leaf, and the Checkpointer goes on working."""
    with Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(UnstorableLeafError, match="hooks/0"):
            ckpt.save({"hooks": [lambda: None]}, step=1)
        ckpt.save(state(2), step=2).wait(30)
        assert [s.step for s in ckpt.snapshots()] == [2]


KILLED = """
import os, signal, sys, torch
from ckpt_engine import Checkpointer
ckpt = Checkpointer(sys.argv[1])
w = torch.full((5_000_000,), 7.0)
ckpt.save({"w": w}, step=1)
ckpt.before_update()
w.zero_()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_staged_snapshot_survives_the_kill_of_its_trainer(tmp_path: Path) -> None:
    """After kill -9 right behind `save`, the writer process finishes it; the next `start` waits for that."""
    child = interpreters.run([sys.executable, "-c", KILLED, str(tmp_path / "run")])
    assert child.returncode == -signal.SIGKILL
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.engine.start()
        loaded = ckpt.load()
    assert loaded is not None and torch.equal(loaded["w"], torch.full((5_000_000,), 7.0))


def test_none_takes_a_component_as_it_is_read(tmp_path: Path) -> None:
    """Deeper down it is a mismatch: what a fresh optimizer does not have yet must not get lost unseen."""
    saved = {"model": {"w": torch.arange(4.0)}, "rng": torch.arange(3), "optimizer": {"m": torch.ones(2)}}
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        ckpt.save(saved, step=1).wait()
    live = {"w": torch.zeros(4)}
    moments = {"m": torch.zeros(2)}
    with Checkpointer(str(tmp_path), writer="thread") as ckpt:
        state = ckpt.load(into={"model": live, "rng": None, "optimizer": moments})
        assert state is not None
        assert torch.equal(state["rng"], saved["rng"])
        assert torch.equal(live["w"], saved["model"]["w"])
        with pytest.raises(MismatchError, match=r"(?s)optimizer/m.*None takes a component"):
            ckpt.load(into={"model": live, "rng": None, "optimizer": {"m": None}})
        with pytest.raises(MismatchError, match="rng"):
            ckpt.load(into={"model": live, "rng": {}, "optimizer": moments})


def test_a_failure_is_raised_once_where_the_user_wants_that(tmp_path: Path) -> None:
    """With `on_error: raise` the next call of the loop raises it, although nothing waited for that snapshot alone."""
    with Checkpointer(tmp_path / "run", writer="thread", on_error="raise") as ckpt:
        ckpt.save({"a": torch.zeros(3)}, step=1).wait(60)
        (tmp_path / "run" / "data").rename(tmp_path / "away")
        (tmp_path / "run" / "data").write_text("no folder")
        ckpt.save({"a": torch.ones(3)}, step=2)
        ckpt.wait(60)
        with pytest.raises(SnapshotFailedError, match="failed in the background"):
            ckpt.engine.poll()
        ckpt.engine.poll()
