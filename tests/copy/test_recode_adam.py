"""One step of Adam later only the first moment travels, through real tiers; found in the tree, wherever it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.adam_groups import AdamGroup, find
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import collect
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.errors import CorruptError
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.load import load
from ckpt_engine.restore.read import read_entries
from ckpt_engine.store import names
from ckpt_engine.store.decode import Decoder, GroupDecoder, needed_for
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest import Manifest, Piece
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import codecs_of
from tests.copy.test_recode import flip
from tests.copy.training import Training
from tests.crash.life import QuietDisk
from tests.snapshot.passage import same
from tests.support.copies import copy_encoded


class Near:
    """A place with the snapshots of a training, and what they were."""

    def __init__(self, root: Path, training: Training, steps: Sequence[int]) -> None:
        self.states: dict[int, Any] = {}
        now = 0
        with Checkpointer(str(root), keep={"last": 99}, writer="thread") as ckpt:
            for step in steps:
                training.step(step - now)
                now, state = step, training.state()
                self.states[step] = _copy(state)
                ckpt.save(state, step=step).wait(60)
        self.repository = Repository(LocalStorage(root))


class Far:
    """A place that gets some of them, as differences."""

    def __init__(self, near: Near, root: Path, *steps: int) -> None:
        self.near = near
        self.repository = adopt_run(RunText.of(near.repository), LocalStorage(root, disk=QuietDisk()))
        for step in steps:
            copy_encoded(near.repository, self.repository, self._id(step), lambda _: "delta", EncodeStats())

    def _id(self, step: int) -> str:
        return next(parsed.id for parsed in self.near.repository.ids() if parsed.step == step)

    def manifest(self, step: int) -> Manifest:
        return self.repository.read(self._id(step))

    def require_all(self) -> None:
        for info in self.repository.list():
            found = load([self.repository], step=info.step)
            assert found is not None and found.info.step == info.step
            assert same(found.state, self.near.states[info.step])


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Near:
    """Seven steps of AdamW, and one that is four steps later."""
    return Near(tmp_path_factory.mktemp("near"), Training(), [*range(1, 8), 11, 12])


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, _copy(one)) for key, one in value.items())
    return type(value)(map(_copy, value)) if isinstance(value, list | tuple) else value


def require_a_third(far: Far) -> None:
    nbytes = far.repository.list()[0].nbytes
    predicted = [step for step in range(1, 8) if "adam" in codecs_of(far.manifest(step))]
    assert predicted == [2, 3, 5, 6]
    for step in predicted:
        manifest = far.manifest(step)
        pieces = [piece for entry in manifest.entries.values() for piece in entry.pieces]
        assert 3 * sum(piece.nbytes for piece in pieces) <= nbytes, "weights, moments and all"
        assert all(piece.codec == "adam" for piece in pieces if piece.raw_nbytes > 4096)
    far.require_all()


def test_a_state_one_step_later_takes_a_third(near: Near, tmp_path: Path) -> None:
    """Of a really trained float32 state, end to end; chains are bounded; every one comes back bit for bit."""
    require_a_third(Far(near, tmp_path, *range(1, 8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"fused": True, "betas": (0.9, 0.95)}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": True, "eps": 1e-6}),
    ],
)
def test_every_implementation_of_torch_takes_a_third(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    """Every implementation of the optimizer in torch, with other numbers, is stored in a third of the bytes."""
    near = Near(tmp_path / "near", Training(optimizer, **options), range(1, 8))
    require_a_third(Far(near, tmp_path / "far", *range(1, 8)))


def test_several_steps_later_it_is_a_plain_difference(near: Near, tmp_path: Path) -> None:
    """The prediction holds for one step; it is noticed, and nothing else happens."""
    far = Far(near, tmp_path, 7, 11, 12)
    assert "adam" not in codecs_of(far.manifest(11))
    assert "delta-byteplane-zstd" in codecs_of(far.manifest(11))
    far.require_all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}], ids=str)
def test_what_is_not_plain_adam_is_not_predicted(options: dict[str, Any], tmp_path: Path) -> None:
    """Other formulas are left to plain differences."""
    far = Far(Near(tmp_path / "near", Training(**options), [1, 2]), tmp_path / "far", 1, 2)
    assert "adam" not in codecs_of(far.manifest(2))
    far.require_all()


def test_one_of_a_group_is_read_by_itself(near: Near, tmp_path: Path) -> None:
    """Weights alone, in any order, and by many threads at once."""
    far = Far(near, tmp_path, 1, 2, 3)
    manifest, storage = far.manifest(3), far.repository.storage
    assert "adam" in codecs_of(manifest)
    weights = near.states[3]["model"]
    names = [f"model/{key}" for key in weights]
    assert set(names) <= set(manifest.entries)
    for some in (names, names[::-1], names[2:3]):
        found = read_entries(Sources([storage]), manifest, some)
        assert all(torch.equal(found[name], weights[name.removeprefix("model/")]) for name in some)

    def ask(name: str) -> None:
        for piece in manifest.entries[name].pieces:
            decoder.read(name, 0, piece, memoryview(bytearray(piece.raw_nbytes)))

    fetched: list[str] = []

    def fetch(name: str, piece: Piece, out: memoryview) -> None:
        fetched.append(name)
        storage.get_into(manifest.files[piece.file].name, piece.offset, out)

    decoder = Decoder(manifest, fetch)
    group = next(entry.pieces[0].group for entry in manifest.entries.values() if entry.pieces[0].group)
    levels = 1 + len(manifest.bases)
    for name in group:
        piece = manifest.entries[name].pieces[0]
        decoder.read(name, 0, piece, memoryview(bytearray(piece.raw_nbytes)))
        assert len(needed_for(manifest, name, 0, piece)) == 3 * levels
    assert sorted(fetched) == sorted(group * levels), "the others came out with the first"
    decoder = Sources([storage]).decoder(manifest)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(ask, name) for name in [*manifest.entries] * 4]:
            done.result(60)


def test_a_group_is_decoded_once_however_little_is_in_memory(
    near: Near, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces come out together and are put together one behind another: no group is decoded for each of them."""
    applied: list[tuple[object, ...]] = []
    real = GroupDecoder._apply

    def counted(self: GroupDecoder, level: str | None, start: int, piece: Piece, outs: Any, bases: Any) -> None:
        applied.append((level, piece.group, start))
        real(self, level, start, piece, outs, bases)

    far = Far(near, tmp_path, 1, 2, 3)
    monkeypatch.setattr(GroupDecoder, "_apply", counted)
    monkeypatch.setattr("ckpt_engine.restore.read.BATCH_BYTES", 1)
    found = load([far.repository], step=3)
    assert found is not None and same(found.state, near.states[3])
    assert len(applied) == len(set(applied)) == 4, "two groups, two steps"


def test_damage_in_a_group_is_noticed_and_an_older_snapshot_is_taken(near: Near, tmp_path: Path) -> None:
    """What others of the group or of the chain need is damaged: the newest that needs none of it is restored."""
    far = Far(near, tmp_path, 1, 2, 3, 4, 5)
    manifest = far.manifest(5)
    base = next(p for e in manifest.bases.values() for pieces in e.values() for p in pieces.values() if p.nbytes > 9999)
    assert names.data_owner(manifest.files[base.file].name).step == 4  # type: ignore[union-attr]
    flip(tmp_path / manifest.files[base.file].name, base.offset + base.nbytes - 9)
    found = load([far.repository])
    assert found is not None
    assert found.info.step == 3
    assert same(found.state, near.states[3])


def test_snapshots_of_a_group_outlive_what_they_were_made_against(near: Near, tmp_path: Path) -> None:
    """Retention takes the older ones, and what is needed stays."""
    far = Far(near, tmp_path, 1, 2, 3)
    with acquire(far.repository.storage) as lease:
        far.repository.forget([parsed.id for parsed in far.repository.ids()[:-1]])
        collect(far.repository, lease)
    far.require_all()
    assert len(far.repository.ids()) == 1


def test_a_member_that_is_missing_is_damage(near: Near, tmp_path: Path) -> None:
    """A manifest that lacks one of a group is refused by name."""
    far = Far(near, tmp_path, 1, 2)
    manifest = far.manifest(2)
    name = next(name for name, entry in manifest.entries.items() if entry.pieces and entry.pieces[0].group)
    piece = manifest.entries[name].pieces[0]
    other = next(one for one in piece.group if one != name)
    broken = replace(manifest, entries={key: entry for key, entry in manifest.entries.items() if key != other})
    decoder = Sources([far.repository.storage]).decoder(broken)
    with pytest.raises(CorruptError, match="together"):
        decoder.read(name, 0, piece, memoryview(bytearray(piece.raw_nbytes)))


def groups_in(root: Path, *states: dict[str, Any]) -> list[AdamGroup]:
    """As the snapshot of the last of two states has them, where everything has changed."""
    with Checkpointer(str(root), keep={"last": 99}, writer="thread") as ckpt:
        for step, state in enumerate(states):
            ckpt.save(state, step=step).wait(60)
    place = Repository(LocalStorage(root))
    older, newer = (place.read(parsed.id) for parsed in (place.ids()[0], place.ids()[-1]))
    shapes = {name: (entry.dtype, entry.shape) for name, entry in newer.entries.items()}
    return list(find(newer.tree, older.tree, shapes, set(shapes)))


def trained(network: torch.nn.Module, parameters: Any = None, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters or network.parameters(), lr=1e-3, **options)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_weights_are_found_in_the_order_of_the_optimizer(tmp_path: Path) -> None:
    """Groups with and without decay, buffers, an averaged copy, two models of the same shapes."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 1e-5}]
    optimizer = trained(network, groups)
    other = torch.nn.Linear(4, 3)
    average = OrderedDict((key, value + 1) for key, value in network.state_dict().items())
    state = {
        "model": network.state_dict(),
        "nested": [{"of": trained(other).state_dict(), "for": other.state_dict()}],
        "ema": average,
        "optimizer": optimizer.state_dict(),
    }
    found = {group.weights: group for group in groups_in(tmp_path, state)}
    assert set(found) == {
        "model/0.weight",
        "model/2.weight",
        "nested/0/for/weight",
        "nested/0/for/bias",
    }, "of biases, norms and their statistics nothing tells which is which"
    assert found["model/2.weight"].first == "optimizer/state/1/exp_avg"
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    assert numbers in found["model/2.weight"].numbers  # before torch 2.8 nothing says whether the decay is AdamW's
    assert found["nested/0/for/weight"].second == "nested/0/of/state/0/exp_avg_sq"


def test_the_learning_rate_before_is_a_guess_as_well(tmp_path: Path) -> None:
    """Schedulers change the learning rate between steps: the codec tries the one before and the one after."""
    network = torch.nn.Linear(4, 4)
    optimizer = trained(network)
    older = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    optimizer.param_groups[0]["lr"] = 5e-4
    newer = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    [first, _] = groups_in(tmp_path, older, newer)
    assert list(dict.fromkeys(one["lr"] for one in first.numbers)) == [1e-3, 5e-4]
    assert first.step == "optimizer/state/0/step"


@pytest.mark.parametrize(
    "optimizer",
    [{}, {"state": 3, "param_groups": "none"}, {"state": {}, "param_groups": [{"lr": 1.0}]}, {"param_groups": []}],
    ids=str,
)
def test_other_trees_have_no_groups(optimizer: Any, tmp_path: Path) -> None:
    """A tree that only looks like an optimizer has no groups."""
    assert groups_in(tmp_path, {"model": {"w": torch.ones(3)}, "optimizer": optimizer}) == []
