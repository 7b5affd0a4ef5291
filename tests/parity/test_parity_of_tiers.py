"""A tier with parity mends lost parts of its own data files, and names what it cannot mend."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.parity.places import PARTS, WAIT_SECONDS, ParityPlace, state, train
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.snapshot.passage import same

Ckpt = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> ParityPlace:
    """A run of three snapshots at one folder, which share what is frozen."""
    train([{"url": str(tmp_path / "run"), "parity": PARTS}])
    return ParityPlace(str(tmp_path / "run"))


def loaded(url: str, options: dict[str, Any] | None = None) -> Any:
    with Checkpointer({"tiers": [{"url": url, "storage_options": options or {}}], "writer": "thread"}) as run:
        return run.load()


def test_every_data_file_has_its_parity_once_and_manifests_have_a_copy(place: ParityPlace) -> None:
    """Space: two eighths and one percent."""
    files = [name for name in place.was if names.data_owner(name)]
    assert len(files) == 3 and set(place.parities) == set(files)
    copies = {one.id for name in place.was if (one := names.copy_id(name))}
    assert copies == set(place.ids)
    for snapshot in place.ids:
        assert place.was[names.copy_name(snapshot)] == place.was[names.manifest_name(snapshot)]
    data, parity = (sum(len(place.was[one]) for one in found) for found in (files, map(str, place.parities.values())))
    assert data * 2 / 8 <= parity <= data * (2 / 8 + 0.01)


@pytest.mark.cells(2)
@pytest.mark.parametrize("seed", range(6))
def test_lost_parts_are_read_around_and_mended(ckpt: Ckpt, place: ParityPlace, tmp_path: Path, seed: int) -> None:
    """Any two of ten parts of each file."""
    rng = random.Random(seed)
    for file in place.parities:
        place.hurt(file, 2, rng)
    assert place.objects() != place.was
    assert same(loaded(str(tmp_path / "run")), state(3))
    done = ckpt("repair", tmp_path / "run")
    assert (done.code, done.err) == (0, "") and place.objects() == place.was


def test_one_part_too_many_is_named_and_an_older_snapshot_is_taken(
    ckpt: Ckpt, place: ParityPlace, tmp_path: Path
) -> None:
    newest = place.newest_file
    data = bytearray(place.was[newest])
    range_bytes = -(-len(data) // 8)
    for part in (3, 4, 5):
        for at in range(part * range_bytes, (part + 1) * range_bytes):
            data[at] ^= 1
    place.replace(newest, bytes(data))
    assert same(loaded(str(tmp_path / "run")), state(2))
    found = ckpt("verify", tmp_path / "run")
    assert found.code == 1 and newest in found.out and "can mend it here" not in found.out
    done = ckpt("repair", tmp_path / "run")
    assert done.code == 1 and f"model/w: {newest}" in done.out and place.objects()[newest] == bytes(data)


@pytest.mark.parametrize("rest", [0.75, 0.8, 0.999])
def test_a_truncated_file_is_read_and_mended(ckpt: Ckpt, place: ParityPlace, tmp_path: Path, rest: float) -> None:
    """What is behind its end counts as lost."""
    newest = place.newest_file
    os.truncate(tmp_path / "run" / newest, -(-len(place.was[newest]) // 8) * 6 + int((rest - 0.75) * 1000))
    assert same(loaded(str(tmp_path / "run")), state(3))
    found = ckpt("verify", tmp_path / "run")
    assert found.code == 1 and "; `ckpt repair` can mend it here" in found.out
    assert f"do:  `ckpt repair {tmp_path / 'run'}` mends it from its parity or second copy" in found.out
    assert ckpt("scrub", tmp_path / "run").code == 0 and place.objects() == place.was


def test_a_file_that_lost_more_is_mended_from_another_tier(ckpt: Ckpt, tmp_path: Path) -> None:
    """That has it in another form: the beginning, with the header, is taken from what is left."""
    tiers = [{"url": str(tmp_path / "run"), "parity": PARTS}, {"url": str(tmp_path / "far"), "codec": "zstd"}]
    train(tiers)
    place = ParityPlace(str(tmp_path / "run"))
    os.truncate(tmp_path / "run" / place.newest_file, len(place.was[place.newest_file]) // 2)
    (tmp_path / "c.yaml").write_text(json.dumps({"tiers": tiers}))
    assert ckpt("repair", tmp_path / "c.yaml").code == 0 and place.objects() == place.was


def test_a_header_is_mended(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    newest = place.newest_file
    place.replace(newest, bytes(4096) + place.was[newest][4096:])
    assert ckpt("repair", tmp_path / "run").code == 0 and place.objects() == place.was


def test_a_damaged_parity_object_is_made_again(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    """Also one that lacks its end, and beside damage of its data file."""
    one, other, third = place.parities.values()
    place.replace(str(one), bytes(len(place.was[str(one)])))
    os.truncate(tmp_path / "run" / str(other), 100)
    place.hurt(third.file, 2, random.Random(1))
    found = ckpt("verify", tmp_path / "run")
    assert found.code == 1 and str(one) in found.out and str(other) in found.out
    assert ckpt("repair", tmp_path / "run").code == 0 and place.objects() == place.was


@pytest.mark.parametrize("damage", ["zero", "missing", "copy"])
def test_a_manifest_has_a_second_copy(ckpt: Ckpt, place: ParityPlace, tmp_path: Path, damage: str) -> None:
    name = (names.copy_name if damage == "copy" else names.manifest_name)(place.ids[-1])
    if damage == "missing":
        (tmp_path / "run" / name).unlink()
    else:
        place.replace(name, bytes(100))
    assert same(loaded(str(tmp_path / "run")), state(3))
    assert ckpt("verify", tmp_path / "run").code == 1
    assert ckpt("repair", tmp_path / "run").code == 0 and place.objects() == place.was


def test_retention_removes_parity_with_its_data_file(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    """The file that others share stays, with its parity."""
    oldest, middle, newest = place.ids
    assert ckpt("prune", tmp_path / "run", "--keep", "last=1").code == 0
    assert place.ids == [newest]
    assert set(place.objects()) == {
        name for name in place.was if newest in name or (oldest in name and name.startswith(names.DATA))
    }
    assert middle not in "".join(place.objects())


def test_a_copy_of_the_run_has_parity_too(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    assert ckpt("cp", tmp_path / "run", tmp_path / "copy").code == 0
    assert ParityPlace(str(tmp_path / "copy")).was == place.was


def test_a_run_makes_up_for_what_is_missing(place: ParityPlace, tmp_path: Path) -> None:
    """The next start, though it saves nothing."""
    (name, *_), copy = map(str, place.parities.values()), names.copy_name(place.ids[0])
    for gone in (name, copy):
        (tmp_path / "run" / gone).unlink()
    train([{"url": str(tmp_path / "run"), "parity": PARTS}], 1)
    there = place.objects()
    assert {one: there[one] for one in place.was} == place.was


@pytest.mark.long
def test_a_further_tier_on_a_server_mends_itself(ckpt: Ckpt, tmp_path: Path, moto: S3Server, bucket: str) -> None:
    """A real S3 server; the nearest tier has no parity, and is lost."""
    far = {"url": f"s3://{bucket}/run", "storage_options": moto.options(), "parity": PARTS, "codec": "zstd"}
    train([str(tmp_path / "near"), far])
    there = ParityPlace(far["url"], far["storage_options"])
    assert {one.file for one in there.parities.values()} == {name for name in there.was if names.data_owner(name)}
    rng = random.Random(3)
    for file in there.parities:
        there.hurt(file, 2, rng)
    assert same(loaded(far["url"], far["storage_options"]), state(3))
    (tmp_path / "c.yaml").write_text(json.dumps({"tiers": [far]}))
    assert ckpt("repair", tmp_path / "c.yaml").code == 0 and there.objects() == there.was


def test_a_run_mends_its_only_tier(place: ParityPlace, tmp_path: Path) -> None:
    """Damage that its resume has found."""
    data = bytearray(place.was[place.newest_file])
    data[len(data) // 2] ^= 1
    place.replace(place.newest_file, bytes(data))
    options = {"tiers": [{"url": str(tmp_path / "run"), "parity": PARTS}], "writer": "thread", "keep": {"last": 9}}
    with Checkpointer(options) as run:
        assert same(run.load(), state(3))
        assert run.save(state(4), step=4).wait(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not place.was.items() <= place.objects().items():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_without_the_option_nothing_is_there(tmp_path: Path) -> None:
    train([str(tmp_path / "run")])
    there = ParityPlace(str(tmp_path / "run"))
    assert not there.parities and not any(map(names.copy_id, there.was))
