"""What has not changed is not copied again, and whatever changes it, no snapshot has other bytes than its instant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.errors import SnapshotFailedError
from ckpt_engine.snapshot import copying
from ckpt_engine.snapshot.arena import SharedSlot, slot_bytes
from ckpt_engine.snapshot.copying import PROVEN, Claims, Unchanged
from ckpt_engine.snapshot.stage import Copier, Staging, StepFence
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner

COUNT = 32_768


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Small tensors are no exception, so that the laws are quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "LEAST_BYTES", 4 * COUNT)
        yield


class Trainer:
    """Stages into `slots` slots in turn, without a helper: copies behind training wait for `finish`."""

    def __init__(self, slots: int = 1) -> None:
        self._planner = Planner(Flattener())
        self._unchanged = Unchanged()
        self._slots: list[SharedSlot] = []
        self._count = slots
        self._taken = 0

    def begin(self, state: dict[str, Any]) -> tuple[Staging, Claims, Callable[[], dict[str, torch.Tensor]], list[Any]]:
        capture = self._planner.capture(state)
        if len(self._slots) < self._count:
            self._slots.append(SharedSlot(len(self._slots), slot_bytes(capture.plan)))
        slot = self._slots[self._taken % self._count]
        self._taken += 1
        claims = self._unchanged.claim(slot.index, [one.index for one in self._slots], capture)
        errors: list[Any] = []

        def done(error: BaseException | None) -> None:
            self._unchanged.settle(claims, staged=error is None)
            errors.append(error)

        staging = Staging(capture, slot.views(capture.plan), done, slot=slot.memory, claims=claims)
        staging.begin(Copier(0))
        names = [entry.name for entry in capture.plan.layout.entries]
        return staging, claims, lambda: dict(zip(names, slot.views(capture.plan), strict=True)), errors

    def stage(self, state: dict[str, Any]) -> tuple[Claims, Any]:
        """One snapshot to its end, which must be that of the instant unless it says that it has failed."""
        expected = {name: tensor.detach().clone() for name, tensor in state.items()}
        staging, claims, views, errors = self.begin(state)
        staging.finish_hints()
        assert len(errors) == 1
        if errors[0] is None:
            assert all(torch.equal(views()[name], tensor) for name, tensor in expected.items())
        return claims, errors[0]


def frozen() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(COUNT), "v": torch.randn(COUNT)}


def hinted(claims: Claims) -> set[str]:
    return {claim.name for claim in claims.by_source.values() if claim.hinted}


def prove(trainer: Trainer, state: dict[str, torch.Tensor]) -> None:
    for _ in range(1 + PROVEN):
        claims, error = trainer.stage(state)
        assert error is None and not hinted(claims)


def test_what_did_not_change_several_times_is_compared_behind_training() -> None:
    """Before that it is compared before training goes on."""
    trainer, state = Trainer(), frozen()
    prove(trainer, state)
    staging, claims, _, errors = trainer.begin(state)
    assert hinted(claims) == {"w", "v"}
    assert not staging.complete and errors == []
    staging.fence()
    assert errors == [None]


def test_every_slot_gets_the_bytes_once() -> None:
    """A slot that has not been filled yet is, whatever is known of the tensor."""
    trainer, state = Trainer(slots=2), frozen()
    for _ in range(8):
        assert trainer.stage(state)[1] is None
    assert hinted(trainer.stage(state)[0]) == {"w", "v"}


@pytest.mark.parametrize("change", [lambda t: t.add_(1), lambda t: t.data.add_(1), lambda t: t.numpy().fill(2.0)])
def test_what_changed_before_it_was_believed_is_copied_for_ever(change: Callable[[torch.Tensor], object]) -> None:
    """Noticed by torch or not: as a fused optimizer may change a weight."""
    trainer, state = Trainer(), frozen()
    trainer.stage(state)
    change(state["w"])
    assert trainer.stage(state)[1] is None
    for _ in range(4):
        claims, error = trainer.stage(state)
        assert error is None and "w" not in hinted(claims)


def test_a_change_that_torch_counts_is_simply_copied() -> None:
    """That is so however long nothing changed before."""
    trainer, state = Trainer(), frozen()
    prove(trainer, state)
    trainer.stage(state)
    state["w"].mul_(2)
    claims, error = trainer.stage(state)
    assert error is None and hinted(claims) == {"v"}


def test_an_unnoticed_change_fails_one_snapshot_and_names_the_tensor() -> None:
    """The bytes of the instant are not known then; from the next snapshot on it is copied."""
    trainer, state = Trainer(), frozen()
    prove(trainer, state)
    state["w"].data[COUNT // 2 :][:9].mul_(2)
    _, error = trainer.stage(state)
    assert error is not None and "w had not changed" in str(error)
    for _ in range(3):
        claims, error = trainer.stage(state)
        assert error is None and "w" not in hinted(claims)


def test_an_uncounted_change_of_a_whole_tensor_is_seen_at_a_glance() -> None:
    """The ends of what is hinted are compared before training goes on: then it is copied, and nothing fails."""
    trainer, state = Trainer(), frozen()
    prove(trainer, state)
    state["w"].data.mul_(2)
    claims, error = trainer.stage(state)
    assert error is None and hinted(claims) == {"v"}


def test_a_loop_that_goes_on_at_once_gets_the_bytes_of_the_instant() -> None:
    """It changes what has not been compared yet, which torch counts: no snapshot fails for that."""
    trainer, state = Trainer(), frozen()
    prove(trainer, state)
    before = state["w"].clone()
    staging, claims, views, errors = trainer.begin(state)
    assert "w" in hinted(claims)
    state["w"].mul_(2)
    staging.finish_hints()
    assert errors == [None]
    assert torch.equal(views()["w"], before)
    for _ in range(3):
        claims, error = trainer.stage(state)
        assert error is None and "w" not in hinted(claims)


def test_other_memory_at_the_same_address_is_other_memory() -> None:
    """A tensor made for each snapshot may come to lie where the one before did, and is copied all the same."""
    trainer = Trainer()
    for value in range(6):
        claims, error = trainer.stage({"w": torch.full((COUNT,), float(value))})
        assert error is None and not claims.by_source


def test_what_requires_grad_is_always_copied() -> None:
    """A trained weight is no candidate."""
    trainer, state = Trainer(), {"w": torch.randn(COUNT, requires_grad=True)}
    for _ in range(4):
        assert not trainer.stage(state)[0].by_source


def test_no_optimizer_steps_under_a_comparison() -> None:
    """A plain loop without a fence: the weights stood still for some snapshots, and then a step changes them."""
    weight = torch.nn.Parameter(torch.randn(COUNT))
    weight.grad = torch.ones(COUNT)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    trainer, state = Trainer(), {"w": weight.detach()}
    prove(trainer, state)
    expected = weight.detach().clone()
    staging, claims, views, errors = trainer.begin(state)
    assert hinted(claims) == {"w"} and errors == []
    fence = StepFence(staging.finish_hints)
    fence.install()
    optimizer.step()
    fence.remove()
    assert errors == [None] and torch.equal(views()["w"], expected)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda _: None,
    "counted": lambda t: t[5:9].add_(1),
    "data": lambda t: t.data[-3:].sub_(1),
    "numpy": lambda t: t.numpy()[7:8].__iadd__(1),
    "there and back": lambda t: t.data.neg_().neg_(),
}


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(["nothing", "nothing", *CHANGES]), st.sampled_from("vw"), st.booleans()), max_size=12
    ),
)
def test_a_snapshot_is_its_instant_or_fails(slots: int, story: list[tuple[str, str, bool]]) -> None:
    """Whatever happens between snapshots, and behind one before it was compared; each tensor fails at most once."""
    trainer, state, failures = Trainer(slots), frozen(), []
    for change, name, early in story:
        expected = {key: tensor.clone() for key, tensor in state.items()}
        staging, _, views, errors = trainer.begin(state)
        if early:
            CHANGES[change](state[name])
        staging.finish_hints()
        (error,) = errors
        if error is None:
            assert all(torch.equal(views()[key], tensor) for key, tensor in expected.items())
        else:
            failures.append(str(error))
        if not early:
            CHANGES[change](state[name])
    assert len(failures) == len(set(failures)) <= 2


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path, writer="thread", on_error="warn") as checkpointer:
        yield checkpointer


def test_a_run_goes_on_after_a_wrong_hint(run: Checkpointer) -> None:
    """The snapshot fails with the path, the next one has the bytes, and nothing is raised by a fence."""
    state = {"frozen": torch.randn(COUNT), "trained": torch.randn(1000)}
    for step in range(2 + PROVEN):
        run.save(state, step=step).wait()
    state["frozen"].data[COUNT // 2 :][:9].add_(1)
    handle = run.save(state, step=10)
    with pytest.raises(SnapshotFailedError, match="frozen had not changed"):
        handle.wait()
    run.before_update()
    run.save(state, step=11).wait()
    loaded = run.load()
    assert loaded is not None and torch.equal(loaded["frozen"], state["frozen"])
