"""`ckpt repair`, `ckpt scrub` and a run that trains replace damaged files by the same bytes from another place, and by
nothing else."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.cli import repair
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Throttle
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.snapshot.passage import same
from tests.support import interpreters

Ckpt = Callable[..., Any]
WAIT_SECONDS = 60.0
FIRST_CALL, EVERY_CALL = 5, 23
"""Of the calls to the disk, those before which the command is killed."""
MORTAL_SCRUB = """
import sys
from ckpt_engine.tools import verified_files
verified_files.PUT_SECONDS = 0.0
from tests.cli.mortal import die_at
from ckpt_engine.cli.main import main
die_at(int(sys.argv[1]))
main(sys.argv[2:])
"""
"""A scrub that notes each file at once, and is killed before one of its calls to the disk."""


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    frozen = {f"frozen{number}": torch.randn(60_000, generator=generator) for number in range(6)}
    return {"model": {**frozen, "w": torch.full((400_000,), float(step))}, "step": step}


def train(tiers: list[dict[str, Any]], steps: int = 3) -> None:
    for step in range(1, steps + 1):
        with Checkpointer(
            {"tiers": tiers, "keep": {"last": 9}, "writer": "thread", "wait_at_end": WAIT_SECONDS}
        ) as ckpt:
            if step > 1:
                ckpt.load()
            assert ckpt.save(state(step), step=step).wait(WAIT_SECONDS)


class Place:
    """A folder of a run, and the bytes that it had before it was hurt."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.was = self.files()

    def files(self) -> dict[str, bytes]:
        kept = (names.MANIFESTS, names.DATA)
        paths = (path for folder in kept for path in (self.root / folder).iterdir())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}

    @property
    def ids(self) -> list[str]:
        return [parsed.id for parsed in Repository(open_storage(str(self.root))).ids()]

    def flip(self, snapshot: str, entry: str) -> str:
        """One bit in the middle of an entry; the name of the file."""
        manifest = Repository(open_storage(str(self.root))).read(snapshot)
        piece = manifest.entries[entry].pieces[0]
        name = manifest.files[piece.file].name
        with (self.root / name).open("r+b") as file:
            file.seek(piece.offset + piece.nbytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return name


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Place, Place]:
    train([{"url": str(tmp_path / "near")}, {"url": str(tmp_path / "far")}])
    near, far = Place(tmp_path / "near"), Place(tmp_path / "far")
    assert near.was == far.was
    (tmp_path / "c.yaml").write_text(f"tiers: [{near.root}, {far.root}]\n")
    return near, far


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def header_of_another(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"frozen1", b"frozen9", 1))


@pytest.mark.long
@pytest.mark.parametrize(("named", "damage"), [("tiers", truncate), ("from", zero)])
def test_every_damaged_file_gets_its_bytes_back(
    ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path, named: str, damage: Callable[[Path], object]
) -> None:
    """A file that is truncated or zeroed, a missing one, and a manifest: all are as they were written."""
    near, _ = pair
    gone, shared = names.data_name(near.ids[0]), min(Repository(open_storage(str(near.root))).files_of(near.ids[-1]))
    assert near.ids[-1] not in shared
    damage(near.root / shared)
    (near.root / gone).unlink()
    zero(near.root / names.manifest_name(near.ids[-1]))
    where = [tmp_path / "c.yaml"] if named == "tiers" else [near.root, "--from", tmp_path / "far"]
    tried = ckpt("repair", *where, "--dry-run")
    hurt = near.files()
    assert (
        tried.code == 1 and f"can be mended from {tmp_path / 'far'}" in tried.out and near.files() == hurt != near.was
    )
    done = ckpt("repair", *where)
    assert (done.code, done.err) == (0, "")
    assert near.files() == near.was
    assert f"{shared}  mended from {tmp_path / 'far'}" in done.out
    assert ckpt("verify", tmp_path / "c.yaml").code == 0
    assert "mended" not in ckpt("repair", *where).out


def test_a_header_that_says_something_else_is_mended(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """No digest is of it, and all tensors are as they were: other programs would read them by other names."""
    near, far = pair
    (name,) = [one for one, data in near.was.items() if one.startswith(names.DATA) and b"frozen1" in data[:4096]][:1]
    (near.root / name).write_bytes(near.was[name].replace(b"frozen1", b"frozen9", 1))
    done = ckpt("repair", tmp_path / "c.yaml")
    assert done.code == 0 and f"{name}  mended from {far.root}" in done.out
    assert near.files() == near.was


def test_two_damaged_copies_mend_each_other(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """Each lacks another tensor of the same file."""
    near, far = pair
    near.flip(near.ids[0], "model/frozen1")
    far.flip(far.ids[0], "model/frozen2")
    assert ckpt("repair", tmp_path / "c.yaml").code == 0
    assert near.files() == far.files() == near.was


def test_what_no_place_has_is_named_and_stays(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """The tensor, its snapshots, what a resume takes and what to do next; everything else is mended."""
    near, far = pair
    lost = near.flip(near.ids[-1], "model/w")
    assert far.flip(far.ids[-1], "model/w") == lost
    other = near.flip(near.ids[0], "model/frozen0")
    hurt = near.files()[lost]
    result = ckpt("repair", tmp_path / "c.yaml")
    assert result.code == 1
    assert f"{other}  mended" in result.out and f"{lost}  mended" not in result.out
    assert f"{near.ids[-1]}  DAMAGED\n  [CKPT401] model/w: {lost}" in result.out
    *_, resume, do = result.out.splitlines()
    assert resume.startswith(f"a resume takes {near.ids[-2]}") and "--from OTHER` mends it from another copy" in do
    left = near.files()
    assert lost.encode() in left.pop(names.quarantine_name(near.ids[-1])) and left == {**near.was, lost: hurt}
    found = ckpt("repair", tmp_path / "c.yaml", "--json")
    assert found.code == 1 and found.json["mended"] == [] and found.json["ok"] is False
    with Checkpointer(tmp_path / "c.yaml") as run:
        assert same(run.load(), state(2))


def test_a_run_that_is_being_written_is_left_alone(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """Its writer has the lease; nothing is changed, and the message names it."""
    near, _ = pair
    near.flip(near.ids[0], "model/frozen1")
    hurt = near.files()
    with acquire(open_storage(str(near.root))):
        held = ckpt("repair", tmp_path / "c.yaml")
    assert held.code == 2 and "is being written by" in held.err and near.files() == hurt
    assert ckpt("repair", tmp_path / "c.yaml").code == 0


def test_verify_and_a_resume_end_with_the_command_that_mends(
    ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path
) -> None:
    """Word for word: what they print is what is run."""
    near, far = pair
    near.flip(near.ids[-1], "model/w")
    verified = ckpt("verify", tmp_path / "c.yaml")
    assert f"do:  `ckpt repair {tmp_path / 'c.yaml'}` mends it from the other tiers" in verified.out
    with Checkpointer(tmp_path / "c.yaml") as run:
        assert same(run.load(), state(3)) and run.loaded is not None
        (note,) = [one for one in run.loaded.notes if "ckpt repair" in one]
    assert note.endswith(f"`ckpt repair {near.root} --from {far.root}`")
    assert ckpt(*note.split("`")[1].split()[1:]).code == 0
    assert near.files() == near.was


@pytest.mark.long
@pytest.mark.parametrize("codec", ["zstd", "delta"])
def test_a_copy_in_another_form_is_decoded(ckpt: Ckpt, tmp_path: Path, codec: str) -> None:
    """The near tier has plain bytes, the far one differences: what is decoded there is proved by the digests here."""
    train([{"url": str(tmp_path / "near")}, {"url": str(tmp_path / "far"), "codec": codec}])
    near, far = Place(tmp_path / "near"), Place(tmp_path / "far")
    assert near.was != far.was
    for snapshot, entry in zip(near.ids, ("model/frozen0", "model/w", "model/w"), strict=True):
        near.flip(snapshot, entry)
    assert ckpt("repair", near.root, "--from", far.root).code == 0
    assert near.files() == near.was and far.files() == far.was
    # The other way round the stored bytes would have to be made again.
    lost = far.flip(far.ids[-1], "model/w")
    back = ckpt("repair", far.root, "--from", near.root)
    assert back.code == 1 and f"model/w: {lost}" in back.out


def test_truncated_files_are_mended_from_a_copy_in_another_form(ckpt: Ckpt, tmp_path: Path) -> None:
    """What is left has the header and some tensors, and the others are decoded."""
    train([{"url": str(tmp_path / "near")}, {"url": str(tmp_path / "far"), "codec": "delta"}])
    near, far = Place(tmp_path / "near"), Place(tmp_path / "far")
    for name in near.was:
        if name.startswith(names.DATA):
            truncate(near.root / name)
    assert ckpt("repair", near.root, "--from", far.root).code == 0
    assert near.files() == near.was and far.files() == far.was


@pytest.mark.parametrize("damage", [truncate, header_of_another])
def test_two_damaged_copies_of_a_file_make_a_whole_one(
    ckpt: Ckpt, pair: tuple[Place, Place], damage: Callable[[Path], object]
) -> None:
    """The other place has the size and the header, and lacks a tensor that this one has."""
    near, far = pair
    damage(near.root / far.flip(far.ids[0], "model/frozen0"))
    hurt = far.files()
    assert ckpt("repair", near.root, "--from", far.root).code == 0
    assert near.files() == near.was and far.files() == hurt


def test_a_fork_does_not_get_the_manifest_of_its_origin(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """The snapshot has the same name in both, and a manifest says whose run it is; data files are the same ones."""
    near, _ = pair
    assert ckpt("fork", f"{near.root}#2", tmp_path / "fork").code == 0
    fork = Place(tmp_path / "fork")
    shared = fork.flip(fork.ids[0], "model/frozen1")
    zero(fork.root / names.manifest_name(fork.ids[0]))
    hurt = fork.files()
    result = ckpt("repair", fork.root, "--from", near.root)
    assert result.code == 1 and "mended" not in result.out and fork.files() == hurt
    (fork.root / names.manifest_name(fork.ids[0])).write_bytes(fork.was[names.manifest_name(fork.ids[0])])
    near_hurt = near.files()[shared]
    assert near_hurt != near.was[shared]  # a hard link
    assert ckpt("repair", near.root, "--from", tmp_path / "far").code == 0 and near.files() == near.was
    assert ckpt("repair", fork.root, "--from", near.root).code == 0 and fork.files() == fork.was


@pytest.mark.long
def test_a_bucket_mends_a_disk_and_the_other_way(ckpt: Ckpt, tmp_path: Path, moto: S3Server, bucket: str) -> None:
    """A real S3 server is the other tier."""
    far = {"url": f"s3://{bucket}/run", "storage_options": moto.options()}
    tiers = [{"url": str(tmp_path / "near")}, far]
    train(tiers)
    (tmp_path / "c.yaml").write_text(json.dumps({"tiers": tiers}))
    near, there = Place(tmp_path / "near"), open_storage(far["url"], far["storage_options"])
    hurt = near.flip(near.ids[-1], "model/w")
    shared = near.flip(near.ids[0], "model/frozen3")
    assert ckpt("repair", tmp_path / "c.yaml").code == 0
    assert near.files() == near.was
    for name in (hurt, shared):
        there.put(name, [memoryview(bytes(len(near.was[name])))], exclusive=False)
    assert ckpt("verify", tmp_path / "c.yaml").code == 1
    assert ckpt("repair", tmp_path / "c.yaml").code == 0
    assert there.get_into(hurt, 0, memoryview(out := bytearray(len(near.was[hurt])))) is None
    assert bytes(out) == near.was[hurt]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kills_in_the_middle_of_a_repair_lose_nothing(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """Wherever it is killed, each file is the damaged one or the whole one, and the same command ends it."""
    near, far = pair
    bad = {near.flip(snapshot, "model/w") for snapshot in near.ids} | {near.flip(near.ids[0], "model/frozen0")}
    shutil.copytree(near.root, tmp_path / "hurt")
    hurt, repair, kills = near.files(), ["repair", str(tmp_path / "c.yaml")], list[int]()
    for call in range(FIRST_CALL, 10_000, EVERY_CALL):
        command = [sys.executable, "-m", "tests.cli.mortal", str(call), *repair]
        process = interpreters.run(command, capture_output=True, timeout=WAIT_SECONDS, check=False)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr.decode()
        there = near.files()
        assert {name: there[name] for name in near.was if name not in bad} == {
            name: data for name, data in near.was.items() if name not in bad
        }
        kills.append(sum(there[name] == near.was[name] for name in bad))
        assert all(there[name] in (hurt[name], near.was[name]) for name in bad) and far.files() == far.was
        assert ckpt(*repair).code == 0
        assert {name: data for name, data in near.files().items() if name in near.was} == near.was
        if process.returncode == 0:
            break
        shutil.rmtree(near.root)
        shutil.copytree(tmp_path / "hurt", near.root)
    assert len(kills) > 4 and {0, len(bad)} < set(kills)  # in the middle, too
    with Checkpointer(str(near.root)) as run:
        assert same(run.load(), state(3))


def test_a_scrub_mends_and_says_so_with_exit_code_0(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """What is damaged at each place; a read-only scrub names it, ends with 1 and writes nothing."""
    near, far = pair
    damaged = [near.flip(near.ids[0], "model/frozen1"), far.flip(far.ids[-1], "model/w")]
    zero(near.root / names.manifest_name(near.ids[1]))
    hurt = near.files()
    tried = ckpt("scrub", tmp_path / "c.yaml", "--dry-run")
    assert tried.code == 1 and near.files() == hurt
    assert not (near.root / names.SCRUB).exists() and not (far.root / names.SCRUB).exists()
    done = ckpt("scrub", tmp_path / "c.yaml")
    assert (done.code, done.err) == (0, "")
    assert all(f"{name}  mended from" in done.out for name in damaged)
    assert near.files() == far.files() == near.was
    assert ckpt("verify", tmp_path / "c.yaml").code == 0
    found = ckpt("scrub", near.root, "--json").json
    assert (found["ok"], found["mended"], found["dry_run"]) == (True, [], False)


def test_a_scrub_leaves_out_what_was_found_whole_within_the_given_time(
    ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is new, damaged or gone is seen all the same; without --every, and when the time is over, all is read."""
    near, _ = pair

    def read_bytes(*options: object) -> int:
        found = ckpt("scrub", near.root, "--json", *options).json
        assert found["ok"]
        return sum(one["read_bytes"] for one in found["snapshots"])

    whole = read_bytes("--every", "7d")
    assert whole > 0 and read_bytes("--every", "7d") == 0 and read_bytes() == whole
    assert read_bytes("--every", "7d") == 0
    later = time.time() + 8 * 86_400.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert read_bytes("--every", "7d") == whole
    monkeypatch.undo()
    assert read_bytes("--every", "7d") == whole  # a time that has not come yet does not count
    train([{"url": str(near.root)}, {"url": str(tmp_path / "far")}], steps=1)
    assert 0 < read_bytes("--every", "7d") < whole
    near.was = near.files()
    gone, short, *_ = sorted((near.root / names.DATA).iterdir())
    gone.unlink()
    truncate(short)
    found = ckpt("scrub", near.root, "--every", "7d", "--from", tmp_path / "far")
    assert found.code == 0 and near.files() == near.was


def test_a_damaged_record_only_makes_a_scrub_read_more(ckpt: Ckpt, pair: tuple[Place, Place]) -> None:
    """`ckpt verify` names it, and the next scrub writes it again."""
    near, _ = pair
    assert ckpt("scrub", near.root).code == 0
    (near.root / names.SCRUB).write_text((near.root / names.SCRUB).read_text().replace("data/", "dato/", 1))
    named = ckpt("verify", near.root)
    assert named.code == 1 and f"{names.SCRUB}  DAMAGED" in named.out and "the next scrub reads everything" in named.out
    found = ckpt("scrub", near.root, "--every", "7d", "--json").json
    assert found["ok"] and sum(one["read_bytes"] for one in found["snapshots"]) > 0
    assert ckpt("verify", near.root).code == 0


def test_a_scrub_waits_for_its_rate(ckpt: Ckpt, pair: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit takes every byte that is read, at the rate that is given."""
    near, _ = pair
    rates, taken = list[float](), list[int]()

    class Watched(Throttle):
        def __init__(self, bytes_per_second: float) -> None:
            super().__init__(bytes_per_second)
            rates.append(bytes_per_second)

        def __call__(self, nbytes: int) -> float:
            taken.append(nbytes)
            return super().__call__(nbytes)

    monkeypatch.setattr(repair, "Throttle", Watched)
    found = ckpt("scrub", near.root, "--rate", "50MB/s", "--json").json
    assert rates == [50e6] and sum(taken) == sum(one["read_bytes"] for one in found["snapshots"]) > 0
    assert "--rate" in ckpt("scrub", near.root, "--rate", "fast").err


def test_a_scrub_of_a_run_that_is_being_written_names_what_is_damaged(
    ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path
) -> None:
    """It reads, mends nothing, and says who writes the run."""
    near, _ = pair
    name = near.flip(near.ids[0], "model/frozen1")
    with acquire(open_storage(str(near.root))):
        held = ckpt("scrub", tmp_path / "c.yaml")
    assert held.code == 2 and "is being written by" in held.err
    assert f"model/frozen1: {name}" in held.out and "mended from" not in held.out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_scrub_that_is_killed_continues_where_it_was(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """Wherever it is killed, no file is half mended, and the next one reads only what was not found whole yet."""
    near, far = pair
    near.flip(near.ids[-1], "model/w")
    shutil.copytree(near.root, tmp_path / "hurt")
    hurt, scrub, read = near.files(), ["scrub", str(near.root), "--from", str(far.root)], list[int]()
    for call in range(FIRST_CALL, 10_000, EVERY_CALL // 2):
        command = [sys.executable, "-c", MORTAL_SCRUB, str(call), *scrub]
        process = interpreters.run(command, capture_output=True, timeout=WAIT_SECONDS, check=False)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr.decode()
        there = near.files()
        assert all(there[name] in (hurt[name], near.was[name]) for name in near.was) and far.files() == far.was
        left = ckpt(*scrub, "--every", "1d", "--json", "--dry-run").json["snapshots"]
        read.append(sum(one["read_bytes"] for one in left))
        assert ckpt(*scrub, "--every", "1d").code == 0
        assert near.was.items() <= near.files().items()
        if process.returncode == 0:
            break
        shutil.rmtree(near.root)
        shutil.copytree(tmp_path / "hurt", near.root)
    assert read[-1] == 0 and len(set(read)) > 3, read


@pytest.mark.long
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_run_mends_its_nearest_tier_while_it_trains(
    pair: tuple[Place, Place], writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume goes around the damage, and the writer of the next snapshot mends it under the lease that it has."""
    near, far = pair
    name = near.flip(near.ids[-1], "model/w")
    tiers = [{"url": str(near.root)}, {"url": str(far.root)}]
    options = {"tiers": tiers, "keep": {"last": 9}, "writer": writer, "wait_at_end": WAIT_SECONDS}
    caplog.set_level("INFO", "ckpt_engine")
    with Checkpointer(options) as run:
        assert same(run.load(), state(3))
        run.save(state(4), step=4).wait(WAIT_SECONDS)
        deadline, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while near.files()[name] != near.was[name]:
            assert time.monotonic() < deadline
            pause.wait(0.05)
    assert near.was.items() <= near.files().items() and far.was.items() <= far.files().items()
    assert f"{name} at {near.root} was damaged and is mended from {far.root}" in caplog.text
