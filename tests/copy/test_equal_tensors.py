"""Equal bytes are stored once: within one state, when they come back, and under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpt_engine import Checkpointer
from ckpt_engine.copy import encode_pieces, write_plan
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import prune
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.copy.write_snapshot import Staged, cut
from ckpt_engine.restore.load import load
from ckpt_engine.store import manifest_codec
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import ALIAS_VERSION
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from tests.cli.conftest import Outcome
from tests.copy.test_writing import Life
from tests.copy.training import Training
from tests.ranks.runs import on_all, open_ranks
from tests.snapshot.passage import same
from tests.support.bounds import bounds
from tests.support.copies import copy_encoded

PIECE = 4000
"""Bytes."""
HEADERS = 3 * 4096
"""Of the files that a snapshot writes, at most."""
KINDS = ["raw", "byteplane-zstd", "delta"]
Content = tuple[int, ...]
"""A tensor: what each of its pieces has, as a number."""


@pytest.fixture
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


@pytest.mark.cells(1)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("codec", KINDS)
@given(states=st.lists(_STATES, min_size=2, max_size=6))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_what_neither_of_two_snapshots_has(
    tmp_path_factory: pytest.TempPathFactory, codec: str, states: list[dict[str, Content]]
) -> None:
    """A law: each content is written once, whatever it is called, and each snapshot reads back bit for bit."""
    life = Life(tmp_path_factory.mktemp("law") / "run")
    with Checkpointer(tiers=[{"url": str(life.root), "codec": codec, "keep": {"last": 3}}], writer="thread") as ckpt:
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


BIG = 3 << 20
"""Bytes of a tensor that is worth another file."""


def big(seed: int) -> torch.Tensor:
    return torch.randint(256, (BIG,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_equal_tensors_of_a_first_snapshot_are_stored_once(tmp_path: Path) -> None:
    """A student beside its teacher: one of them is written, both come back, and neither changes with the other."""
    life = Life(tmp_path / "run", writer="thread")
    states = {1: {"student": big(1), "other": big(2), "teacher": big(1), "step": 1}}
    life.save(states[1])
    (only,) = life.manifests()
    assert life.written(only) <= 2 * BIG + HEADERS
    assert manifest_codec.version_of(only) == ALIAS_VERSION
    life.check(states)
    found = load([life.repository])
    assert found is not None
    found.state["student"].zero_()
    assert torch.equal(found.state["teacher"], big(1))
    live = {name: torch.zeros(BIG, dtype=torch.uint8) for name in ("student", "other", "teacher")}
    into = load([life.repository], into={**live, "step": 0})
    assert into is not None and same(into.state, states[1])


def test_different_tensors_of_a_first_snapshot_are_written_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is not digested before it is written where nothing in it seems to be there twice."""
    monkeypatch.setattr(Staged, "timed_digest", lambda _: pytest.fail("digested before"))
    life = Life(tmp_path / "run", writer="thread")
    states = {1: {"a": big(1), "b": big(2), "zeros": torch.zeros(100), "more": torch.zeros(100), "step": 1}}
    life.save(states[1])
    (only,) = life.manifests()
    assert manifest_codec.version_of(only) == 1
    life.check(states)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("codec", KINDS)
def test_content_that_comes_back_or_moves_costs_nothing(tmp_path: Path, codec: str) -> None:
    """Back to the weights before the last ones, two names that are swapped, and a queue that was shifted by pieces."""
    rounds: list[dict[str, Content]] = [
        {"model": (1,) * 3, "ema": (2,), "queue": (11, 12, 13, 14)},
        {"model": (3,), "ema": (2,), "queue": (12, 13, 14, 15)},
        {"model": (1,) * 3, "ema": (2,), "queue": (13, 14, 15, 11)},
        {"model": (2,), "ema": (1,) * 3, "queue": (15, 13)},
    ]
    life = Life(tmp_path / "run")
    with Checkpointer(tiers=[{"url": str(life.root), "codec": codec, "keep": {"last": 9}}], writer="thread") as ckpt:
        for step, contents in enumerate(rounds):
            ckpt.save(state(contents, step), step=step).wait(60)
    new = [6, 2, 0, 0]
    assert [life.written(one) // PIECE for one in life.manifests()] == [one + bool(one) for one in new]
    life.check({step: state(contents, step) for step, contents in enumerate(rounds)})


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_what_retention_has_removed_is_written_again(tmp_path: Path, codec: str) -> None:
    """Nothing refers to a file that no snapshot keeps; what the newest snapshot keeps is still referred to."""
    life = Life(tmp_path / "run")
    trained: list[Content] = [(1, 2), (3, 4), (1, 2), (5, 6)]
    rounds: list[dict[str, Content]] = [{"frozen": tuple(range(20, 26)), "a": content} for content in trained]
    with Checkpointer(tiers=[{"url": str(life.root), "codec": codec, "keep": {"last": 1}}], writer="thread") as ckpt:
        for step, contents in enumerate(rounds):
            ckpt.save(state(contents, step), step=step).wait(60)
            (*_, newest) = life.repository.ids()  # what is older is being removed
            assert step == 0 or life.written(life.repository.read(newest.id)) <= 3 * PIECE + HEADERS
    life.check({step: state(contents, step) for step, contents in enumerate(rounds)})


def test_differences_groups_and_equal_weights_go_together(tmp_path: Path) -> None:
    """A training with Adam beside a copy of its weights, twice back to where it was: each snapshot is what it was."""
    training, states = Training(), list[dict[str, Any]]()
    for _ in range(3):
        copy = {name: tensor.clone() for name, tensor in training.network.state_dict().items()}
        states.append(clone({**training.state(), "ema": copy, "teacher": copy | {"more": torch.ones(9)}}))
        training.step()
    order = [0, 1, 0, 1, 2, 1, 2, 2]
    with Checkpointer(tmp_path / "near", keep={"last": 99}, writer="thread") as ckpt:
        for step, number in enumerate(order):
            ckpt.save(states[number], step=step).wait(60)
    near = Repository(LocalStorage(tmp_path / "near"))
    far = adopt_run(RunText.of(near), LocalStorage(tmp_path / "far"))
    sent = []
    for parsed in near.ids():
        copied = copy_encoded(near, far, parsed.id, lambda _: "delta", EncodeStats())
        sent.append(copied.sent_bytes)
        for place in (near, far):
            found = load([place], step=parsed.step)
            assert found is not None and same(found.state, states[order[parsed.step]])
    assert max(sent[2], sent[3], sent[5], sent[6], sent[7]) < sent[1] / 4, sent
    for info in far.list():
        assert Checker(far, lambda _: None).check(info.id).ok


def clone(value: Any) -> Any:
    """With memory of its own."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, value)


@pytest.mark.usefixtures("small_pieces")
def test_the_commands_read_such_a_run(tmp_path: Path, ckpt: Callable[..., Outcome]) -> None:
    """Verified, copied, forked, exported, pruned and made compact: what comes out is what was saved."""
    life = Life(tmp_path / "run")
    rounds: list[dict[str, Content]] = [{"a": (1, 2), "b": (1, 2)}, {"a": (3,), "c": (2, 1)}, {"d": (1, 2), "e": (1,)}]
    states = {step: state(contents, step) for step, contents in enumerate(rounds)}
    life.save(*states.values())
    for verb in ("verify", "ls", "show"):
        assert ckpt(verb, life.root).code == 0
    for number, (verb, *more) in enumerate((("cp",), ("fork",))):
        other = Life(tmp_path / str(number))
        done = ckpt(verb, life.root, other.root, *more)
        assert done.code == 0, done.err
        other.check(states)
    assert ckpt("export", life.root, tmp_path / "x.safetensors", "--only", "t").code == 0
    assert same(load_file(tmp_path / "x.safetensors"), states[2]["t"])
    done = ckpt("prune", life.root, "--keep", "last=1")
    assert done.code == 0, done.err
    life.check(states)
    done = ckpt("compact", life.root)
    assert done.code == 0, done.err
    life.check(states)
    assert all(manifest_codec.version_of(manifest) == 1 for manifest in life.manifests())


def test_a_rank_stores_the_equal_bytes_of_its_share_once(tmp_path: Path) -> None:
    """Two ranks, each with equal tensors of its own: in the first snapshot, in later ones, and under new names."""

    def state_of(rank: int, names: str) -> dict[str, Any]:
        return {"own": {name: big(rank) for name in names}, "step": len(names)}

    ranks, sizes, place = open_ranks(tmp_path / "run", 2), [], Repository(LocalStorage(tmp_path / "run"))
    for step, names in enumerate(("ab", "abc", "cde")):
        handles = on_all(lambda rank, step=step, names=names: ranks[rank].save(state_of(rank, names), step=step), 2)
        for handle in handles:
            handle.wait(60)
        (*_, newest) = Life(tmp_path / "run").manifests()
        sizes.append(Life(tmp_path / "run").written(newest))
        assert Checker(place, lambda _: None).check(newest.info.id).ok
    on_all(lambda rank: ranks[rank].close(), 2)
    assert sizes[0] <= 2 * (BIG + 4096) and sizes[1:] == [0, 0], sizes
    again = open_ranks(tmp_path / "run", 2)
    found = on_all(lambda rank: again[rank].load(), 2)
    assert all(same(found[rank]["own"], state_of(rank, "cde")["own"]) for rank in range(2))
    on_all(lambda rank: again[rank].close(), 2)


def test_empty_tensors_that_have_other_names_now_are_no_damage(tmp_path: Path) -> None:
    """Nothing is written then, and the header of the older file has the names of the older snapshot."""
    weight, empty = torch.randn(1 << 19), torch.empty(0, 3)
    with Checkpointer(tmp_path, writer="thread", keep={"last": 2}) as ckpt:
        for step, state in enumerate(({"a": weight, "b": empty}, {"b": weight, "a": empty}, {"b": weight, "c": empty})):
            assert ckpt.save(state, step=step).wait(60)
    place = Repository(LocalStorage(tmp_path))
    assert [Checker(place, lambda _: None).check(one.id).problems for one in place.ids()] == [(), ()]
