"""The demo's comparison can fail: every kind of difference is found and named."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.compare import compare_runs, record_differences
from demo.record import Entry, Start, Step, Validation

STEPS = 6


def a_record(*spans: tuple[int, int]) -> list[Entry]:
    """A record whose processes trained the given spans of steps; validated after step 3."""
    entries: list[Entry] = []
    for pid, (first, last) in enumerate(spans):
        entries.append(Start(0.0, pid, first - 1))
        for step in range(first, last + 1):
            loss = (1.0 / step).hex()
            entries.append(Step(0.0, pid, step, step // 4, step % 4, loss, (0.1).hex(), ((step, 7 * step), (0, step))))
            if step == 3:
                entries.append(Validation(0.0, pid, step, (2.5).hex()))
    return entries


def changed(entries: list[Entry], step: int, **values: Any) -> list[Entry]:
    """The record with the last training of `step` changed."""
    index = max(i for i, entry in enumerate(entries) if isinstance(entry, Step) and entry.step == step)
    return [*entries[:index], dataclasses.replace(entries[index], **values), *entries[index + 1 :]]


WHOLE = a_record((1, STEPS))
RESUMED = a_record((1, 4), (3, STEPS))


def test_a_record_that_repeats_steps_exactly_is_identical() -> None:
    """Steps lost by a kill are trained twice, and both times must match."""
    assert record_differences(WHOLE, RESUMED, STEPS) == ()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"loss": math.nextafter(0.25, 1.0).hex()}, "step 4: loss 0x1.0000000000000p-2"),
        ({"lr": (0.2).hex()}, "step 4: learning rate"),
        ({"samples": ((4, 28), (1, 4))}, "step 4: samples"),
        ({"epoch": 3}, "step 4: epoch 1"),
        ({"batch": 3}, "step 4: batch 0"),
    ],
)
def test_the_smallest_change_of_a_step_is_named(values: dict[str, Any], named: str) -> None:
    """One unit in the last place of a loss, or one sample id, is a difference."""
    (difference,) = record_differences(WHOLE, changed(RESUMED, 4, **values), STEPS)
    assert difference.startswith(named)


def test_a_wrong_first_attempt_counts_although_the_second_is_right() -> None:
    """Every process of the killed run must train what the reference run trained."""
    (difference,) = record_differences(
        WHOLE, [changed([entry], 4, loss="0x0p+0")[0] if i == 5 else entry for i, entry in enumerate(RESUMED)], STEPS
    )
    assert difference.startswith("step 4: loss")


def test_missing_and_additional_steps_are_named() -> None:
    """A run that skips or adds steps differs even if all its losses match."""
    assert record_differences(WHOLE, a_record((1, 3), (5, STEPS)), STEPS)[0].startswith("step 4: never trained")
    assert record_differences(WHOLE, a_record((1, STEPS + 1)), STEPS)[0].startswith("step 7: trained here")


def test_missing_additional_and_different_validations_are_named() -> None:
    """Validations are part of the run."""
    without = [entry for entry in RESUMED if not isinstance(entry, Validation)]
    assert record_differences(WHOLE, without, STEPS) == ("step 3: never validated by the resumed run",)
    assert record_differences([e for e in WHOLE if not isinstance(e, Validation)], a_record((1, STEPS)), STEPS) == (
        "step 3: validated here, not in the reference run",
    )
    other = [*without, Validation(0.0, 1, 3, (2.6).hex())]
    assert record_differences(WHOLE, other, STEPS)[0].startswith("step 3: validation loss")


def test_an_incomplete_reference_proves_nothing() -> None:
    """A reference run that was itself interrupted, or that is empty, is no reference."""
    assert record_differences(RESUMED, RESUMED, STEPS)[0].startswith("the reference run")
    assert record_differences([], [], STEPS)[0].startswith("the reference run")


def a_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "weights": {"w": torch.randn(3, 4), "nan": torch.tensor(math.nan), "empty": torch.empty(0, 2)},
        "optimizer": [{"step": 5, "lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False}],
        "random": {"torch": torch.get_rng_state()},
    }


def run_folder(folder: Path, state: dict[str, Any]) -> Path:
    """The output folder of a run of no steps with this final state."""
    folder.mkdir()
    (folder / "record.jsonl").write_text("")
    torch.save(state, folder / "final.pt")
    return folder


def compare_states(tmp_path: Path, found: dict[str, Any]) -> tuple[str, ...]:
    return compare_runs(run_folder(tmp_path / "a", a_state()), run_folder(tmp_path / "b", found), 0).differences


def test_equal_states_are_identical_and_counted(tmp_path: Path) -> None:
    """NaNs with the same bits are equal, and everything that was compared is counted."""
    compared = compare_runs(run_folder(tmp_path / "a", a_state()), run_folder(tmp_path / "b", a_state()), 0)
    assert compared.identical
    assert (compared.tensors, compared.values) == (4, 5)
    assert compared.tensor_bytes == 12 * 4 + 4 + torch.get_rng_state().numel()


def test_one_flipped_bit_of_a_tensor_is_found_and_located(tmp_path: Path) -> None:
    """The lowest bit of one element is enough, and it is named."""
    state = a_state()
    state["weights"]["w"].view(torch.int32)[1, 2] ^= 1
    (difference,) = compare_states(tmp_path, state)
    assert difference.startswith("final/weights/w: 1 of 12 elements differ, the first at 6: ")


def test_zeros_of_different_sign_and_other_nans_are_different_bits(tmp_path: Path) -> None:
    """The comparison is of bits, not of values."""
    state = a_state()
    state["weights"]["nan"].view(torch.int32).add_(1)
    assert "final/weights/nan: 1 of 1 elements differ" in compare_states(tmp_path, state)[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s["optimizer"][0].update(step=6), "final/optimizer/0/step: 5 in the reference run, 6"),
        (lambda s: s["optimizer"][0].update(lr=math.nextafter(0.1, 1)), "final/optimizer/0/lr"),
        (lambda s: s["optimizer"][0].update(step=5.0), "final/optimizer/0/step: int"),
        (lambda s: s["optimizer"][0].update(betas=(0.9,)), "final/optimizer/0/betas: length"),
        (lambda s: s["weights"].pop("nan"), "final/weights: keys"),
        (lambda s: s["weights"].update(w=s["weights"]["w"].double()), "final/weights/w: (torch.float32, (3, 4))"),
        (lambda s: s["weights"].update(w=s["weights"]["w"].T), "final/weights/w: (torch.float32, (3, 4))"),
        (lambda s: s["random"]["torch"].view(-1)[:1].bitwise_xor_(1), "final/random/torch: 1 of"),
    ],
)
def test_every_kind_of_difference_in_the_final_state_is_named(tmp_path: Path, change: Any, named: str) -> None:
    """Values, types, lengths, keys, dtypes, shapes and random streams."""
    state = a_state()
    change(state)
    assert compare_states(tmp_path, state)[0].startswith(named)
