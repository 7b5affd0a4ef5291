"""`ckpt repair`: damaged files are replaced by the same bytes from another place, and by nothing else."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server
from tests.snapshot.passage import same

Ckpt = Callable[..., Any]
WAIT_SECONDS = 60.0
FIRST_CALL, EVERY_CALL = 5, 23
"""Of the calls to the disk, those before which the command is killed."""


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
    assert near.files() == {**near.was, lost: hurt}
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


@pytest.mark.timeout(300)
def test_kills_in_the_middle_of_a_repair_lose_nothing(ckpt: Ckpt, pair: tuple[Place, Place], tmp_path: Path) -> None:
    """Wherever it is killed, each file is the damaged one or the whole one, and the same command ends it."""
    near, far = pair
    bad = {near.flip(snapshot, "model/w") for snapshot in near.ids} | {near.flip(near.ids[0], "model/frozen0")}
    shutil.copytree(near.root, tmp_path / "hurt")
    hurt, repair, kills = near.files(), ["repair", str(tmp_path / "c.yaml")], list[int]()
    for call in range(FIRST_CALL, 10_000, EVERY_CALL):
        command = [sys.executable, "-m", "tests.cli.mortal", str(call), *repair]
        process = subprocess.run(command, capture_output=True, timeout=WAIT_SECONDS, check=False)
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
