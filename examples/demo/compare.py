"""The comparison: is a killed and resumed run, bit for bit, the run that was never interrupted?"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.record import Entry, Step, Validation, read_record, steps_of


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared and the differences found, the earliest first.

    Args:
        differences: one sentence each; empty: everything is bitwise identical.
        steps: optimizer steps of the resumed run, those included that it trained twice because a kill lost them.
        samples: ids of samples.
        validations: validation losses.
        tensors, tensor_bytes: of the final states.
        values: other values of the final states.
    """

    differences: tuple[str, ...]
    steps: int
    samples: int
    validations: int
    tensors: int
    tensor_bytes: int
    values: int

    @property
    def identical(self) -> bool:
        return not self.differences


def compare_runs(reference: Path, resumed: Path, steps: int) -> Compared:
    """Compare two finished runs by their records and final states.

    Args:
        reference, resumed: their output folders.
        steps: how many optimizer steps both must have done.
    """
    expected, _ = read_record(reference / "record.jsonl")
    found, _ = read_record(resumed / "record.jsonl")
    leaves = _Leaves()
    state = leaves.differences(_load(reference / "final.pt"), _load(resumed / "final.pt"))
    trained = list(steps_of(found))
    return Compared(
        differences=(*record_differences(expected, found, steps), *state),
        steps=len(trained),
        samples=sum(len(step.samples) for step in trained),
        validations=sum(isinstance(entry, Validation) for entry in found),
        tensors=leaves.tensors,
        tensor_bytes=leaves.tensor_bytes,
        values=leaves.values,
    )


def record_differences(expected: list[Entry], found: list[Entry], steps: int) -> tuple[str, ...]:
    """Differences between the record of an uninterrupted run and that of a run that may repeat steps, in its order."""
    differences = []
    truth = {step.step: step for step in steps_of(expected)}
    validations = {entry.step: entry for entry in expected if isinstance(entry, Validation)}
    every = set(range(1, steps + 1))
    if truth.keys() != every or sum(1 for _ in steps_of(expected)) != steps:
        differences.append(f"the reference run did not train each of the steps 1 to {steps} once")
    for entry in found:
        if isinstance(entry, Step):
            differences += _step_differences(truth.get(entry.step), entry)
        elif isinstance(entry, Validation):
            other = validations.get(entry.step)
            if other is None:
                differences.append(f"step {entry.step}: validated here, not in the reference run")
            elif other.loss != entry.loss:
                differences.append(f"step {entry.step}: validation loss {_beside(other.loss, entry.loss)}")
    if missing := every - {step.step for step in steps_of(found)}:
        differences.append(f"step {min(missing)}: never trained by the resumed run ({len(missing)} such steps)")
    if missing := validations.keys() - {entry.step for entry in found if isinstance(entry, Validation)}:
        differences.append(f"step {min(missing)}: never validated by the resumed run")
    return tuple(differences)


def _step_differences(expected: Step | None, found: Step) -> Iterator[str]:
    if expected is None:
        yield f"step {found.step}: trained here, not in the reference run"
        return
    here = found.exact()
    for name, value in expected.exact().items():
        if here[name] != value:
            yield f"step {found.step}: {name} {_beside(value, here[name])}"


class _Leaves:
    """Compares two nested values leaf by leaf and counts."""

    def __init__(self) -> None:
        self.tensors = self.tensor_bytes = self.values = 0

    def differences(self, expected: Any, found: Any, path: str = "final") -> Iterator[str]:
        if type(expected) is not type(found):
            yield f"{path}: {_beside(type(expected).__name__, type(found).__name__)}"
        elif isinstance(expected, Mapping):
            if list(expected) != list(found):
                yield f"{path}: keys {_beside(list(expected), list(found))}"
            for key in (key for key in expected if key in found):
                yield from self.differences(expected[key], found[key], f"{path}/{key}")
        elif isinstance(expected, list | tuple):
            if len(expected) != len(found):
                yield f"{path}: length {_beside(len(expected), len(found))}"
            for i, (left, right) in enumerate(zip(expected, found, strict=False)):
                yield from self.differences(left, right, f"{path}/{i}")
        elif isinstance(expected, torch.Tensor):
            self.tensors += 1
            self.tensor_bytes += expected.nbytes
            yield from _tensor_difference(expected, found, path)
        else:
            self.values += 1
            if _bits(expected) != _bits(found):
                yield f"{path}: {_beside(expected, found)}"


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor, path: str) -> Iterator[str]:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        yield f"{path}: {_beside((expected.dtype, tuple(expected.shape)), (found.dtype, tuple(found.shape)))}"
        return
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, found))
    wrong = (left != right).nonzero() // expected.element_size()
    if len(wrong):
        wrong = torch.unique(wrong)
        first = int(wrong[0])
        values = _beside(expected.reshape(-1)[first].item(), found.reshape(-1)[first].item())
        yield f"{path}: {len(wrong)} of {expected.numel()} elements differ, the first at {first}: {values}"


def _bits(value: Any) -> Any:
    return struct.pack("d", value) if isinstance(value, float) else value


def _beside(expected: object, found: object) -> str:
    def short(value: object) -> str:
        text = value if isinstance(value, str) else repr(value)
        return text if len(text) <= 60 else text[:57] + "..."

    return f"{short(expected)} in the reference run, {short(found)} in the resumed one"


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=True)
