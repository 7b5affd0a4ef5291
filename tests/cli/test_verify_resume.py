"""`ckpt verify-resume`: correct scripts pass, and each usual mistake is found, named and explained."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import lightning.pytorch as pl
import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.audit import audit
from ckpt_engine.cli import rehearsal_runs as runs
from ckpt_engine.cli.compare import DifferenceKind, LeafDifference
from ckpt_engine.cli.rehearsal_patches import Rehearsal
from ckpt_engine.cli.rehearsal_runs import PythonCommand, Spec, Trace, event_line
from ckpt_engine.cli.verdict import Area, Pair, area_of, explain, judge, judge_end
from ckpt_engine.engine import Engine
from ckpt_engine.observe.resume_report import NotRestored
from lightning_ckpt import AdaptiveCheckpoint
from lightning_ckpt.pytest_plugin import add_to_every_trainer
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


def test_a_correct_script_is_exact_and_nothing_of_its_own_is_touched(
    forked: None, verify: Callable[..., Any], tmp_path: Path
) -> None:
    """Three snapshots after the restart equal the uninterrupted run's; its run folder does not come into being."""
    result = verify("", "--kill-at", 2, "--scratch", tmp_path / "scratch")
    assert result.code == 0, result.err
    assert "exact: killed after step 2, equal to the uninterrupted run up to the end (4 snapshots, " in result.out
    assert not (tmp_path / "run").exists()
    killed = Trace.read(tmp_path / "scratch/killed.trace")
    assert killed.steps == (1, 2)
    assert '"killed"' in (tmp_path / "scratch/killed.trace").read_text()
    assert len(Trace.read(tmp_path / "scratch/again.trace").loaded) == 1
    assert "the end" not in (tmp_path / "scratch/again.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "dice"])
def test_a_tracked_loop_with_a_memory_tier_is_exact(what: str, verify: Callable[..., Any]) -> None:
    """Adapters ask the engine more than a loop by hand does; the streams of python and numpy have no seed here.

    A generator of the loop's own goes on without a word.
    """
    result = verify(what, script="tracked_loop.py")
    assert result.code == 0, result.out + result.err
    assert "exact" in result.out


def test_what_is_rehearsed_is_called_as_the_engine_is(tmp_path: Path) -> None:
    """Adapters that ask for both kinds of snapshots get the engine's answer, not a `TypeError`."""
    module = ModuleType("module")
    module.Engine = Engine  # type: ignore[attr-defined]
    Rehearsal(Spec(str(tmp_path), str(tmp_path / "trace"), 3))._patch_engine(module)
    assert module.Engine is not Engine
    engine = module.Engine(tmp_path / "run", writer="thread")
    try:
        assert [engine.ready(durable=durable) for durable in (True, False)] == [True, True]
    finally:
        engine.close()


@pytest.mark.slow
def test_an_own_generator_is_found(verify: Callable[..., Any]) -> None:
    """It begins again after a restart: weights differ, and the variable is named with the line that saves it."""
    result = verify("own generator", "--json")
    assert result.code == 1, result.err
    report = result.json
    assert (report["exact"], report["fresh"]) == (False, None)
    assert (report["resumed"]["step"], report["resumed"]["area"]) == (4, "tensor")
    assert report["resumed"]["first"].startswith("model/0.weight: ")
    (moved,) = report["resumed"]["moved"]
    assert (moved["path"], moved["type"]) == ("main().own", "random.Random")
    assert "save({…, 'own': own}, step=step), and own = state['own'] after load()" in moved["remedy"]


@pytest.mark.slow
def test_draws_at_every_start_are_found(verify: Callable[..., Any]) -> None:
    """The stream is named before the weights that it changes."""
    result = verify("draws at start")
    assert result.code == 1, result.err
    assert "NOT EXACT: the runs differ at step 4 after the restart" in result.out
    assert "first: the random stream of torch (rng/torch)" in result.out
    assert "draws from this stream a different number of times after a restart" in result.out
    assert "also: model/0.weight" in result.out


@pytest.mark.slow
def test_code_that_reads_the_clock_is_found_from_the_start_and_after_the_restart(verify: Callable[..., Any]) -> None:
    """The restart is compared on a snapshot of the first run, because the second one differs from it."""
    result = verify("clock")
    assert result.code == 3, result.err
    first, _, rest = result.out.partition("the restart differs as well, which may have the same cause")
    assert first.startswith("not seeded: two runs from the start differ at step 1, before anything is killed")
    assert ": the runs differ at step 4 after the restart" in rest
    assert "code that reads the clock" in rest
    assert "NOT EXACT" not in result.out


@pytest.mark.slow
def test_a_script_without_a_seed_may_still_resume_exactly(verify: Callable[..., Any]) -> None:
    """That two runs differ is said first, has an exit code of its own, and is no fault of the resume."""
    result = verify("no seed")
    assert result.code == 3, result.err
    assert result.out.startswith("not seeded: two runs from the start differ at step 1, before anything is killed")
    assert "exact: killed after step 3" in result.out
    assert "NOT EXACT" not in result.out
    assert "run 4" in result.err


def test_a_tracked_loop_is_rehearsed_as_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker makes its audit as ever, and the rehearsal learns the objects that it looks at."""
    monkeypatch.setattr(audit.Audit, "__init__", audit.Audit.__init__)  # put back afterwards
    rehearsal = Rehearsal(Spec(str(tmp_path), str(tmp_path / "trace"), 3))
    rehearsal._patch_audit(audit)
    net = torch.nn.Linear(2, 2)
    net.calls = 0  # type: ignore[assignment]
    with Checkpointer(tmp_path / "run", writer="thread") as ckpt:
        ckpt.track(model=net, optimizer=torch.optim.SGD(net.parameters()))
        assert "model.calls" in rehearsal._attributes.changed({})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "options", "answer"),
    [
        ("forgets", (), "did not resume when it was started again"),
        ("fails", (), "ValueError: a mistake of the script"),
        ("saves nothing", (), "the script took no snapshot (uninterrupted run)"),
        ("", ("--timeout", "0.01"), "had not reached step 6 after 0.01 s"),
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
    assert result.out.startswith("not seeded: two runs from the start differ at step 1, before anything is killed")
    assert "first: batch 0 of training loader 0 has other content" in result.out
    assert "\nexact: killed after step 3" in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mistake", "lines"),
    [
        ("lightning_loop.py", "iterator", ["the resume report says: hidden state model.factors", "state_dict()"]),
        ("tracked_loop.py", "best", ["the resume report says: local variables: best is carried", "Carry(best=…)"]),
        ("tracked_loop.py", "hidden off", ["not put back: model.calls", "int", "state_dict()"]),
    ],
)
def test_the_hidden_state_that_explains_it_is_named(
    verify: Callable[..., Any], script: str, mistake: str, lines: list[str]
) -> None:
    """Attribute path, class, and the line that makes it exact, instead of a usual cause."""
    result = verify(mistake, script=script)
    assert result.code == 1, result.out + result.err
    assert result.out.startswith("NOT EXACT: the runs differ at step 4 after the restart")
    assert "usual cause" not in result.out
    for line in lines:
        assert line in result.out


def test_what_differs_between_two_fresh_starts_explains_nothing() -> None:
    """A time or a path is another one in every process; a count is named before the tensor made with it."""

    def trace(*values: tuple[int, Mapping[str, str]]) -> Trace:
        rows = {step: {path: (path.rpartition(".")[2], one) for path, one in row.items()} for step, row in values}
        return Trace((), (), {}, tuple(rows), rows)

    divergence = judge(
        [Pair(2, (LeafDifference("w", DifferenceKind.TENSOR, "1", "2", 1, 4, (0,), 1.0),), 3, None)], fresh=False
    )
    assert divergence is not None
    whole = trace(
        (1, {"a.float": "1", "m.Tensor": "1", "b.int": "1"}), (2, {"a.float": "1", "m.Tensor": "2", "b.int": "2"})
    )
    killed = trace((1, {"a.float": "9", "m.Tensor": "1", "b.int": "1"}))
    again = trace((2, {"a.float": "8", "m.Tensor": "7", "b.int": "7"}))
    found = explain(divergence, whole, killed, again, [])
    assert [one.path for one in found.moved] == ["b.int", "m.Tensor"]
    missing = [NotRestored("hidden state b.int", "as it is")]
    reported = explain(divergence, whole, killed, again, missing)
    assert [one.path for one in reported.moved] == ["m.Tensor"]
    assert reported.declared == ("hidden state b.int: as it is",)


def test_a_module_and_its_surroundings_run_as_python_runs_them(tmp_path: Path) -> None:
    """Arguments, `__main__`, the import path; and torch is not imported before the script does it."""
    (tmp_path / "beside.py").write_text("here = True\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\n"
        "assert __name__ == '__main__' and beside.here and 'torch' not in sys.modules\n"
        "print(sys.argv, sys.modules['__main__'].__file__)\n"
    )
    spec = Spec(str(tmp_path), str(tmp_path / "trace"), 3).write(tmp_path / "spec.json")
    for words, shown in (
        ([sys.executable, "-u", str(script), "--a", "b"], f"['{script}', '--a', 'b'] {script}\n"),
        ([sys.executable, "-m", "script", "-c"], f"['{script}', '-c'] {script}\n"),
    ):
        command = PythonCommand.parse(words).rehearsed(spec)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        assert done.stdout == shown, done.stderr


def test_command_lines_are_understood_or_refused(tmp_path: Path) -> None:
    """Options of the interpreter stay with it; a command that does not run one Python program gets an answer."""
    script = tmp_path / "train.py"
    script.touch()
    parsed = PythonCommand.parse(["python3", "-u", "-X", "dev", str(script), "--lr", "1"])
    assert parsed == PythonCommand(("python3", "-u", "-X", "dev"), "script", str(script), ("--lr", "1"))
    assert PythonCommand.parse(["python", "-m", "pkg.train"]).kind == "module"
    own = tmp_path / "mytrain"
    own.write_text(f"#!{sys.executable} -s\nprint()\n")
    own.chmod(0o755)
    assert PythonCommand.parse([str(own), "-x"]) == PythonCommand((sys.executable, "-s"), "script", str(own), ("-x",))
    for words, answer in (
        (["python", "-c", "1"], "use a file"),
        (["python"], "names no script"),
        (["python", "no.py"], "is no file"),
        (["torchrun", "train.py"], "starts several processes"),
        (["ls"], "is no Python program"),
    ):
        with pytest.raises(click.UsageError, match=answer):
            PythonCommand.parse(words)


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
    assert judge([Pair(1, (), 3, None)], fresh=False) is None
    for found, area in (
        ((value, weights), Area.WEIGHTS),
        ((value,), Area.VALUE),
        ((weights, stream), Area.STREAM),
        ((weights, stream, position), Area.POSITION),
    ):
        for fresh in (True, False):
            verdict = judge([Pair(1, (), 3, None), Pair(2, found, 3, None), Pair(3, (stream,), 3, (0, 1))], fresh=fresh)
            assert verdict is not None
            assert (verdict.step, verdict.area) == (2, area)
            assert len(verdict.others) == len(found) - 1
    batch = judge([Pair(2, (weights, position), 3, (0, 7))], fresh=False)
    assert batch is not None
    assert (batch.area, batch.first) == (Area.BATCH, "batch 7 of training loader 0 has other content")
    assert "the order of samples is not put back" in batch.cause
    many = judge([Pair(1, tuple(difference(f"w/{i}") for i in range(30)), 3, None)], fresh=False)
    assert many is not None
    assert (len(many.others), many.hidden) == (5, 24)
    assert area_of("rng/python/words") is Area.STREAM


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
    unused = judge([Pair(1, streams, 9, None)], fresh=True)
    assert unused is not None
    assert (unused.area, unused.hidden) == (Area.STREAM, 0)
    assert unused.first == "the random stream of python (ckpt_engine/rng/python/words)"
    assert unused.others == ("the random stream of numpy (ckpt_engine/rng/numpy/key)",)
    assert "all else is equal" in unused.cause and "order of samples" not in unused.cause
    order = judge([Pair(1, (*streams, difference(f"{position}/order/digest")), 9, None)], fresh=True)
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


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """A missing one is empty."""
    path = tmp_path / "trace"
    assert Trace.read(path) == Trace((), (), {}, ())
    path.write_bytes(
        event_line("root", url="/run")
        + event_line("loaded", snapshot="x")
        + event_line("saving", step=2, batches=[[0, 1, "aa"]], attributes={"a": ["int", "1"], "b": ["int", "1"]})
        + event_line("saving", step=2, batches=[[0, 2, "bb"]], attributes={"a": ["int", "2"]})
        + event_line("stopped", step=2)
    )
    batches = {2: {(0, 1): "aa", (0, 2): "bb"}}
    assert Trace.read(path) == Trace(("/run",), ("x",), batches, (2, 2), {2: {"a": ("int", "2"), "b": ("int", "1")}})


@pytest.mark.slow
def test_a_suite_is_run_with_us_in_every_trainer(ckpt: Ckpt, tmp_path: Path) -> None:
    """What fails only with us is named with its first line; what fails anyway, or now and then, is not blamed."""
    suite = tmp_path / "suite_of_a_user.py"
    suite.write_text((SCRIPTS / "suite" / suite.name).read_text())
    words = ("-p", "no:cacheprovider", "-q", suite)
    result = ckpt("verify-resume", "--timeout", 300, "--pytest", "--json", "--", *words)
    assert result.code == 1, result.err
    report = result.json
    assert [one["test"].rpartition("::")[2] for one in report["new_failures"]] == ["test_that_counts_callbacks"]
    assert report["new_failures"][0]["line"] == "AssertionError: there is a callback"
    assert [one["test"].rpartition("::")[2] for one in report["unsteady"]] == ["test_that_is_unsteady"]
    assert [one["line"] for one in report["failed_before"]] == ["ValueError: as ever"]
    assert (report["passed"], report["skipped"]) == (4, 1)


@pytest.mark.slow
def test_a_suite_that_does_not_change_ends_well(ckpt: Ckpt, tmp_path: Path) -> None:
    """Exit code 0; its progress is on the error stream. Tests that do not exist are an error of pytest.

    The suite has no configuration: pytest finds its root by the paths among its arguments, in each run the same one.
    """
    suite = tmp_path / "suite_of_a_user.py"
    suite.write_text((SCRIPTS / "suite" / suite.name).read_text())
    words = ("-p", "no:cacheprovider", suite)
    result = ckpt("verify-resume", "--pytest", *words, "-k", "trains and None")
    assert result.code == 0, result.err
    assert result.out == "0 new failures; 1 test passed with and without ckpt-engine, 0 skipped\n"
    assert "run 2: with AdaptiveCheckpoint in every Trainer: 1 of 1 tests, 0 failed" in result.err
    wrong = ckpt("verify-resume", "--pytest", *words, "-k", "no_such_test")
    assert (wrong.code, "pytest ended with exit code 5" in wrong.err) == (2, True)


def test_each_trainer_gets_one_callback_of_ours(tmp_path: Path) -> None:
    """Beside those of the user, whatever form they have; none where there is one already. It can be undone."""
    original = pl.Trainer.__init__
    undo = add_to_every_trainer(tmp_path)
    try:
        for given in (None, [], pl.Callback(), [pl.Callback()], [AdaptiveCheckpoint(tmp_path / "own")]):
            trainer = pl.Trainer(callbacks=given, accelerator="cpu", logger=False, enable_checkpointing=False)
            assert [type(one) for one in trainer.callbacks].count(AdaptiveCheckpoint) == 1
        assert len(list(tmp_path.iterdir())) == 4
        assert inspect.signature(pl.Trainer.__init__) == inspect.signature(original)
    finally:
        undo()
    assert pl.Trainer.__init__ is original
