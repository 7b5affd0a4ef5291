"""Copies that are stored as differences: bit for bit the same, within bounds, whatever retention takes meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.make_room import collect
from ckpt_engine.copy.transfer import Copied, RunText, adopt_run, copy_snapshot
from ckpt_engine.copy.write_plan import plan
from ckpt_engine.restore.load import load
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import Evolving, codecs_of, contents
from tests.copy.test_recode import flip
from tests.crash.life import QuietDisk
from tests.store.test_transfer import Remote
from tests.support.bounds import bounds
from tests.support.copies import copy_encoded


def far_of(life: Evolving, root: Path) -> Repository:
    return adopt_run(RunText.of(life.repository), LocalStorage(root, disk=QuietDisk()))


def differences(life: Evolving, far: Repository, snapshot: str) -> Copied:
    return copy_encoded(life.repository, far, snapshot, lambda _: "delta", EncodeStats())


def forget(place: Repository, *snapshots: str) -> None:
    with acquire(place.storage) as lease:
        place.forget(snapshots)
        collect(place, lease)


@settings(max_examples=settings.default.max_examples // 25)
@given(seed=st.integers(0, 10**6))
def test_a_base_and_any_number_of_differences_are_the_state(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any dtypes and lengths, with snapshots of both places forgotten in between, and older ones copied later."""
    root, chance = tmp_path_factory.mktemp("law"), random.Random(seed)
    life = Evolving(root / "near", seed)
    far = far_of(life, root / "far")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*bounds("ENCODED", part_bytes=chance.choice([1, 20_000, 1 << 27])))
        for _ in range(9):
            life.change()
            snapshot = life.save()
            if chance.random() < 0.8:
                manifest = life.repository.read(snapshot)
                text = life.repository.storage.get(names.manifest_name(snapshot))
                most = plan(manifest, far, differences=True).most_bytes(text)
                sent = differences(life, far, snapshot).sent_bytes
                [written] = far.storage.list(names.manifest_name(snapshot))
                assert sent + written.nbytes <= most, "room is made for more than is written"
            for place in (far, life.repository):
                ids = [parsed.id for parsed in place.ids()]
                if chance.random() < 0.4 and len(ids) > 1:
                    forget(place, *chance.sample(ids[:-1], chance.randrange(1, len(ids))))
            life.check(far)
    needed = {file.name for info in far.list() for file in far.read(info.id).files}
    with acquire(far.storage) as lease:
        collect(far, lease)
    assert {item.name for item in far.storage.list(names.DATA)} == needed


def tables(root: Path, seed: int = 3) -> Evolving:
    """A table of which few rows change, one that changes a little everywhere, and one that never does."""
    life = Evolving(root, seed)
    life.arrays = {name: life._array() for name in ("few", "little", "still")}
    for array in life.arrays.values():
        array.dtype, array.shape, array.piece_nbytes = "float32", (700, 32), 32 * 4 * 200
        array.data = (life.rng.standard_normal(700 * 32) * 0.02).astype("<f4").view("u1")
    return life


def step(life: Evolving) -> str:
    for row in (3, *life.rng.integers(0, 700, size=5)):
        life.arrays["few"].data[row * 128 : row * 128 + 128] = life.rng.integers(0, 256, size=128)
    numbers = life.arrays["little"].data.view("<u4")
    numbers += life.rng.integers(0, 4, size=numbers.size).astype("<u4")
    return life.save()


def test_what_is_stored_follows_what_has_changed(tmp_path: Path) -> None:
    """Changed rows, differences of numbers and references are stored as such; chains end, and new ones begin."""
    life = tables(tmp_path / "near")
    far = far_of(life, tmp_path / "far")
    sent, kinds = [], []
    for _ in range(12):
        snapshot = step(life)
        sent.append(differences(life, far, snapshot).sent_bytes)
        manifest = far.read(snapshot)
        kinds.append([manifest.entries[name].pieces[0].codec for name in ("few", "little", "still")])
    assert kinds[0] == ["byteplane-zstd"] * 3
    assert kinds[1] == ["rows", "delta-byteplane-zstd", "byteplane-zstd"]
    assert {kind for _, kind, _ in kinds[1:]} == {"byteplane-zstd", "delta-byteplane-zstd"}, "a new chain began"
    assert sent[1] < 0.3 * sent[0]
    assert sum(sent[1:]) < 0.45 * len(sent[1:]) * sent[0]
    assert life.check(far) == 12


def test_a_base_that_the_nearest_tier_lacks_is_read_from_a_disk_only(tmp_path: Path) -> None:
    """The nearest tier has forgotten the base: it is read from the further tier if that is a disk, else not."""
    for make, expected in ((LocalStorage, {"rows", "delta-byteplane-zstd"}), (Remote, set())):
        root = tmp_path / make.__name__
        life = tables(root / "near")
        far = Repository(make(root / "far"))
        adopt_run(RunText.of(life.repository), far.storage)
        first = step(life)
        differences(life, far, first)
        second = step(life)
        forget(life.repository, first)
        differences(life, far, second)
        assert codecs_of(far.read(second)) - {"raw", "byteplane-zstd"} == expected
        assert life.check(far) == 2


def test_bases_come_from_the_nearest_tier_while_it_has_them(tmp_path: Path) -> None:
    """No base is read from a further tier as long as the nearest one has it; one piece of each snapshot is verified."""
    reads: list[str] = []
    life = tables(tmp_path / "near")
    far = Repository(Remote(tmp_path / "far", lambda what, name: reads.append(name) if what == "get" else None))
    adopt_run(RunText.of(life.repository), far.storage)
    for _ in range(6):
        differences(life, far, step(life))
    assert len([name for name in reads if name.startswith(names.DATA)]) == 5, "each but the first refers to older data"
    assert "rows" in codecs_of(far.read(far.ids()[-1].id))
    assert life.check(far) == 6


def test_a_missing_base_is_not_built_on(tmp_path: Path) -> None:
    """A file that is gone or cut short makes the next copy a whole one; what needed it is passed over."""
    life = tables(tmp_path / "near")
    far = far_of(life, tmp_path / "far")
    one, two = step(life), step(life)
    differences(life, far, one)
    differences(life, far, two)
    for file in far.read(one).files:
        (tmp_path / "far" / file.name).unlink()
    three = step(life)
    differences(life, far, three)
    manifest = far.read(three)
    assert {names.data_owner(file.name).id for file in manifest.files} <= {two, three}  # type: ignore[union-attr]
    assert contents(far, manifest) == life.truth[three]


def test_damaged_bytes_of_a_base_are_not_built_on(tmp_path: Path) -> None:
    """Where the far disk is what is read, its digest tells; the difference is made against nothing then."""
    life = tables(tmp_path / "near")
    far = far_of(life, tmp_path / "far")
    one, two = step(life), step(life)
    differences(life, far, one)
    manifest = far.read(one)
    piece = manifest.entries["few"].pieces[0]
    flip(tmp_path / "far" / manifest.files[piece.file].name, piece.offset + 70)
    forget(life.repository, one)
    differences(life, far, two)
    assert far.read(two).entries["few"].pieces[0].base is None
    assert far.read(two).bases
    assert contents(far, far.read(two)) == life.truth[two]


def test_a_copy_that_is_as_it_is_follows_and_leads(tmp_path: Path) -> None:
    """Differences, plain copies and other codecs may take turns at one place."""
    life = tables(tmp_path / "near")
    far = far_of(life, tmp_path / "far")
    for codec in ("raw", "delta", "delta", "zstd", "delta", None, "delta"):
        snapshot = step(life)
        if codec is None:
            copy_snapshot(life.repository, far, snapshot)
        else:
            copy_encoded(life.repository, far, snapshot, lambda _, codec=codec: codec, EncodeStats())
    assert life.check(far) == 7
    assert far.read(far.ids()[-1].id).bases


def test_copies_of_differences_are_the_same_elsewhere(tmp_path: Path) -> None:
    """What is copied as it is stored takes its bases along, and can be the source of other copies."""
    life = tables(tmp_path / "near")
    far, third = far_of(life, tmp_path / "far"), far_of(life, tmp_path / "third")
    for _ in range(4):
        differences(life, far, step(life))
    newest = far.ids()[-1].id
    copy_snapshot(far, third, newest)
    assert third.read(newest).bases
    assert life.check(third) == 1
    back = far_of(life, tmp_path / "back")
    for parsed in far.ids():
        copy_encoded(far, back, parsed.id, lambda _: "delta", EncodeStats())
    assert life.check(back) == 4
    assert load([back]) is not None


def test_a_chain_that_is_unchanged_is_referred_to(tmp_path: Path) -> None:
    """Nothing is sent but a manifest, and nothing that it needs is taken."""
    life = tables(tmp_path / "near")
    far = far_of(life, tmp_path / "far")
    for _ in range(3):
        differences(life, far, step(life))
    sent = differences(life, far, life.save()).sent_bytes
    assert sent == 0
    manifest = far.read(far.ids()[-1].id)
    assert manifest.bases
    forget(far, *(parsed.id for parsed in far.ids()[:-1]))
    assert life.check(far) == 1
