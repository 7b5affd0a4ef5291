"""A codec at the nearest tier: pieces are encoded from the arena; the same promises, fewer bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt_engine.observe.events import SnapshotCommitted
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from tests.copy.evolving import contents, require_bounds
from tests.support import interpreters
from tests.writer.staged import Stage
from tests.writer.test_tiers_encoded import used_bytes
from tests.writer.tiered import Run


class Drifting(Stage):
    """A slot whose rows change a little, or not at all, from one step to the next."""

    def fill(self, step: int) -> None:
        weight, scalar, _ = self.layout.entries
        self._memory[weight.offset : weight.offset + weight.nbytes] = rows(step, weight.nbytes)
        self._memory[scalar.offset : scalar.offset + 8] = step.to_bytes(8, "little")


def rows(step: int, nbytes: int) -> bytes:
    """Numbers by chance, to all of which a little was added at each step."""
    numbers = (np.random.default_rng(1).standard_normal(nbytes // 4) * 0.02).astype("<f4").view("<u4")
    return bytes(numbers + np.uint32(step) * np.random.default_rng(2).integers(0, 5, numbers.size).astype("<u4"))


@pytest.fixture
def drifting(run: Run) -> Iterator[Run]:
    """A run whose arrays change a little."""
    plain, run.stage = run.stage, Drifting(256 << 10)
    yield run
    run.close()
    run.stage.close()
    run.stage = plain


def require_exact(root: Path) -> list[int]:
    """Every snapshot there is what was saved at its step, bit for bit; their steps."""
    place = Repository(LocalStorage(root))
    listing = place.scan()
    assert not listing.damaged
    for info in listing.snapshots:
        manifest = place.read(info.id)
        found = contents(place, manifest)
        assert found["model.weight"] == rows(info.step, 256 << 10)
        assert found["step"] == info.step.to_bytes(8, "little")
        assert manifest.tree["loop"]["epoch"] == info.step // 10
        require_bounds(manifest)
    return [info.step for info in listing.snapshots]


@pytest.mark.parametrize(("codec", "most"), [("zstd", 0.95), ("byteplane-zstd", 0.9), ("delta", 0.4)])
def test_snapshots_are_written_encoded(codec: str, most: float, drifting: Run) -> None:
    """Events say how much is written; a further tier copies the stored bytes, or encodes with a codec of its own."""
    plain, other = drifting.tier(), drifting.tier(drifting.third, codec="delta")
    drifting.start(plain, other, codec=codec, keep={"last": 3})
    for step in range(1, 6):
        drifting.save(step)
        drifting.until_copied(step)
        drifting.until_copied(step, drifting.third)
    drifting.close()
    assert require_exact(drifting.near) == [3, 4, 5]
    assert require_exact(drifting.far) == require_exact(drifting.third) == [1, 2, 3, 4, 5]
    written = [event.written_bytes for event in drifting.all(SnapshotCommitted)]
    assert min(written) < most * (256 << 10)
    needed = {
        f.name
        for i in Repository(LocalStorage(drifting.near)).list()
        for f in Repository(LocalStorage(drifting.near)).read(i.id).files
    }
    assert {item.name for item in LocalStorage(drifting.near).list(names.DATA)} == needed


def test_without_a_codec_nothing_is_encoded(drifting: Run) -> None:
    """The file is the arena, as ever."""
    drifting.start()
    drifting.save(1)
    drifting.close()
    [info] = Repository(LocalStorage(drifting.near)).list()
    [file] = Repository(LocalStorage(drifting.near)).read(info.id).files
    assert file.nbytes == drifting.stage.layout.nbytes


def test_a_quota_holds(drifting: Run) -> None:
    """Room is made as if nothing could be encoded and nothing were there already."""
    quota = 3 * 300_000
    drifting.start(codec="delta", keep={"last": 9, "quota": quota}, tiers=())
    for step in range(1, 13):
        drifting.save(step)
        assert used_bytes(drifting.near) <= quota
    drifting.close()
    assert require_exact(drifting.near)[-1] == 12


def test_a_snapshot_that_does_not_fit_leaves_nothing(drifting: Run) -> None:
    """It fails as one that is written as it is."""
    drifting.start(codec="zstd", keep={"last": 9, "quota": 100_000}, tiers=())
    done = drifting.save(1, ok=False)
    assert done is None
    drifting.close()
    assert list(LocalStorage(drifting.near).list(names.DATA)) == []


def test_a_write_that_fails_leaves_nothing(drifting: Run) -> None:
    """No data and no manifest are left, and the next snapshot is whole."""
    drifting.start(codec="delta", tiers=())
    drifting.save(1)
    weather = drifting.weather[drifting.near]
    weather.after_put = lambda name: weather.down("put") if name.startswith(names.DATA) else None
    drifting.save(2, ok=False)
    weather.after_put = lambda name: None
    weather.up()
    drifting.save(3)
    drifting.close()
    assert require_exact(drifting.near) == [1, 3]
    owners = {names.data_owner(item.name).step for item in LocalStorage(drifting.near).list(names.DATA)}  # type: ignore[union-attr]
    assert owners <= {1, 3}


def test_what_a_further_tier_builds_on_stays_on_the_nearest(drifting: Run) -> None:
    """A far tier with a slower rhythm still finds what its newest snapshot was made of."""
    drifting.start(drifting.tier(codec="delta", every_n_steps=4), keep={"last": 1})
    for step in range(1, 10):
        drifting.save(step)
        if step in (1, 4, 8):
            drifting.until_copied(step)
        if step == 7:
            assert require_exact(drifting.near) == [4, 7]
    place = Repository(LocalStorage(drifting.far))
    assert [bool(place.read(parsed.id).bases) for parsed in place.ids()][1:] == [True] * (len(place.ids()) - 1)
    drifting.close()
    require_exact(drifting.far)
    assert set(require_exact(drifting.near)) <= {8, 9}


ENDS = """
import sys, torch
from ckpt_engine import Checkpointer

tiers = [{"url": sys.argv[1], "codec": "zstd"}]
ckpt = Checkpointer({"tiers": tiers, "writer": "thread"})
ckpt.save({"w": torch.zeros(5_000_000)}, step=1)
"""


def test_a_writer_thread_encodes_while_the_interpreter_ends(tmp_path: Path) -> None:
    """A script that ends without `close()` has its last snapshot; executors take no work any more by then."""
    interpreters.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, without_ours=True, timeout=120)
    assert [info.step for info in Repository(LocalStorage(tmp_path)).list()] == [1]
