"""The law for arguments, on random values: durable and the same again, or refused by the call."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.errors import ArgumentError, StateError
from ckpt_engine.observe.events import SnapshotFailed, WriterLost
from tests.snapshot.arguments.values import ALL
from tests.support.heard import Heard

WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path_factory.mktemp("random"), writer="thread", keep={"last": 1}) as made:
        yield made


anything = st.sampled_from(sorted(ALL.keys() - {"generator", "huge", "minus huge"})).map(lambda name: ALL[name])
texts = st.text(st.characters(), max_size=8)  # lone surrogates too
leaves = st.one_of(anything, texts, st.integers(), st.floats(), st.binary(max_size=100), st.booleans(), st.none())
keys = st.one_of(texts, st.integers(), st.floats(), st.tuples(texts, st.integers()), st.just("$"), st.none())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(texts, children, max_size=4).map(collections.OrderedDict),
        st.dictionaries(texts, children, max_size=4).map(collections.UserDict),
        children.map(lambda one: collections.defaultdict(list, a=one)),
    )


trees = st.recursive(leaves, containers, max_leaves=12)
whole = st.one_of(leaves, st.integers(0, 2**53))
tables = st.one_of(st.none(), leaves, st.dictionaries(st.one_of(texts, st.integers()), trees, max_size=3))


draws = given(state=trees, step=whole, epoch=st.one_of(st.none(), whole), metrics=tables, notes=tables, reason=leaves)


@settings(max_examples=12)
@draws
def test_nothing_fails_after_the_call(ckpt: Checkpointer, **drawn: Any) -> None:
    """A few random values are durable and the same again, or refused by the call."""
    check(ckpt, **drawn)


@pytest.mark.slow
@settings(max_examples=1000)
@draws
def test_nothing_fails_after_the_call_of_a_thousand(ckpt: Checkpointer, **drawn: Any) -> None:
    """Many random values are durable and the same again, or refused by the call."""
    check(ckpt, **drawn)


def check(ckpt: Checkpointer, state: Any, step: Any, epoch: Any, metrics: Any, notes: Any, reason: Any) -> None:
    """Most draws are refused for one argument: the others then take its turn alone."""
    heard = ckpt.engine.events = Heard()
    for given_arguments in (
        {"step": step, "epoch": epoch, "metrics": metrics, "notes": notes, "reason": reason},
        {"step": 1, "metrics": metrics},
        {"step": 1, "notes": notes},
        {"step": step},
        {"step": 1},
    ):
        try:
            handle = ckpt.save(state, **given_arguments)
        except (ArgumentError, StateError) as err:
            err.message.encode()
            continue
        handle.wait(WAIT_SECONDS)
        assert _shown(ckpt.load()) == _shown(state)
    assert [event for event in heard.events if isinstance(event, SnapshotFailed | WriterLost)] == []
    ckpt.save({"good": 1}, step=1).wait(WAIT_SECONDS)


def _shown(value: Any) -> str:
    return repr(value).partition(" at 0x")[0]
