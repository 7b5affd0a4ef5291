"""Bases and deltas together are what was saved, whatever trees and dtypes; damage leads to what is whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy import encode_pieces
from ckpt_engine.copy.write_snapshot import cut
from ckpt_engine.errors import NoUsableSnapshotError
from ckpt_engine.restore.load import load
from ckpt_engine.tools.check_run import Checker
from tests.copy.test_reading import flip_bit
from tests.copy.test_writing import Life
from tests.snapshot.passage import same
from tests.support.bounds import bounds

DTYPES = ["float32", "bfloat16", "float16", "float64", "complex64", "int64", "int8", "uint8", "bool", "float8_e4m3fn"]


@dataclass(frozen=True)
class Form:
    """One tensor: its dtype, its shape, and the share of its rows that a step touches."""

    dtype: str
    shape: tuple[int, ...]
    share: float

    def first(self, random: torch.Generator) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        raw = torch.randint(256, (math.prod(self.shape) * dtype.itemsize,), dtype=torch.uint8, generator=random)
        return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(self.shape)

    def touched(self, tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """The tensor with some rows, at least one, as new random bits."""
        if not tensor.numel():
            return tensor
        new, fresh = tensor.clone(), self.first(random)
        rows = torch.randperm(len(tensor), generator=random)[: max(1, int(self.share * len(tensor)))]
        for row in rows.tolist():
            new[row] = fresh[row]
        return new


_FORMS = st.builds(
    Form,
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 300), st.integers(1, 9)) | st.tuples(st.integers(1, 80), st.integers(1, 5), st.just(3)),
    st.sampled_from([0.0, 0.01, 0.1, 0.6]),
)
_TABLES = st.builds(
    Form, st.sampled_from(DTYPES), st.tuples(st.integers(300, 900), st.integers(8, 24)), st.floats(0.0, 0.03)
)
_TREES = st.builds(
    lambda table, others: {"table": table, **others},
    _TABLES,
    st.dictionaries(st.text("abc", min_size=1, max_size=2), _FORMS, max_size=3),
)


@pytest.fixture(autouse=True, scope="module")
def everything_is_shared() -> Iterator[None]:
    """However small it is, in small pieces, with short chains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("PLAIN", least_bytes=0))
        patch.setattr(encode_pieces, "LEAST_ROWS", 2)
        patch.setattr(*bounds("PLAIN", most_bases=5))
        patch.setattr(cut, "__defaults__", (4000,))
        yield


def lived(root: Path, forms: dict[str, Form], seed: int, length: int, still: set[int]) -> tuple[Life, dict[int, Any]]:
    """A run of `length` snapshots; in steps of `still` nothing is touched."""
    random = torch.Generator().manual_seed(seed)
    life = Life(root, keep={"last": 99}, writer="thread")
    tensors = {name: form.first(random) for name, form in forms.items()}
    states = {}
    with Checkpointer(root, **life.options) as ckpt:
        for step in range(length):
            if step not in still:
                tensors = {name: forms[name].touched(tensor, random) for name, tensor in tensors.items()}
            states[step] = {"t": tensors, "step": step}
            ckpt.save(states[step], step=step).wait(60)
    return life, states


@given(
    forms=_TREES, seed=st.integers(0, 10**6), length=st.integers(2, 14), still=st.sets(st.integers(0, 13), max_size=3)
)
@settings(max_examples=4, deadline=None)
def test_a_base_and_deltas_are_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, Form], seed: int, length: int, still: set[int]
) -> None:
    """A law: each snapshot bit for bit, fresh and into live tensors, as long as its chains may be."""
    life, states = lived(tmp_path_factory.mktemp("law") / "run", forms, seed, length, still)
    for step, state in states.items():
        found = load([life.repository], step=step)
        assert found is not None and same(found.state, state)
    live = {"t": {name: torch.zeros_like(tensor) for name, tensor in state["t"].items()}, "step": 0}
    into = load([life.repository], into=live)
    assert into is not None and same(into.state, state)


@given(forms=_TREES, seed=st.integers(0, 10**6), where=st.tuples(st.integers(0, 99), st.integers(0, 10**6)) | st.none())
@settings(max_examples=3, deadline=None)
def test_whatever_is_damaged_the_newest_snapshot_that_is_whole_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, Form], seed: int, where: tuple[int, int] | None
) -> None:
    """A law: a bit that is flipped, or a file that is lost, in any data file of a chain: what is loaded is right."""
    life, states = lived(tmp_path_factory.mktemp("law") / "run", forms, seed, 7, set())
    files = sorted((life.root / "data").iterdir())
    file = files[(where[0] if where else seed) % len(files)]
    if where is None:
        file.unlink()
    else:
        flip_bit(file, where[1] % file.stat().st_size)
    checker = Checker(life.repository, lambda _: None)
    whole = [info.step for info in life.repository.list() if checker.check(info.id).ok]
    try:
        found = load([life.repository])
    except NoUsableSnapshotError:
        assert not whole
    else:
        # Damage outside of what a snapshot needs, such as a header, is none to those that load it.
        assert found is not None and found.info.step >= max(whole, default=0)
        assert same(found.state, states[found.info.step])
