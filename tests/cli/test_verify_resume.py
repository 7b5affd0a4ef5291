"""`ckpt verify-resume`: correct scripts pass, and each usual mistake is found, named and explained."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.observe.resume_report import Replay, ReplayDifference
from ckpt_engine.tools import rehearsal_runs as runs
from ckpt_engine.tools.compare import DifferenceKind, LeafDifference
from ckpt_engine.tools.verdict import Area, FirstDifference, area_of, earliest, judge, judge_end, of_replay
from tests.support import interpreters

Ckpt = Callable[..., Any]
SCRIPTS = Path(__file__).parent / "rehearsed"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's processes find torch imported. The slow tests start real ones."""
    found = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(
        runs, "subprocess", SimpleNamespace(Popen=partial(interpreters.Popen, without_ours=True), **found)
    )


@pytest.fixture
def verify(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Rehearses one of the scripts in few steps."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where what could not be found out is left

    def run(mistake: str, *options: object, script: str = "plain_loop.py") -> Any:
        command = (sys.executable, SCRIPTS / script, tmp_path / "run", *mistake.split())
        limits = () if "--steps" in options else ("--steps", 6)
        return ckpt("verify-resume", *limits, "--timeout", 120, *options, "--", *command)

    return run


@pytest.mark.long
def test_a_correct_script_is_exact_and_nothing_of_its_own_is_touched(
    forked: None, verify: Callable[..., Any], tmp_path: Path
) -> None:
    """Four snapshots after the restart equal the uninterrupted run's; its run folder does not come into being."""
    result = verify("", "--kill-at", 2, "--scratch", tmp_path / "scratch")
    assert result.code == 0, result.err
    assert "exact: resumed at step 2, equal to the uninterrupted run up to the end (4 snapshots, " in result.out
    assert not (tmp_path / "run").exists()
    found = {path.name: [one.step for one in runs.find_run(str(path / "run0")).holders] for path in _places(tmp_path)}
    assert found == {"whole": [1, 2, 3, 4, 5, 6], "repeated": [1, 2], "resumed": [2, 3, 4, 5, 6]}
    for path in _places(tmp_path):
        assert (path / "roots.jsonl").read_text() == json.dumps(str(tmp_path / "run")) + "\n"
        log = path.with_suffix(".log").read_text()
        assert "a rehearsal (CKPT_REHEARSAL is set)" in log
        assert "the end" not in log


def _places(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "scratch").iterdir() if path.is_dir())


@pytest.mark.long
def test_the_recorded_steps_are_compared_too(forked: None, verify: Callable[..., Any]) -> None:
    """A loop that is tracked shows each step; a loop by hand shows its snapshots only."""
    result = verify("", "--json", "--steps", 4, script="tracked_loop.py")
    assert result.code == 0, result.out + result.err
    replay = result.json["replay"]
    assert (replay["result"], replay["steps"], replay["first"]) == ("exact", 3, None)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "dice"])
def test_a_tracked_loop_with_a_memory_tier_is_exact(what: str, verify: Callable[..., Any]) -> None:
    """Adapters ask the engine more than a loop by hand does; the streams of python and numpy have no seed here.

    A generator of the loop's own goes on without a word.
    """
    result = verify(what, script="tracked_loop.py")
    assert result.code == 0, result.out + result.err
    assert "exact" in result.out


@pytest.mark.slow
def test_an_own_generator_is_found(verify: Callable[..., Any]) -> None:
    """It begins again after a restart: weights differ, and the usual cause is named."""
    result = verify("own generator", "--json")
    assert result.code == 1, result.err
    report = result.json
    assert (report["exact"], report["fresh"]) == (False, None)
    assert (report["resumed"]["step"], report["resumed"]["area"]) == (4, "tensor")
    assert report["resumed"]["first"].startswith("model/0.weight: ")
    assert "an own random.Random" in report["resumed"]["cause"]


@pytest.mark.slow
def test_draws_at_every_start_are_found(verify: Callable[..., Any]) -> None:
    """The stream is named before the weights that it changes."""
    result = verify("draws at start")
    assert result.code == 1, result.err
    assert "NOT EXACT: resumed at step 3, step 4 differs" in result.out
    assert "first: the random stream of torch (rng/torch)" in result.out
    assert "draws from this stream a different number of times after a restart" in result.out
    assert "also: model/0.weight" in result.out


@pytest.mark.slow
def test_code_that_reads_the_clock_is_found_from_the_start_and_after_the_restart(verify: Callable[..., Any]) -> None:
    """The restart is compared on a snapshot of the first run, because the second one differs from it."""
    result = verify("clock")
    assert result.code == 3, result.err
    first, _, rest = result.out.partition("the restart differs as well, which may have the same cause")
    assert first.startswith("not seeded: two runs from the start differ at step 1, before anything is resumed")
    assert ": resumed at step 3, step 4 differs" in rest
    assert "code that reads the clock" in rest
    assert "NOT EXACT" not in result.out


@pytest.mark.slow
def test_a_script_without_a_seed_may_still_resume_exactly(verify: Callable[..., Any]) -> None:
    """That two runs differ is said first, has an exit code of its own, and is no fault of the resume."""
    result = verify("no seed")
    assert result.code == 3, result.err
    assert result.out.startswith("not seeded: two runs from the start differ at step 1, before anything is resumed")
    assert "exact: resumed at step 3" in result.out
    assert "NOT EXACT" not in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "options", "answer"),
    [
        ("forgets", (), "did not resume when it was started again"),
        ("fails", (), "ValueError: a mistake of the script"),
        ("saves nothing", (), "the script took no snapshot up to step 3"),
        ("", ("--timeout", "0.01"), "had not ended after 0.01 s"),
    ],
)
def test_what_cannot_be_verified_says_why(
    verify: Callable[..., Any], mistake: str, options: tuple[str, ...], answer: str
) -> None:
    """Exit code 2, and the last lines of the script where it failed."""
    result = verify(mistake, *options)
    assert (result.code, answer in result.err) == (2, True), result.err


@pytest.mark.slow
def test_another_folder_at_each_start_is_said(verify: Callable[..., Any]) -> None:
    """A note says that the folder changes: the rehearsal finds the snapshots, but a real restart would not."""
    assert "note: the script names another run folder at each start" in verify("new folder").out


@pytest.mark.slow
def test_a_resumed_run_that_goes_on_for_too_long_is_found(verify: Callable[..., Any]) -> None:
    """It trains five steps per start, so that a resumed one ends later."""
    result = verify("counts starts", "--steps", 9)
    assert result.code == 1, result.err
    assert "first: the uninterrupted run went on to step 5, the resumed one to step 9" in result.out


@pytest.mark.slow
def test_lightning_with_workers_is_exact(verify: Callable[..., Any]) -> None:
    """The callback's own options give way to a snapshot of each step."""
    result = verify("", script="lightning_loop.py")
    assert result.code == 0, result.err
    assert "up to the end (3 snapshots" in result.out


@pytest.mark.slow
def test_augmentation_from_a_generator_of_the_workers_goes_on(verify: Callable[..., Any]) -> None:
    """Nothing seeds it, so two runs differ; the answer names the first batch with other content and not the weights."""
    result = verify("workers", script="lightning_loop.py")
    assert result.code == 3, result.err
    assert result.out.startswith("not seeded: two runs from the start differ at step 1, before anything is resumed")
    assert "\nexact: resumed at step 3" in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mistake", "lines"),
    [
        ("lightning_loop.py", "iterator", ["the resume report says: hidden state model.factors", "state_dict()"]),
        ("tracked_loop.py", "best", ["the resume report says: local variables: best is carried", "Carry(best=…)"]),
        ("tracked_loop.py", "hidden off", ["first: model/", "a plain attribute of the model"]),
    ],
)
def test_what_explains_it_is_named(verify: Callable[..., Any], script: str, mistake: str, lines: list[str]) -> None:
    """What the resume report says of it, with the line that makes it exact, or else the usual cause."""
    result = verify(mistake, script=script)
    assert result.code == 1, result.out + result.err
    assert result.out.startswith("NOT EXACT: resumed at step 3, step 4 differs")
    for line in lines:
        assert line in result.out


def test_a_command_is_started_as_it_is_and_its_processes_take_part(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that only starts others. A program that is not there, and a file, get an answer."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "print(sys.argv, 'torch' in sys.modules, json.loads(os.environ['CKPT_REHEARSAL'])['end'])\n"
    )
    command = f"{sys.executable} {tmp_path / 'train.py'} --lr 1; exit 3"
    result = ckpt("verify-resume", "--steps", 4, "--", "sh", "-c", command)
    assert result.code == 2
    assert f"['{tmp_path / 'train.py'}', '--lr', '1'] False 5" in result.err
    assert "ended with exit code 3 (whole run)" in result.err
    assert "no/such/program cannot be started" in ckpt("verify-resume", "--", "no/such/program").err


def test_wrong_usage(ckpt: Ckpt, tmp_path: Path) -> None:
    """Wrong options are refused before anything runs."""
    assert "must be less than --steps" in ckpt("verify-resume", "--steps", 5, "--kill-at", 5, "python", "x").err
    script = SCRIPTS / "plain_loop.py"
    assert "exists already" in ckpt("verify-resume", "--scratch", tmp_path, "--", "python", script).err


def test_the_first_divergence_is_the_most_telling_one_of_the_first_step() -> None:
    """Batches before positions before streams before tensors before values; later steps do not count."""

    def difference(path: str, kind: DifferenceKind = DifferenceKind.TENSOR) -> LeafDifference:
        return LeafDifference(path, kind, "1", "2", 1, 4, (0,), 1.0)

    weights = difference("state_dict/w")
    stream = difference("ckpt_engine/rng/numpy/key")
    position = difference("ckpt_engine/loaders/0/order/digest", DifferenceKind.VALUE)
    value = difference("lr_schedulers/0/last_epoch", DifferenceKind.VALUE)
    assert judge(1, [], fresh=False) is None
    for found, area in (
        ((value, weights), Area.WEIGHTS),
        ((value,), Area.VALUE),
        ((weights, stream), Area.STREAM),
        ((weights, stream, position), Area.POSITION),
    ):
        for fresh in (True, False):
            verdict = judge(2, found, fresh=fresh)
            assert verdict is not None
            assert (verdict.step, verdict.area) == (2, area)
            assert len(verdict.others) == len(found) - 1
    many = judge(1, [difference(f"w/{i}") for i in range(30)], fresh=False)
    assert many is not None
    assert (len(many.others), many.hidden) == (5, 24)
    assert area_of(difference("rng/python/words")) is Area.STREAM


@pytest.mark.parametrize(
    ("path", "area", "measured"),
    [
        ("ckpt_engine/rng/numpy/key", Area.STREAM, False),
        ("ckpt_engine/feeds/loader/position/made/rng/python/words", Area.STREAM, False),
        ("ckpt_engine/feeds/loader/position/order/digest", Area.POSITION, False),
        ("rng/torch", Area.STREAM, False),
        ("ckpt_engine/cadence/interval", Area.WEIGHTS, True),
        ("ckpt_engine/gradient_order", Area.WEIGHTS, True),
    ],
)
@pytest.mark.parametrize("own", ["", "ranks/0/", "ranks/12/"])
def test_what_each_rank_has_of_its_own_is_as_that_of_one_process(
    own: str, path: str, area: Area, measured: bool
) -> None:
    """Streams that nothing seeds are no weights of a rank, and what a process finds out about itself is no state."""
    found = LeafDifference(own + path, DifferenceKind.TENSOR, "1", "2", 1, 4, (0,), 1.0)
    assert (area_of(found), found.measured) == (area, measured)
    verdict = judge(1, [found], fresh=True)
    assert verdict is not None
    assert verdict.streams_only == (area is Area.STREAM)


@pytest.mark.parametrize(
    ("what", "step", "area"),
    [
        ("batch", 4, Area.BATCH),
        ("random", 4, Area.STREAM),
        ("learning_rate", 4, Area.RATE),
        ("weights", 3, Area.WEIGHTS),
        ("batch", 5, Area.WEIGHTS),
    ],
)
def test_the_steps_say_what_came_before_the_weights_of_a_snapshot(what: str, step: int, area: Area) -> None:
    """The earlier of the two counts, and of the same step batch, random stream and learning rate before weights."""
    replay = Replay(
        "different", 2, "a cause", ReplayDifference(step, what, "model.w" if what == "weights" else "", 0.5)
    )
    snapshot = FirstDifference(4, Area.WEIGHTS, "model/w", "another cause", (), 0)
    found = earliest([snapshot, of_replay(replay), None, of_replay(Replay("exact", 4))])
    assert found is not None
    assert (found.step, found.area) == (min(step, 4), area)
    assert found.cause == ("another cause" if step == 5 else "a cause")
    assert earliest([None, of_replay(Replay("exact", 4))]) is None


def test_copies_of_a_random_stream_are_no_order_of_samples_and_are_reported_once() -> None:
    """Data positions have the global streams in them; a stream that nothing draws from explains nothing else."""

    def difference(path: str) -> LeafDifference:
        return LeafDifference(path, DifferenceKind.TENSOR, "1", "2", 1, 4, (0,), 1.0)

    position = "ckpt_engine/feeds/loader/position"
    streams = tuple(
        difference(path)
        for path in (
            f"{position}/made/rng/python/words",
            f"{position}/made/rng/numpy/key",
            f"{position}/order/at_iter/rng/python/words",
            "ckpt_engine/rng/python/words",
            "ckpt_engine/rng/numpy/key",
        )
    )
    unused = judge(1, streams, fresh=True)
    assert unused is not None
    assert (unused.area, unused.hidden) == (Area.STREAM, 0)
    assert unused.first == "the random stream of python (ckpt_engine/rng/python/words)"
    assert unused.others == ("the random stream of numpy (ckpt_engine/rng/numpy/key)",)
    assert "all else is equal" in unused.cause and "order of samples" not in unused.cause
    order = judge(1, [*streams, difference(f"{position}/order/digest")], fresh=True)
    assert order is not None
    assert "the order of samples is drawn from a stream that nothing seeds" in order.cause


def test_a_resumed_run_must_end_where_the_other_one_ends() -> None:
    """Equal snapshots are no proof if there are fewer of them."""
    assert judge_end(6, 6) is None
    for whole, again, step in ((6, 4, 5), (4, 6, 5)):
        found = judge_end(whole, again)
        assert found is not None
        assert (found.step, found.first) == (
            step,
            f"the uninterrupted run went on to step {whole}, the resumed one to step {again}",
        )
