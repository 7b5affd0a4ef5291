"""Adam's step predicted: exact for every implementation of torch, refused where it is not Adam's step."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.errors import CkptError, CorruptError, NewerFormatError
from ckpt_engine.store.codecs.adam import NUMBERS, AdamCodec, flushes_subnormals
from tests.store.codecs.adam_runs import State, one_step, views

CODEC = AdamCodec()


def _encode(new: State, old: State, numbers: Mapping[str, float]) -> dict[str, bytes] | None:
    stored = CODEC.encode(views(new), views(old), [numbers])
    return None if stored is None else {role: bytes(data) for role, data in stored.items()}


def _decode(stored: Mapping[str, bytes], old: State) -> State:
    outs = {role: bytearray(len(data)) for role, data in old.items()}
    CODEC.decode(
        {role: memoryview(data) for role, data in stored.items()},
        {role: memoryview(data) for role, data in outs.items()},
        views(old),
    )
    return {role: bytes(data) for role, data in outs.items()}


@pytest.mark.parametrize(
    ("kind", "betas", "options"),
    [
        pytest.param(kind, betas, options, marks=() if quick else pytest.mark.slow)
        for kind in (torch.optim.AdamW, torch.optim.Adam)
        for betas in ((0.9, 0.999), (0.9, 0.95))
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True})
        for quick in [betas == (0.9, 0.999) and (kind is torch.optim.AdamW or "fused" in options)]
    ],
    ids=str,
)
def test_one_step_of_torch_takes_a_third(
    kind: type[torch.optim.Adam], betas: tuple[float, float], options: dict[str, bool]
) -> None:
    """Every implementation of Adam and AdamW is predicted: weights but for a few last bits, second moments nearly."""
    steps = one_step(kind, betas=betas, **options)
    stored = _encode(steps.new, steps.old, steps.numbers)
    assert stored is not None
    nbytes = len(steps.new["p"])
    assert len(stored["p"]) < 0.02 * nbytes and len(stored["v"]) < 0.06 * nbytes
    assert sum(map(len, stored.values())) < nbytes
    assert _decode(stored, steps.old) == steps.new


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_weights_are_predicted_to_the_last_bit(options: dict[str, bool]) -> None:
    """All but those whose square root torch's vector library rounds wrong: on some processors every sixth root."""
    from ckpt_engine.store.codecs.adam import AdamStep, predict_weights

    steps = one_step(**options)
    numbers = AdamStep(**{**steps.numbers, "step": int(steps.numbers["step"])})
    new, old = ({r: np.frombuffer(d, np.float32) for r, d in s.items()} for s in (steps.new, steps.old))
    predicted = predict_weights(old["p"], new["m"], new["v"], numbers)
    off = predicted.view(np.uint32) != new["p"].view(np.uint32)
    roots = torch.from_numpy(new["v"].copy()).sqrt().numpy()
    assert not np.any(off & (roots == np.sqrt(new["v"])))
    assert np.count_nonzero(off) <= 0.01 * predicted.size


@pytest.mark.parametrize("wrong", [{"lr": 2e-3}, {"step": 3}, {"beta2": 0.9}, {"weight_decay": 0.0}], ids=str)
def test_wrong_numbers_cost_bytes_and_nothing_else(wrong: dict[str, float]) -> None:
    """With wrong numbers of the optimizer, what the codec encodes still decodes to the same bits."""
    steps = one_step()
    stored = _encode(steps.new, steps.old, {**steps.numbers, **wrong})
    assert stored is None or _decode(stored, steps.old) == steps.new


def test_ten_steps_apart_is_refused() -> None:
    """The prediction holds for one step; several are left to the difference codec."""
    steps = one_step(apart=10)
    assert _encode(steps.new, steps.old, steps.numbers) is None


@pytest.mark.parametrize("bad", [{"lr": float("nan")}, {"step": 0}, {"beta1": 1.0}, {"beta2": -0.1}], ids=str)
def test_numbers_without_sense_are_refused(bad: dict[str, float]) -> None:
    """NaN, betas outside [0, 1) and a step before the first are no step of Adam."""
    steps = one_step(before=2, size=8)
    assert _encode(steps.new, steps.old, {**steps.numbers, **bad}) is None


@pytest.mark.parametrize("missing", NUMBERS)
def test_missing_numbers_are_refused(missing: str) -> None:
    """Everything that `NUMBERS` names is needed."""
    steps = one_step(before=2, size=8)
    assert _encode(steps.new, steps.old, {k: v for k, v in steps.numbers.items() if k != missing}) is None


@st.composite
def awkward(draw: st.DrawFn) -> tuple[State, State, dict[str, float]]:
    """A step of Adam with bits changed at random: NaN, infinities, subnormal numbers, anything."""
    steps = one_step(before=3, size=8)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    special = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF], np.uint32)

    def spoil(state: State) -> State:
        spoilt = {}
        for role, data in state.items():
            words = np.frombuffer(data, np.uint32).copy()
            where = rng.random(words.size) < share
            words[where] = np.where(
                rng.random(words.size) < 0.5, rng.choice(special, words.size), rng.integers(0, 2**32, words.size)
            )[where].astype(np.uint32)
            spoilt[role] = words.tobytes()
        return spoilt

    return spoil(steps.new), spoil(steps.old), steps.numbers


@given(case=awkward())
@settings(max_examples=15, deadline=None)
def test_any_bits_come_back(case: tuple[State, State, dict[str, float]]) -> None:
    """NaN payloads, infinities and subnormal numbers are kept to the bit."""
    new, old, numbers = case
    stored = _encode(new, old, numbers)
    assert stored is None or _decode(stored, old) == new


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_damage_never_decodes_to_other_bits(data: st.DataObject) -> None:
    """A flipped, cut or swapped member raises CorruptError: what comes out is checked by its own digest."""
    steps = one_step(before=3, size=8)
    stored = _encode(steps.new, steps.old, steps.numbers)
    assert stored is not None
    role = data.draw(st.sampled_from(sorted(stored)))
    damaged = bytearray(stored[role])
    reach = data.draw(st.sampled_from([min(120, len(damaged)), len(damaged)]))
    damaged[data.draw(st.integers(0, reach - 1))] ^= data.draw(st.integers(1, 255))
    other = data.draw(st.sampled_from(sorted(set(stored) - {role})))
    cut = stored[role][: data.draw(st.integers(0, len(stored[role]) - 1))]
    for bad in (bytes(damaged), cut, stored[role] + b"\0", stored[other]):
        try:
            assert _decode({**stored, role: bad}, steps.old) == steps.new
        except CkptError as err:
            assert isinstance(err, CorruptError | NewerFormatError)


def test_another_base_is_an_error() -> None:
    """Bases of another snapshot, absent ones and ones of other sizes are CorruptErrors."""
    steps = one_step(before=3, size=8)
    stored = _encode(steps.new, steps.old, steps.numbers)
    assert stored is not None
    for bad in (steps.new, {r: d[:-4] for r, d in steps.old.items()}):
        with pytest.raises(CorruptError):
            _decode(stored, bad)
    with pytest.raises(CorruptError):
        CODEC.decode({r: memoryview(d) for r, d in stored.items()}, {}, views(steps.old))


def test_a_thread_that_flushes_subnormal_numbers_neither_encodes_nor_decodes() -> None:
    """Its arithmetic is another one: encoding falls back, decoding says what to switch off."""
    steps = one_step(before=3, size=8)
    stored = _encode(steps.new, steps.old, steps.numbers)
    assert stored is not None
    seen: list[object] = []

    def flushing() -> None:
        if not torch.set_flush_denormal(True):
            return
        try:
            seen.append(flushes_subnormals())
            seen.append(_encode(steps.new, steps.old, steps.numbers))
            with pytest.raises(CorruptError, match="set_flush_denormal"):
                _decode(stored, steps.old)
        finally:
            torch.set_flush_denormal(False)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    if not seen:
        pytest.skip("this processor cannot flush subnormal numbers")
    assert seen == [True, None]
    assert not flushes_subnormals()
