"""A tracked loop that gets requests; signals go to this very process."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ckpt_engine import Checkpointer, engine
from ckpt_engine.errors import WaitTimeoutError
from ckpt_engine.observe.events import Event, Requested, SnapshotStaged
from tests.loop.runs import BATCH, LOADERS, Augmented, Net, saved, seed_everything
from tests.support.writers import no_writing

STEPS = 12
PATIENCE_SECONDS = 60.0
Act = Callable[[Checkpointer], object]


def train(
    root: Path, at: int, act: Act, *, seed: int = 0, data: Dataset[Any] | None = None, **options: Any
) -> list[str]:
    """Two epochs that are closed by `with`; `act` is done in the body of the loop right after step `at`."""
    seed_everything(seed)
    losses: list[str] = []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = LOADERS["shuffled"]() if data is None else DataLoader(data, BATCH)
    with Checkpointer({"tiers": str(root), "every_n_steps": 10**9, "writer": "thread", **options}) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, 2):
            for x, y, _ids in loader:
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
                if run.global_step == at:
                    act(ckpt)
    return losses


def nothing(_: Checkpointer) -> None:
    """No request."""


def sigterm(_: Checkpointer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ask(what: str) -> Act:
    """As `ckpt stop` and `ckpt save-now` do, once the memory for a snapshot is ready."""

    def act(ckpt: Checkpointer) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ckpt.engine.ready():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        ckpt.engine.events.emit(Requested(what, "ann (pid 7)"))

    return act


def assert_goes_on(tmp_path: Path, step: int) -> None:
    """The run that was stopped at `step` continues with the next batch, and is then the uninterrupted run."""
    reference = train(tmp_path / "reference", 0, nothing, at_end=False)
    assert train(tmp_path / "run", 0, nothing, seed=5, at_end=False) == reference[step:]


def test_stop_saves_and_ends_with_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, and the log says who it was."""
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", 4, ask("stop"))
    assert ended.value.code == 0
    assert [one.step for one in saved(tmp_path / "run")] == [4]
    assert "ckpt stop by ann (pid 7): step 4 is durable on" in caplog.text
    assert_goes_on(tmp_path, 4)


def test_a_stop_lets_the_next_writer_write_the_snapshot_with_which_one_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is time left, and the next writer starts at once."""
    staged: list[int] = []

    def lose_the_writer(ckpt: Checkpointer) -> None:
        writer = stack.enter_context(no_writing(ckpt))

        def kill(event: Event) -> None:
            if isinstance(event, SnapshotStaged):
                staged.append(event.step)
                writer.kill()

        ckpt.engine.events.add(SimpleNamespace(emit=kill))
        sigterm(ckpt)

    with ExitStack() as stack, pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", 4, lose_the_writer, writer="process")
    assert ended.value.code == 143
    assert staged == [4]
    assert "SIGTERM: step 4 is durable on" in caplog.text
    assert_goes_on(tmp_path, 4)


def test_a_stop_gives_the_signals_back_where_nothing_is_closed(tmp_path: Path) -> None:
    """A notebook's cell ends, and the next one must hear its Ctrl-C."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = LOADERS["shuffled"]()
    ckpt = Checkpointer(tmp_path, every_n_steps=10**9, writer="thread")
    ckpt.track(model=model, optimizer=optimizer, loader=loader)
    assert signal.getsignal(signal.SIGTERM) is not before[0]
    with pytest.raises(SystemExit):
        for x, y, _ids in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            sigterm(ckpt)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    ckpt.close()


def test_save_now_takes_one_snapshot_and_goes_on(tmp_path: Path) -> None:
    """The snapshot comes at the end of the step, and its manifest has the request as the reason."""
    train(tmp_path, 4, ask("save"), at_end=False)
    (snapshot,) = saved(tmp_path)
    assert (snapshot.step, snapshot.reason) == (4, "manual")


def test_a_stop_at_the_end_of_an_epoch_waits_for_the_first_step_of_the_next(tmp_path: Path) -> None:
    """What the script does between two epochs is not repeated by a snapshot at their seam."""
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", STEPS // 2, sigterm)
    assert ended.value.code == 143
    assert [one.step for one in saved(tmp_path / "run")] == [STEPS // 2 + 1]
    assert_goes_on(tmp_path, STEPS // 2 + 1)


class LosesItsWorkers(Augmented):
    """Its 5th batch never comes, because workers are dead: of a SIGTERM to the whole job, or by themselves."""

    def __init__(self, *, dies: bool = True, stopped: bool = True) -> None:
        super().__init__()
        self.dies, self.stopped = dies, stopped

    def __getitem__(self, i: int) -> Any:
        if self.dies and i == 4 * BATCH:
            if self.stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")  # as torch says it
        return super().__getitem__(i)


def test_a_stop_that_ends_loader_workers_while_the_loop_waits_for_them_loses_nothing(tmp_path: Path) -> None:
    """The step before was complete: it is saved, and the run ends with the status of the signal."""
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "run", 0, nothing, data=LosesItsWorkers())
    assert ended.value.code == 143
    assert [(one.step, one.batch, one.reason) for one in saved(tmp_path / "run")] == [(4, 4, "signal")]
    whole = LosesItsWorkers(dies=False)
    reference = train(tmp_path / "reference", 0, nothing, data=whole, at_end=False)
    assert train(tmp_path / "run", 0, nothing, seed=5, data=whole, at_end=False) == reference[4:]


def test_a_loader_worker_that_dies_by_itself_is_an_error(tmp_path: Path) -> None:
    """Without a stop request the exception is torch's."""
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        train(tmp_path, 0, nothing, data=LosesItsWorkers(stopped=False))


def test_a_stop_after_the_last_batch_saves_the_final_state(tmp_path: Path) -> None:
    """The run was complete: it ends with the number of the signal all the same, as schedulers expect."""
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, STEPS, sigterm)
    assert ended.value.code == 143
    assert [one.reason for one in saved(tmp_path)] == ["end"]


@contextmanager
def busy_writer(root: Path, **options: Any) -> Iterator[Checkpointer]:
    """A complete loop whose last snapshots a stopped writer has; where it is waited for too long it goes on."""
    seed_everything(0)
    model, loader = Net(), LOADERS["shuffled"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(root, every_n_steps=1, slots=1, **options)
    run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
    with no_writing(ckpt) as writer:
        too_long = Timer(20.0, writer.resume)
        too_long.start()
        for _ in range(run.epoch, 1):
            for x, y, _ids in loader:
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
        yield ckpt
        too_long.cancel()


def test_close_waits_as_long_as_it_is_given_for_a_writer_that_does_not_answer(tmp_path: Path) -> None:
    """The final snapshot, which finds no free slot, waits within that time too."""
    with busy_writer(tmp_path) as ckpt, pytest.raises(WaitTimeoutError):
        ckpt.close(timeout=0.5)


def test_a_wait_in_vain_before_the_newest_snapshot_takes_no_time_from_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours may lie between: the last snapshots are waited for as long as is documented."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(engine, "time", clock)
    ckpt = Checkpointer(tmp_path)
    with no_writing(ckpt) as writer:
        ckpt.save({"w": torch.ones(4)}, step=1)
        Timer(0.1, later.__setitem__, [0, 10_000.0]).start()
        assert not ckpt.wait(0.5)
        assert ckpt.save({"w": torch.ones(4)}, step=2).skipped is None
        Timer(0.5, writer.resume).start()
        ckpt.close()
    assert [one.step for one in saved(tmp_path)] == [1, 2]


@pytest.mark.long
def test_a_stop_ends_the_wait_for_the_last_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It comes while the end of the run waits for a writer that does not answer: the grace counts from there."""
    with busy_writer(tmp_path, preemption={"grace": 1.0}) as ckpt, pytest.raises(SystemExit) as ended:
        Timer(0.5, sigterm, [ckpt]).start()
        ckpt.close()
    assert ended.value.code == 143
    assert "the final state was not saved: earlier snapshots are still being written" in caplog.text


def test_ctrl_c_interrupts_after_a_snapshot(tmp_path: Path) -> None:
    """Once: the second one would stop at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", 4, lambda _: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert_goes_on(tmp_path, 4)


def of_an_older_iterator(run: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Nothing sees that it is asked."""
    return batches


def of_its_own(run: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """No loader is asked."""
    return itertools.repeat((torch.ones(4, 6), torch.ones(4, 1), None))


def of_another_thread(run: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """No snapshot is taken, as weights change meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        loader = iter(run.loader)
        while True:
            yield pool.submit(next, loader).result()


@pytest.mark.parametrize("kind", [of_an_older_iterator, of_its_own, of_another_thread])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_without_a_boundary_stops_at_an_optimizer_step(
    kind: Callable[..., Iterator[Any]], number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says that nothing of this step is saved, and does not train to its end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    model, made, steps = Net(), LOADERS["shuffled"](), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sampler = RandomSampler(made.dataset, replacement=True, num_samples=10**4)
    loader = DataLoader(made.dataset, BATCH, sampler=sampler)
    older = iter(loader)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended, Checkpointer(tmp_path, writer="thread") as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
            run.loader = loader
            for x, y, _ids in kind(run, older):
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                steps += 1
                assert steps < 12
                if steps == 8:
                    os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
    assert steps <= 9
    assert "training stops without a snapshot of this step: its loop reaches no boundary" in caplog.text


def test_the_last_line_counts_every_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The step that no boundary followed, too."""
    seed_everything(0)
    model, loader = Net(), LOADERS["shuffled"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = {"every_n_steps": 2, "writer": "thread", "at_end": False}
    with caplog.at_level(logging.INFO), Checkpointer(tmp_path, **options) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for x, y, _ids in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    steps = saved(tmp_path)[-1].step
    assert f"step {steps} is durable on {tmp_path}, {6 - steps} steps behind" in caplog.text


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    """After a run that was stopped, and after one that ended by itself."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    with pytest.raises(SystemExit):
        train(tmp_path / "stopped", 4, sigterm)
    train(tmp_path / "ended", 0, nothing)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == before


def test_an_error_of_the_script_is_not_replaced_by_a_stop(tmp_path: Path) -> None:
    """The script's own exception is the one that is seen."""

    def fail(ckpt: Checkpointer) -> None:
        sigterm(ckpt)
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        train(tmp_path, 4, fail)


def test_the_status_file_shows_a_loop(tmp_path: Path) -> None:
    """A plain loop has the same status file as every other trainer."""
    status = tmp_path / "status.json"
    train(tmp_path / "run", 0, nothing, status={"file": str(status)})
    shown = json.loads(status.read_text())
    assert shown["ended"]
    assert shown["step"] >= STEPS - 2


def test_a_thread_that_is_not_the_main_one_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Signals belong to the main thread of Python; a warning says that they are not watched."""
    with caplog.at_level(logging.WARNING):
        thread = Thread(target=train, args=(tmp_path, 0, nothing))
        thread.start()
        thread.join(60)
    assert [one.reason for one in saved(tmp_path)] == ["end"]
    assert "training does not run on the main thread" in caplog.text
