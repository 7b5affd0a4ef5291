"""Whatever parts of a data file and its parity are lost, as many as the parity stands for: each byte comes back."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.copy.add_parity import encoded
from ckpt_engine.copy.file_parity import FileParity
from ckpt_engine.copy.whole_file import whole_file
from ckpt_engine.errors import CkptError, CorruptError
from ckpt_engine.restore.load import load
from ckpt_engine.store import names
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.base import Capabilities, WrapperStorage
from ckpt_engine.store.storage.local import LocalStorage
from tests.parity.places import PARTS, ParityPlace, state, train
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.snapshot.passage import same

KINDS = ("disk", "folder", "server")
MOST_LOST = PARTS["parity"]


class PlainFolder(WrapperStorage):
    """A folder of which no more is used than every storage can do, as of one that another machine serves."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, moto: S3Server, bucket: str) -> Iterator[ParityPlace]:
    url, options = str(tmp_path / "run"), dict[str, Any]()
    if request.param == "server":
        url, options = f"s3://{bucket}/run", moto.options()
    train([{"url": url, "storage_options": options, "parity": PARTS}], elements=20_000)
    found = ParityPlace(url, options)
    if request.param == "folder":
        found.storage = PlainFolder(LocalStorage(tmp_path / "run"))
    yield found


def mend(place: ParityPlace, file: str) -> None:
    """What is not as it was, the data file first: its parity is made from it."""
    repository, read = Repository(place.storage), place.storage.get
    both = (file, str(place.parities[file]))
    for name in [one for one in both if read(one, 0, len(place.was[one]) + 1) != place.was[one]]:
        with whole_file(repository, (), name) as (image, _):
            place.storage.put(name, [image], exclusive=False)


def lose(place: ParityPlace, trials: int, seed: int) -> None:
    for number in range(trials):
        rng = random.Random(f"{seed}/{number}")
        file = rng.choice(sorted(place.parities))
        place.hurt(file, MOST_LOST, rng)
        if number % 10 == 0:
            found = load([Repository(place.storage)])
            assert found is not None and same(found.state, state(3, 20_000))
        mend(place, file)
        hurt = place.storage
        for name in (file, str(place.parities[file])):
            assert hurt.get(name, 0, len(place.was[name]) + 1) == place.was[name], (seed, number)
    assert place.objects() == place.was


@pytest.mark.cells(1)
@pytest.mark.parametrize(("place", "trials"), [("disk", 20), ("folder", 20), ("server", 8)], indirect=["place"])
def test_lost_parts_come_back_bitwise(place: ParityPlace, trials: int) -> None:
    """Flipped bits, zeros and noise, in any two of ten parts; the place is mended.

    What mends is the same code everywhere: a server, whose requests take long, has fewer trials here and all of them
    in the slow suite.
    """
    lose(place, trials, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_lost_parts_come_back_bitwise_a_thousand_times(place: ParityPlace, seed: int) -> None:
    lose(place, 84, seed)


@pytest.mark.cells(1)
@pytest.mark.parametrize(("place", "trials"), [("disk", 5), ("folder", 5), ("server", 2)], indirect=["place"])
def test_one_part_more_is_refused(place: ParityPlace, trials: int) -> None:
    """Nothing is written, and an older snapshot is taken."""
    file, rng = place.newest_file, random.Random(0)
    parity = place.parities[file]
    for _ in range(trials):
        data = bytearray(place.was[file])
        range_bytes = parity.range_bytes
        for part in rng.sample(range(8), MOST_LOST + 1):
            for at in range(part * range_bytes, min(parity.nbytes, (part + 1) * range_bytes)):
                data[at] ^= 0x55
        place.replace(file, bytes(data))
        with pytest.raises(CorruptError):
            mend(place, file)
        assert place.storage.get(file, 0, len(data)) == data
        found = load([Repository(place.storage)])
        assert found is not None and same(found.state, state(2, 20_000))


@pytest.mark.parametrize("nbytes", [4096, 100_000, 2_100_000, 4_200_001])
@pytest.mark.parametrize(("data", "parity"), [(8, 2), (4, 1), (2, 2), (3, 3), (17, 4), (24, 8)])
def test_any_size_and_any_numbers(tmp_path: Path, nbytes: int, data: int, parity: int) -> None:
    """Also a part of a file is made without the rest; where parity has as many parts, a file that is gone."""
    storage, rng = LocalStorage(tmp_path), random.Random(nbytes + data)
    name = ParityName(names.data_name(names.snapshot_id(1, 1)), data, parity, nbytes)
    image = rng.randbytes(nbytes)
    object_, out = FileParity(storage, name), memoryview(bytearray(FileParity(storage, name).nbytes))
    object_.encode(memoryview(image), out, lambda: None)
    storage.put(str(name), [out])
    assert object_.damaged_parts(lambda _: None) == 0
    lost = rng.sample(range(data), min(parity, data))
    hurt = bytearray(image)
    for part in lost:
        first = part * name.range_bytes
        hurt[first : first + name.range_bytes] = bytes(len(hurt[first : first + name.range_bytes]))

    def read(start: int, block: memoryview) -> None:
        block[:] = hurt[start : start + block.nbytes]

    whole = memoryview(bytearray(nbytes))
    assert object_.mend(read, 0, whole) and whole == image
    start = rng.randrange(nbytes)
    some = memoryview(bytearray(rng.randrange(1, nbytes - start + 1)))
    assert object_.mend(read, start, some) and some == image[start : start + some.nbytes]
    if data <= parity:

        def gone(_: int, __: memoryview) -> None:
            raise CorruptError("gone")

        assert object_.mend(gone, 0, whole) and whole == image


def test_the_code_is_the_one_of_the_page_on_the_format(tmp_path: Path) -> None:
    """Computed without the library."""

    def times(one: int, other: int) -> int:
        product = 0
        while other:
            product ^= one * (other & 1)
            one, other = (one << 1) ^ (0x11D if one & 0x80 else 0), other >> 1
        return product

    inverse = {times(one, other) == 1 and one: other for one in range(1, 256) for other in range(1, 256)}
    storage, name = LocalStorage(tmp_path), ParityName(names.data_name(names.snapshot_id(1, 1)), 5, 3, 50)
    image = random.Random(1).randbytes(50)
    out = memoryview(bytearray(FileParity(storage, name).nbytes))
    FileParity(storage, name).encode(memoryview(image), out, lambda: None)
    part_bytes = out.nbytes // 3
    for part in range(3):
        expected = bytearray(10)
        for block in range(5):
            for at in range(10):
                expected[at] ^= times(inverse[(5 + part) ^ block], image[block * 10 + at])
        assert out[part * part_bytes : (part + 1) * part_bytes][-10:] == expected


def test_a_damaged_header_is_not_encoded(tmp_path: Path) -> None:
    """No piece is of it, and parity of it would keep the damage."""
    train([str(tmp_path / "run")], 1)
    place = ParityPlace(str(tmp_path / "run"))
    (file,) = (name for name in place.was if names.data_owner(name))
    image = bytearray(place.was[file])
    image[100] ^= 1
    with pytest.raises(CkptError), encoded(place.storage, ParityName(file, 8, 2, len(image)), memoryview(image)):
        raise AssertionError
