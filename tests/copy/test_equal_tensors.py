"""Equal bytes are stored once: within one state, when they come back, and under other names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy import encode_pieces, write_plan
from ckpt_engine.copy.make_room import prune
from ckpt_engine.copy.write_snapshot import cut
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.test_writing import Life
from tests.support.bounds import bounds

PIECE = 4000
"""Bytes."""
HEADERS = 3 * 4096
"""Of the files that a snapshot writes, at most."""
KINDS = ["raw", "byteplane-zstd", "delta"]
Content = tuple[int, ...]
"""A tensor: what each of its pieces has, as a number."""


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """However small it is, it is shared, and files stay as long as anything needs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("PLAIN", least_bytes=0, least_share=0.0))
        patch.setattr(encode_pieces, "LEAST_ROWS", 2)
        patch.setattr(write_plan, "HEADER_BYTES", 1 << 30)
        patch.setattr(write_plan, "MOST_SPACE", 99)
        patch.setattr(cut, "__defaults__", (PIECE, PIECE))
        yield


def piece(number: int) -> torch.Tensor:
    """Random bits: they are no smaller in any codec."""
    return torch.randint(256, (PIECE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def tensor(content: Content) -> torch.Tensor:
    """With memory of its own."""
    return torch.cat([piece(number) for number in content])


def state(contents: dict[str, Content], step: int) -> dict[str, Any]:
    return {"t": {name: tensor(content) for name, content in sorted(contents.items())}, "step": step}


def distinct(contents: dict[str, Content]) -> set[int]:
    return {number for content in contents.values() for number in content}


_STATES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple), min_size=1
)


@pytest.mark.parametrize("codec", KINDS)
@given(states=st.lists(_STATES, min_size=2, max_size=6))
@settings(max_examples=12, deadline=None)
def test_what_is_written_is_what_neither_of_two_snapshots_has(
    tmp_path_factory: pytest.TempPathFactory, codec: str, states: list[dict[str, Content]]
) -> None:
    """A law: each content is written once, whatever it is called, and each snapshot reads back bit for bit."""
    life = Life(tmp_path_factory.mktemp("law") / "run")
    tier = {"url": str(life.root), "codec": codec, "keep": {"last": 3}}
    with Checkpointer(tiers=[tier], writer="thread") as ckpt:
        for step, contents in enumerate(states):
            ckpt.save(state(contents, step), step=step).wait(60)
    saved = {step: state(contents, step) for step, contents in enumerate(states)}
    for manifest in life.manifests():
        step = manifest.info.step
        there = set[int]().union(*(distinct(states[one]) for one in range(max(0, step - 2), step)))
        new = PIECE * len(distinct(states[step]) - there)
        assert life.written(manifest) <= new + HEADERS
    life.check(saved)
    with acquire(LocalStorage(life.root)) as lease:
        prune(life.repository, lease, KeepLast(1))
    life.check(saved)
