"""Parity that is missing is made by a scrub, by a repair and by the next start; it costs places without it nothing."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.tools.check_run import Checker
from tests.cli.conftest import ckpt  # noqa: F401 - a fixture
from tests.parity.places import PARTS, WAIT_SECONDS, ParityPlace, train
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.support import interpreters

Ckpt = Callable[..., Any]
CALLS = {
    "put snapshots": 3,
    "get snapshots": 11,
    "list snapshots": 26,
    "put data": 3,
    "get_into data": 8,
    "list data": 18,
}
"""What three processes that save once asked of a folder before there was parity."""
WITHOUT_LIBRARY = """
import sys
sys.modules["pyeclib"] = None
from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main
config = sys.argv[1]
for command in ("ls", "verify"):
    try:
        main([command, config])
    except SystemExit as ended:
        assert not ended.code, command
with Checkpointer(config, writer="thread") as run:
    assert run.load()["step"] == 3
with Checkpointer(config, writer="thread") as run:
    run.save({"step": 4}, step=4).wait(60)
"""


DAMAGED_WITHOUT_LIBRARY = """
import sys
sys.modules["pyeclib"] = None
from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main
try:
    main(["verify", sys.argv[1]])
except SystemExit as ended:
    assert ended.code == 1
with Checkpointer(sys.argv[1], writer="thread") as run:
    assert run.load()["step"] == 2
    print(*run.loaded.rejected)
"""


@pytest.fixture
def place(tmp_path: Path) -> ParityPlace:
    train([{"url": str(tmp_path / "run"), "parity": PARTS}])
    return ParityPlace(str(tmp_path / "run"))


def lose(place: ParityPlace) -> list[str]:
    """Remove two parity objects and a second copy of a manifest; their names."""
    one, other, _ = map(str, place.parities.values())
    gone = [one, other, names.copy_name(place.ids[0])]
    place.storage.delete(*gone)
    return gone


def start(tiers: Sequence[Any]) -> None:
    """A run that saves nothing."""
    with Checkpointer({"tiers": tiers, "keep": {"last": 9}, "writer": "thread", "wait_at_end": WAIT_SECONDS}) as run:
        run.load()
        run.engine.start()


@pytest.mark.parametrize("command", ["scrub", "repair"])
def test_a_command_makes_what_is_missing(ckpt: Ckpt, place: ParityPlace, tmp_path: Path, command: str) -> None:
    """A dry run names it and writes nothing. It is no damage: `ckpt verify` ends with 0."""
    gone = lose(place)
    left = place.objects()
    assert ckpt("verify", tmp_path / "run").code == 0
    tried = ckpt(command, tmp_path / "run", "--dry-run")
    assert tried.code == 0 and all(f"{name}  can be mended" in tried.out for name in gone)
    assert place.objects() == left
    done = ckpt(command, tmp_path / "run")
    assert (done.code, done.err) == (0, "") and all(f"{name}  mended" in done.out for name in gone)
    assert place.objects() == place.was
    assert "mended" not in ckpt(command, tmp_path / "run").out


def test_parity_is_not_made_from_a_damaged_file(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    newest = place.newest_file
    place.storage.delete(str(place.parities[newest]))
    data = bytearray(place.was[newest])
    data[len(data) // 2] ^= 1
    place.replace(newest, bytes(data))
    done = ckpt("scrub", tmp_path / "run")
    assert done.code == 1 and newest in done.out
    assert str(place.parities[newest]) not in place.objects()


def test_parity_of_a_run_that_trains_is_left_to_its_writer(ckpt: Ckpt, place: ParityPlace, tmp_path: Path) -> None:
    """A scrub then has nothing to complain about."""
    lose(place)
    left = place.objects()
    with acquire(LocalStorage(tmp_path / "run")):
        done = ckpt("scrub", tmp_path / "run")
    assert (done.code, done.err) == (0, "") and place.objects() == left


def test_a_start_makes_what_is_missing_at_each_tier(tmp_path: Path) -> None:
    """Also if it saves nothing."""
    tiers = [{"url": str(tmp_path / name), "parity": PARTS} for name in ("near", "far")]
    train(tiers)
    places = [ParityPlace(tier["url"]) for tier in tiers]
    for one in places:
        lose(one)
    start(tiers)
    assert all(one.objects() == one.was for one in places)


def test_a_scrub_reads_parity_at_its_rate_and_again_when_it_is_due(
    ckpt: Ckpt, place: ParityPlace, tmp_path: Path
) -> None:
    read: list[int] = []
    assert Checker(Repository(place.storage), read.append).check_others() == ()
    whole = sum(len(place.was[str(one)]) for one in place.parities.values())
    assert len(read) >= len(place.parities) and 0.99 * whole <= sum(read) <= whole
    assert ckpt("scrub", tmp_path / "run").code == 0
    hurt = str(next(iter(place.parities.values())))
    place.replace(hurt, bytes(len(place.was[hurt])))
    assert ckpt("scrub", tmp_path / "run", "--every", "7d").code == 0
    assert place.objects() != place.was
    assert ckpt("scrub", tmp_path / "run").code == 0
    assert place.objects() == place.was


@pytest.mark.parametrize("command", ["scrub", "repair"])
def test_all_parity_that_is_lost_is_made_again_as_the_configuration_says(
    ckpt: Ckpt, place: ParityPlace, tmp_path: Path, command: str
) -> None:
    """Nothing at the place says any more that it had some: neither parity nor a second copy of a manifest is left."""
    config = tmp_path / "c.yaml"
    config.write_text(f"tiers: [{{url: {tmp_path / 'run'}, parity: {{data: 8, parity: 2}}}}]\n")
    place.storage.delete(*map(str, place.parities.values()), *map(names.copy_name, place.ids))
    assert "mended" not in ckpt(command, tmp_path / "run").out
    done = ckpt(command, config)
    assert (done.code, done.err) == (0, "") and place.objects() == place.was


def test_only_writing_needs_the_library(place: ParityPlace, tmp_path: Path) -> None:
    """A run with parity is listed, verified and loaded without it."""
    config = tmp_path / "c.yaml"
    config.write_text(f"tiers: [{{url: {tmp_path / 'run'}, parity: {{data: 8, parity: 2}}}}]\n")
    command = [sys.executable, "-c", WITHOUT_LIBRARY, str(config)]
    done = interpreters.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 1
    assert "ConfigError: [CKPT100] parity needs pyeclib → pip install 'ckpt-engine[parity]'" in done.stderr
    assert ParityPlace(str(tmp_path / "run")).was == place.was


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_where_the_library_is_missing_damage_names_what_to_install(
    place: ParityPlace, tmp_path: Path, damage: str
) -> None:
    """The load that takes an older snapshot says why."""
    data = bytearray(place.was[place.newest_file])
    data[len(data) // 2] ^= 1
    place.replace(place.newest_file, bytes(data) if damage == "flipped" else bytes(data[: len(data) * 7 // 8]))
    command = [sys.executable, "-c", DAMAGED_WITHOUT_LIBRARY, str(tmp_path / "run")]
    done = interpreters.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'ckpt-engine[parity]'` lets its parity mend it" in done.stdout


@pytest.mark.long
def test_a_store_that_fails_is_not_damaged_parity(
    ckpt: Ckpt,
    tmp_path: Path,
    moto: S3Server,
    bucket: str,
    wire: Wire,
) -> None:
    """A scrub says that the object could not be read, and why."""
    url = f"s3://{bucket}/run"
    train([{"url": url, "storage_options": moto.options(), "parity": PARTS}], 1)
    (parity,) = map(str, ParityPlace(url, moto.options()).parities.values())
    tier = {"url": url, "storage_options": moto.options(wire.url), "parity": PARTS}
    (tmp_path / "c.yaml").write_text(json.dumps({"tiers": [tier]}))
    wire.rule("403", "GET", "parity-8-2")
    done = ckpt("scrub", tmp_path / "c.yaml", "--dry-run")
    assert done.code == 1 and f"{parity}  COULD NOT BE READ" in done.out
    assert "are not what was written" not in done.out and "DAMAGED" not in done.out


def test_without_the_option_a_run_has_no_object_byte_or_call_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only manifests and data files, and for these no call more than before there was parity."""
    calls: Counter[str] = Counter()

    def counted(method: str) -> Callable[..., Any]:
        inner = getattr(LocalStorage, method)

        def call(self: LocalStorage, *arguments: Any, **options: Any) -> Any:
            for name in arguments[:1] if method != "delete" else arguments:
                calls[f"{method} {name.partition('/')[0]}"] += str(name).startswith((names.MANIFESTS, names.DATA))
            return inner(self, *arguments, **options)

        return call

    for method in ("put", "receive", "get", "get_into", "list", "delete"):
        monkeypatch.setattr(LocalStorage, method, counted(method))
    train([str(tmp_path / "run")], elements=20_000)
    monkeypatch.undo()
    listed = [item for kept in (names.MANIFESTS, names.DATA) for item in LocalStorage(tmp_path / "run").list(kept)]
    assert len(listed) == 6
    assert all(names.manifest_id(item.name) or names.data_owner(item.name) for item in listed)
    assert +calls <= Counter(CALLS)
