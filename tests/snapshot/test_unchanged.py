"""What has not changed is not copied again, and whatever changes it, no snapshot has other bytes than its instant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.snapshot import unchanged
from ckpt_engine.snapshot.arena import SharedSlot, slot_bytes
from ckpt_engine.snapshot.stage import Copier, Staging
from ckpt_engine.snapshot.unchanged import Claims, Unchanged
from ckpt_engine.state.flatten import Flattener
from ckpt_engine.state.layout import Planner

COUNT = 32_768


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Small tensors are no exception, so that the laws are quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged, "LEAST_BYTES", 4 * COUNT)
        yield


class Trainer:
    """Stages into `slots` slots in turn."""

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

    def stage(self, state: dict[str, Any]) -> Claims:
        """One snapshot, which must be that of the instant."""
        expected = {name: tensor.detach().clone() for name, tensor in state.items()}
        _, claims, views, errors = self.begin(state)
        assert errors == [None]
        assert all(torch.equal(views()[name], tensor) for name, tensor in expected.items())
        return claims


def frozen() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(COUNT), "v": torch.randn(COUNT)}


def compared(claims: Claims) -> set[str]:
    return {claim.name for claim in claims.by_source.values()}


def test_what_did_not_change_is_compared_instead_of_copied() -> None:
    """Once a slot has its bytes."""
    trainer, state = Trainer(), frozen()
    assert compared(trainer.stage(state)) == set()
    for _ in range(4):
        assert compared(trainer.stage(state)) == {"w", "v"}


def test_every_slot_gets_the_bytes_once() -> None:
    """A slot that has not been filled yet is, whatever is known of the tensor."""
    trainer, state = Trainer(slots=2), frozen()
    assert [compared(trainer.stage(state)) for _ in range(4)] == [set(), set(), {"w", "v"}, {"w", "v"}]


@pytest.mark.parametrize(
    "change", [lambda t: t.add_(1), lambda t: t.data[COUNT // 2 :][:9].mul_(2), lambda t: t.numpy().fill(2.0)]
)
@pytest.mark.parametrize("before", [1, 5])
def test_what_has_changed_once_is_copied_for_ever(change: Callable[[torch.Tensor], object], before: int) -> None:
    """Noticed by torch or not, as a fused optimizer may change a weight, and however long nothing changed before."""
    trainer, state = Trainer(), frozen()
    for _ in range(before):
        trainer.stage(state)
    change(state["w"])
    trainer.stage(state)
    for _ in range(4):
        assert compared(trainer.stage(state)) == {"v"}


def test_other_memory_at_the_same_address_is_other_memory() -> None:
    """A tensor made for each snapshot may come to lie where the one before did, and is copied all the same."""
    trainer = Trainer()
    for value in range(6):
        assert not trainer.stage({"w": torch.full((COUNT,), float(value))}).by_source


def test_what_requires_grad_is_always_copied() -> None:
    """A trained weight is no candidate."""
    trainer, state = Trainer(), {"w": torch.randn(COUNT, requires_grad=True)}
    for _ in range(4):
        assert not trainer.stage(state).by_source


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
def test_a_snapshot_is_its_instant(slots: int, story: list[tuple[str, str, bool]]) -> None:
    """Whatever happens between snapshots, and right behind one."""
    trainer, state = Trainer(slots), frozen()
    for change, name, early in story:
        expected = {key: tensor.clone() for key, tensor in state.items()}
        _, _, views, errors = trainer.begin(state)
        if early:
            CHANGES[change](state[name])
        assert errors == [None]
        assert all(torch.equal(views()[key], tensor) for key, tensor in expected.items())
        if not early:
            CHANGES[change](state[name])
