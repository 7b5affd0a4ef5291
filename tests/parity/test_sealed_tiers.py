"""A tier with parity that is sealed: its parity is sealed, too, and mends what was sealed."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.names import KEY_VARIABLE
from ckpt_engine.store.storage.seal_keys import KeyPair
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.parity.places import PARTS, ParityPlace, state, train
from tests.snapshot.passage import same

Ckpt = Callable[..., Any]


class SealedPlace:
    """A run of three snapshots at a sealed folder with parity, and the bytes there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        KeyPair.make(str(folder / "key"))
        self.root, self.config = folder / "run", folder / "c.yaml"
        seal = {"key": str(folder / "key")}
        tier = {"url": str(self.root), "parity": PARTS, "seal": seal}
        train([tier])
        self.config.write_text(json.dumps({"tiers": [tier]}))
        self.place = ParityPlace(str(self.root), {"seal": seal})
        self.was = self.raw()

    def raw(self) -> dict[str, bytes]:
        """The bytes on the disk of data files and their parity."""
        return {f"{names.DATA}{path.name}": path.read_bytes() for path in (self.root / "data").iterdir()}

    def flip(self, ranges: Sequence[int]) -> str:
        """Flip a bit in the middle of so many ranges of the newest data file."""
        newest = self.place.newest_file
        data = bytearray(self.was[newest])
        for one in ranges:
            data[(2 * one + 1) * len(data) // 16] ^= 1
        (self.root / newest).write_bytes(data)
        return newest

    def loaded(self) -> Any:
        with Checkpointer(str(self.config), writer="thread") as run:
            return run.load()


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SealedPlace:
    return SealedPlace(tmp_path, monkeypatch)


def test_every_object_is_sealed(sealed: SealedPlace) -> None:
    assert len(sealed.was) == 6 and len(sealed.place.parities) == 3
    assert all(data.startswith(names.SEALED) for data in sealed.was.values())


@pytest.mark.parametrize("ranges", [[3], [2, 6]])
def test_damage_of_a_sealed_file_is_mended(ckpt: Ckpt, sealed: SealedPlace, ranges: list[int]) -> None:
    """A chunk of 64 KiB is lost with each bit; the file is sealed again, and has the same content."""
    newest = sealed.flip(ranges)
    assert same(sealed.loaded(), state(3))
    found = ckpt("verify", sealed.config)
    assert found.code == 1 and newest in found.out and "can mend it here" in found.out
    assert ckpt("repair", sealed.config).code == 0
    assert sealed.place.objects() == sealed.place.was
    assert ckpt("verify", sealed.config).code == 0


def test_damaged_parity_of_a_sealed_tier_is_made_again(ckpt: Ckpt, sealed: SealedPlace) -> None:
    name = str(sealed.place.parities[sealed.place.newest_file])
    data = bytearray(sealed.was[name])
    data[len(data) // 2] ^= 1
    (sealed.root / name).write_bytes(data)
    found = ckpt("verify", sealed.config)
    assert found.code == 1 and name in found.out
    assert ckpt("scrub", sealed.config).code == 0
    assert sealed.place.objects() == sealed.place.was


@pytest.mark.parametrize("damage", ["three ranges", "header"])
def test_what_parity_cannot_mend_is_named(ckpt: Ckpt, sealed: SealedPlace, damage: str) -> None:
    """Without its first bytes nothing of a sealed file can be opened. An older snapshot is taken."""
    newest = sealed.flip([2, 4, 6] if damage == "three ranges" else [])
    if damage == "header":
        (sealed.root / newest).write_bytes(names.SEALED + bytes(56) + sealed.was[newest][64:])
    hurt = sealed.raw()
    assert same(sealed.loaded(), state(2))
    found = ckpt("verify", sealed.config)
    assert found.code == 1 and newest in found.out and "can mend it here" not in found.out
    done = ckpt("repair", sealed.config)
    assert done.code == 1 and newest in done.out and sealed.raw() == hurt
