"""A resumed run proves itself: the steps behind the snapshot are compared with what the earlier process did."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ReplayError
from ckpt_engine.observe.resume_report import FILE_NAME, Replay
from ckpt_engine.probe import sample
from ckpt_engine.probe.batch import digest_of
from tests.probe import lives
from tests.probe.lives import END, SNAPSHOT, Job, make, replay_of, train
from tests.restore.memory_tier.lives import until as wait_until

Change = Callable[[Job, list[torch.Tensor], random.Random], None]


def _flip(tensor: torch.Tensor, dice: random.Random) -> None:
    """One bit of one element."""
    words = tensor.detach().view(-1).view(torch.int32)
    words[dice.randrange(words.numel())] ^= 1 << dice.randrange(12, 30)


def _weight(job: Job, _: list[torch.Tensor], dice: random.Random) -> None:
    _flip(dice.choice(list(job.model.parameters())), dice)


def _moment(job: Job, _: list[torch.Tensor], dice: random.Random) -> None:
    _flip(dice.choice(list(job.optimizer.state.values()))[dice.choice(("exp_avg", "exp_avg_sq"))], dice)


def _batch(_: Job, batch: list[torch.Tensor], dice: random.Random) -> None:
    _flip(batch[1], dice)


def _draw(_: Job, __: list[torch.Tensor], dice: random.Random) -> None:
    torch.rand(dice.randrange(1, 3))


def _stream(_: Job, __: list[torch.Tensor], dice: random.Random) -> None:
    """One bit of one of the 624 words that torch draws from; each takes eight bytes, of which four count."""
    state = torch.get_rng_state()
    state[24 + 8 * dice.randrange(624) + dice.randrange(4)] ^= 1 << dice.randrange(8)
    torch.set_rng_state(state)


def _rate(job: Job, _: list[torch.Tensor], dice: random.Random) -> None:
    job.optimizer.param_groups[0]["lr"] *= 1 + dice.random() * 1e-9


def _decay(job: Job, _: list[torch.Tensor], __: random.Random) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = 0.5


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "weight": (_weight, {"weights"}),
    "moment": (_moment, {"weights"}),
    "batch": (_batch, {"weights"}),  # the loop changes it after the loader has given it
    "random": (_stream, {"random"}),
    "draw": (_draw, {"random"}),
    "learning rate": (_rate, {"learning_rate"}),
    "weight decay": (_decay, {"weights"}),
}


def _begin(root: Path) -> Job:
    """A process that ends behind its last snapshot."""
    job = make()
    assert train(root, job, END) == {}
    assert [path.name.split("-")[1] for path in (root / "snapshots").glob("*.json")] == [f"s{SNAPSHOT:010d}"]
    return job


def test_an_exact_resume_is_proved_by_the_steps_that_it_repeats(tmp_path: Path) -> None:
    """All steps behind the snapshot are compared, another seed does not matter, and a third life repeats the second."""
    _begin(tmp_path)
    for seed in (1, 2):
        job = make(seed)
        replay = replay_of(train(tmp_path, job, END + 1 if seed == 1 else END + 3))
        count = END - SNAPSHOT if seed == 1 else END + 1 - SNAPSHOT
        assert (replay.result, replay.steps, replay.first) == ("exact", count, None)
        assert replay.text() == (
            f"resume proved exact: {count} of {count} repeated steps gave the same batches and weights"
        )
        assert job.numbers["ckpt/resume_exact"] == 1.0


@pytest.mark.cells(2)
@pytest.mark.parametrize("name", CHANGES)
def test_one_change_in_a_repeated_step_is_found_and_named(tmp_path: Path, name: str) -> None:
    """Where it was first seen, at which step, in which tensor, and how far it is apart."""
    change, kinds = CHANGES[name]
    _begin(tmp_path)
    job, dice = make(1), random.Random(name)

    def at(job: Job, step: int, batch: list[torch.Tensor]) -> None:
        if step == SNAPSHOT + 2:
            change(job, batch, dice)

    job.at = at
    replay = replay_of(train(tmp_path, job, END + 1))
    assert replay.result == "different"
    assert job.numbers["ckpt/resume_exact"] == 0.0
    assert replay.first is not None
    assert replay.first.what in kinds
    assert SNAPSHOT + 2 <= replay.first.step <= SNAPSHOT + 4
    if kinds == {"weights"}:
        assert replay.first.name.split(" of ")[-1].startswith("model.")
        assert (replay.first.relative or 0.0) > 0.0


def test_other_data_are_found_in_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that makes a sample has changed since."""
    _begin(tmp_path)
    monkeypatch.setattr(lives, "NOISE", 0.02)
    replay = replay_of(train(tmp_path, make(), END + 1))
    assert replay.first is not None
    assert (replay.first.what, replay.first.step) == ("batch", SNAPSHOT + 1)


@pytest.mark.long
def test_what_cannot_be_compared_is_said_as_such(tmp_path: Path) -> None:
    """Nothing was repeated; training ends before all of it was; nothing was recorded."""
    train(tmp_path / "even", make(), SNAPSHOT)
    job = make()
    even = replay_of(train(tmp_path / "even", job, SNAPSHOT + 1))
    assert even == Replay("not compared", 0, "no step was repeated")
    assert "ckpt/resume_exact" not in job.numbers
    _begin(tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "replay")
    lost = replay_of(train(tmp_path / "lost", make(), SNAPSHOT + 1))
    assert lost == Replay("not compared", 0, "no earlier process has left a record")
    _begin(tmp_path / "early")
    early = replay_of(train(tmp_path / "early", make(), SNAPSHOT + 2))
    assert (early.result, early.steps) == ("exact", 2)
    assert f"2 of {END - SNAPSHOT}" in early.text()
    train(tmp_path / "off", make(), END, replay="off")
    assert not (tmp_path / "off" / "replay").exists()
    off = replay_of(train(tmp_path / "off", make(), END + 1))
    assert off == Replay("not compared", 0, "the snapshot has no record of its steps")
    assert train(tmp_path / "off", make(), END + 2, replay="off")["replay"] is None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_behind_the_snapshot_of_a_stop_there_is_no_step(tmp_path: Path, number: signal.Signals) -> None:
    """It is taken at the boundary at which the run ends, between two that are due."""

    def at(_: Job, step: int, __: list[torch.Tensor]) -> None:
        if step == SNAPSHOT - 2:
            signal.raise_signal(number)

    job = make()
    job.at = at
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train(tmp_path, job, END)
    assert replay_of(train(tmp_path, make(1), END)) == Replay("not compared", 0, "no step was repeated")
    replay = replay_of(train(tmp_path, make(2), END))
    assert (replay.result, replay.steps) == ("exact", END - SNAPSHOT)


def test_weights_that_are_not_looked_at_are_not_said_to_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on a device; batches and random streams were compared."""
    monkeypatch.setattr(sample, "chunk_of", lambda *_: None)
    _begin(tmp_path)
    replay = replay_of(train(tmp_path, make(1), END + 1))
    assert (replay.result, replay.steps) == ("not compared", END - SNAPSHOT)
    assert replay.why.endswith("gave the same batches; weights on a device are not looked at")


class Odd:
    """What a batch may hold; reading it by its own methods ends training."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        raise RuntimeError

    items = __repr__ = __str__  # type: ignore[assignment]


def test_a_batch_of_the_users_own_classes_is_looked_at_from_outside() -> None:
    """Their attributes count, and none of their methods is called; names of a dict may be anything."""
    digests = {digest_of({"x": [Odd(1)], Odd(2): None}), digest_of({"x": [Odd(3)], Odd(2): None})}
    assert len(digests) == 2
    assert digest_of(UserDict(a=1)) == digest_of(UserDict(a=1)) != digest_of(UserDict(a=2))


def test_a_process_that_went_another_way_is_not_the_measure(tmp_path: Path) -> None:
    """The second life goes wrong, is said to, and ends; the third repeats it, and what only the first ran is left."""
    _begin(tmp_path)
    job = make()
    job.at = lambda job, step, batch: _weight(job, batch, random.Random(0)) if step == SNAPSHOT + 1 else None
    assert replay_of(train(tmp_path, job, SNAPSHOT + 3)).result == "different"
    third = make()
    third.at = job.at
    replay = replay_of(train(tmp_path, third, END + 1))
    assert (replay.result, replay.steps) == ("exact", 3)


@pytest.mark.long
@pytest.mark.parametrize("section", ["off", {"only": "model"}], ids=str)
def test_a_run_that_began_again_is_not_compared_with_the_one_before(tmp_path: Path, section: Any) -> None:
    """Steps of the same numbers, of a run that has ended behind them, are no measure of the new one."""
    _begin(tmp_path)
    train(tmp_path, make(seed=5), SNAPSHOT, resume=section)
    again = "auto" if section == "off" else section
    replay = replay_of(train(tmp_path, make(seed=6), SNAPSHOT + 3, resume=again))
    assert replay == Replay("not compared", 0, "no step was repeated")


@pytest.mark.long
def test_a_run_that_is_to_stop_ends_before_anything_is_saved(tmp_path: Path) -> None:
    """`replay: stop`: no snapshot before the outcome is known, and none where it differs; then as usual."""
    _begin(tmp_path)
    job = make()
    job.at = lambda job, step, batch: _weight(job, batch, random.Random(0)) if step == END - 1 else None
    before = sorted((tmp_path / "snapshots").iterdir())
    with pytest.raises(
        ReplayError, match=f"step {END - 1} repeats otherwise, first seen in the weights of model"
    ) as info:
        train(tmp_path, job, END + 5, replay="stop", every_n_steps=1)
    assert "warn" in (info.value.hint or "")
    assert sorted((tmp_path / "snapshots").iterdir()) == before
    report = json.loads((tmp_path / "resume-report.json").read_text())
    assert report["replay"]["result"] == "different"
    train(tmp_path, make(), END + 5, replay="stop", every_n_steps=1)
    steps = sorted(int(path.name.split("-")[1][1:]) for path in (tmp_path / "snapshots").glob("*.json"))
    assert steps[0] == SNAPSHOT
    assert steps[1] in (END, END + 1)


def _steps(root: Path, seed: int, until: int, where: str) -> dict[str, Any]:
    """A loop that makes its batches itself, and may draw beside them."""
    torch.manual_seed(seed)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with Checkpointer(root, every_n_steps=SNAPSHOT, at_end=False, writer="thread") as ckpt:
        run = ckpt.track(net=net, optimizer=optimizer)
        begin = run.global_step
        if where == "before the loop":
            torch.randn(3)
        for _ in range(begin, until):
            wait_until(ckpt.engine.ready, lambda: "no snapshot could be taken")
            net(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if where == "behind the step":
                torch.randn(3)
    path = root / FILE_NAME
    return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.mark.parametrize("where", ["nowhere", "before the loop", "behind the step"])
def test_a_draw_that_no_resume_can_repeat_is_found(tmp_path: Path, where: str) -> None:
    """It shifts the random stream of a loop without a loader; the report has that among what is not restored."""
    _steps(tmp_path, 0, END, where)
    report = _steps(tmp_path, 1, END + 2, where)
    replay, names = replay_of(report), [row["name"] for row in report["not_restored"]]
    if where == "nowhere":
        assert (replay.result, names) == ("exact", [])
        return
    assert replay.first is not None
    assert (replay.first.what, replay.first.step) == ("random", SNAPSHOT + 1)
    assert "repeated steps" in names


def test_a_list_that_no_snapshot_has_is_found(tmp_path: Path) -> None:
    """A buffer that one function fills and another one reads looks like a record: only the repeated steps name it."""

    def with_a_buffer() -> Job:
        job, buffer = make(), list[torch.Tensor]()

        def older(step: int) -> torch.Tensor:
            return buffer[step // 2 % len(buffer)]

        def at(_: Job, step: int, batch: list[torch.Tensor]) -> None:
            buffer.append(batch[0])
            batch[0] = older(step)

        job.at = at
        return job

    train(tmp_path, with_a_buffer(), END)
    report = train(tmp_path, with_a_buffer(), END + 2)
    replay = replay_of(report)
    assert replay.first is not None
    assert replay.first.what == "weights"
    assert "repeated steps" in [row["name"] for row in report["not_restored"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["weight", "moment", "batch", "random"])
def test_two_hundred_injected_bits_are_found(tmp_path: Path, name: str) -> None:
    """Fifty of each kind: where one in a hundred weights or moments differs at the end, 95 of 100 are named."""
    first = _begin(tmp_path / "first")
    counted = found = 0
    dice = random.Random(name)
    for number in range(50):
        root = tmp_path / str(number)
        _copy(tmp_path / "first", root)
        at = dice.randrange(SNAPSHOT + 1, END + 1)
        job = make(number)

        def change(job: Job, step: int, batch: list[torch.Tensor], at: int = at) -> None:
            if step == at:
                CHANGES[name][0](job, batch, dice)

        job.at = change
        replay = replay_of(train(root, job, END + 1))
        pairs = list(zip(first.states[END], job.states[END], strict=True))
        share = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
        if share >= 0.01:
            counted += 1
            found += replay.first is not None and bool(replay.why) and at <= replay.first.step
    assert counted > 25
    assert found >= 0.95 * counted, (found, counted)


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file() and path.name != "lease.json":
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch computes with, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.cells(2)
@pytest.mark.parametrize(("before", "now"), [(1, 1), (2, 2), (4, 4), (1, 2), (1, 4), (4, 1)])
def test_the_number_of_threads_raises_no_false_alarm(
    before: int, now: int, threads: Callable[[int], None], tmp_path: Path
) -> None:
    """The verdict is what the bits say; where another number of threads rounds otherwise, that is the cause."""
    threads(before)
    earlier = _begin(tmp_path)
    threads(now)
    resumed = make(seed=1)
    found = replay_of(train(tmp_path, resumed, END))
    same = all(map(torch.equal, earlier.states[END], resumed.states[END]))
    assert same or before != now
    assert found.result == ("exact" if same else "different")
    assert same or f"threads is {now} and was {before}" in found.why


def test_rows_are_read_from_a_further_tier_where_the_nearest_is_lost(tmp_path: Path) -> None:
    """As after the loss of a machine: they were copied with the snapshots, and at the end."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = {"tiers": [{"url": str(near)}, {"url": str(far)}]}
    train(near, make(), END, **tiers)
    shutil.rmtree(near)
    replay = replay_of(train(near, make(1), END, **tiers))
    assert replay == Replay("exact", END - SNAPSHOT, replay.why)
    changed = make(2)
    shutil.rmtree(near)
    changed.at = lambda job, step, _: job.model.head.bias.data.add_(1.0) if step == SNAPSHOT + 2 else None
    first = replay_of(train(near, changed, END, **tiers)).first
    assert first is not None
    assert (first.step, first.what) == (SNAPSHOT + 2, "weights")
