"""`ckpt verify`: every kind of damage is found, named and ends with exit code 1."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.store import names as layout
from ckpt_engine.store import pins
from ckpt_engine.store.container import PIECE_BYTES
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository, RunRecord, encode_record
from ckpt_engine.store.storage import open_storage
from ckpt_engine.tools.check_run import Checker

Ckpt = Callable[..., Any]


def test_whole_snapshots_verify(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Every byte is read; exit code 0."""
    ids = [run_folder.add(step, arrays) for step in (1, 2)]
    result = ckpt("verify", run_folder.path)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [*(f"{i}  ok" for i in ids), "2 of 2 snapshots whole, 50 kB read"]
    found = ckpt("verify", run_folder.path, "--json").json
    assert found["ok"] is True
    assert [row["read_bytes"] for row in found["snapshots"]] == [24832, 24832]


def test_a_flipped_bit_names_the_tensor(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """One bit in one tensor of one snapshot: that one is named, the others are whole."""
    bad, good = run_folder.add(1, arrays), run_folder.add(2, arrays)
    run_folder.flip(bad, "state_dict/layer.bias", at=255)
    result = ckpt("verify", run_folder.path)
    assert result.code == 1
    assert f"{bad}  DAMAGED\n  [CKPT401] state_dict/layer.bias: data/{bad}-r00000.safetensors: bytes " in result.out
    assert f"{good}  ok" in result.out
    assert "layer.weight" not in result.out
    assert "1 of 2 snapshots whole" in result.out
    assert ckpt("verify", run_folder.path, "2").code == 0
    assert ckpt("verify", run_folder.path, "latest", bad).code == 1


@pytest.mark.parametrize(("hurt", "taken"), [((3,), 2), ((2,), 3), ((2, 3), 1)])
def test_damage_ends_with_what_a_resume_takes(
    ckpt: Ckpt, run_folder: Any, arrays: Any, hurt: tuple[int, ...], taken: int
) -> None:
    """The newest whole snapshot, and the next command; a run without damage needs neither."""
    ids = {step: run_folder.add(step, arrays) for step in (1, 2, 3)}
    assert "a resume takes" not in ckpt("verify", run_folder.path).out
    for step in hurt:
        run_folder.flip(ids[step], "state_dict/layer.bias")
    *_, resume, do = ckpt("verify", run_folder.path).out.splitlines()
    assert resume == f"a resume takes {ids[taken]}"
    assert do.startswith(
        f"do:  `ckpt repair {run_folder.path} --from OTHER` mends it from another copy of the run; `ckpt cp "
    )
    assert "a resume takes" not in ckpt("verify", run_folder.path, "3").out


def test_where_no_snapshot_is_whole_a_resume_is_refused(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """As the engine does."""
    run_folder.flip(run_folder.add(1, arrays), "state_dict/layer.bias")
    assert "no snapshot is whole here: a resume is refused\n" in ckpt("verify", run_folder.path).out


def test_a_whole_copy_on_another_tier_is_what_a_resume_takes(
    ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path
) -> None:
    """Of a ckpt.yaml all copies count."""
    run_folder.add(1, arrays)
    newest = run_folder.add(2, arrays)
    shutil.copytree(run_folder.path, tmp_path / "far")
    run_folder.flip(newest, "state_dict/layer.bias")
    (tmp_path / "c.yaml").write_text(f"tiers: [{run_folder.path}, {tmp_path / 'far'}]\n")
    assert f"a resume takes {newest}, or a newer one" in ckpt("verify", tmp_path / "c.yaml").out


def test_damage_in_a_later_piece_is_found(ckpt: Ckpt, run_folder: Any) -> None:
    """An entry of several pieces is checked in all of them, and once."""
    snapshot = run_folder.add(1, {"a/big": np.arange(PIECE_BYTES // 4 + 1000, dtype="int32"), "a/s": np.ones(3)})
    with run_folder.data_file(snapshot).open("r+b") as file:
        file.seek(-30, 2)  # the small entry is 24 bytes at the end
        file.write(b"?")
    (row,) = ckpt("verify", run_folder.path, "--json").json["snapshots"]
    assert [problem["entry"] for problem in row["problems"]] == ["a/big"]
    assert row["problems"][0]["message"].startswith(f"bytes {4096 + PIECE_BYTES:,} to ")
    assert row["read_bytes"] == PIECE_BYTES + 4000 + 24


def test_every_single_byte_matters(run_folder: Any) -> None:
    """Whichever byte of data file or manifest is changed, the snapshot does not verify."""
    snapshot = run_folder.add(1, {"a/x": np.arange(8, dtype="float32"), "a/y": np.zeros((2, 0), "float32")})
    manifest, data = run_folder.manifest_file(snapshot), run_folder.data_file(snapshot)
    text_bytes = data.read_bytes().index(b"}}") + 2  # of the header, without its padding
    for path, offsets in {
        manifest: range(manifest.stat().st_size),
        data: [*range(text_bytes), 2000, 4095, *range(4096, 4128)],
    }.items():
        whole = path.read_bytes()
        for offset in offsets:
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 2]) + whole[offset + 1 :])
            assert not _check(run_folder.path, snapshot).ok, (path.name, offset)
        path.write_bytes(whole)
    assert _check(run_folder.path, snapshot).ok


def _check(path: Path, snapshot: str) -> Any:
    repository = Repository(open_storage(path))
    return Checker(repository, lambda nbytes: None).check(snapshot)


@pytest.mark.parametrize("keep", [0, 4, 100, 4096, 5000])
def test_truncated_data_is_found_at_any_length(run_folder: Any, arrays: Any, keep: int) -> None:
    """The file's size and each tensor that is hit are reported."""
    snapshot = run_folder.add(1, arrays)
    whole = run_folder.data_file(snapshot).read_bytes()
    run_folder.data_file(snapshot).write_bytes(whole[:keep])
    verdict = _check(run_folder.path, snapshot)
    assert f"has {keep:,} bytes instead of {len(whole):,}" in [problem.message for problem in verdict.problems]
    hit = {problem.entry for problem in verdict.problems if problem.entry}
    assert hit == set(arrays)


def test_a_missing_data_file_says_what_it_held(ckpt: Ckpt, run_folder: Any) -> None:
    """One line for the file, with the first entries."""
    snapshot = run_folder.add(1, {f"a/{i}": np.zeros(3) for i in range(9)})
    run_folder.data_file(snapshot).unlink()
    result = ckpt("verify", run_folder.path)
    assert result.code == 1
    assert f"[CKPT303] data/{snapshot}-r00000.safetensors: missing; it holds a/0, a/1, a/2 and 6 more" in result.out


def test_a_damaged_manifest_is_damage(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """A manifest that even `ls` cannot list is reported as damage."""
    snapshot = run_folder.add(1, arrays)
    run_folder.manifest_file(snapshot).write_bytes(b"")
    result = ckpt("verify", run_folder.path)
    assert result.code == 1
    assert f"snapshots/{snapshot}.json" in result.out


def test_a_swapped_data_file_is_damage(run_folder: Any, arrays: Any) -> None:
    """A valid file of another snapshot is not the one that was written."""
    one = run_folder.add(1, arrays)
    two = run_folder.add(2, {name: array + 1 for name, array in arrays.items()})
    run_folder.data_file(one).write_bytes(run_folder.data_file(two).read_bytes())
    assert {problem.entry for problem in _check(run_folder.path, one).problems} == set(arrays)


def test_what_retention_removes_meanwhile_is_no_damage(run_folder: Any, arrays: Any) -> None:
    """A running job may forget a snapshot between the listing and the reading."""
    snapshot = run_folder.add(1, arrays)
    assert not _check(run_folder.path, snapshot).forgotten
    run_folder.manifest_file(snapshot).unlink()
    verdict = _check(run_folder.path, snapshot)
    assert (verdict.ok, verdict.forgotten) == (True, True)


def test_forgotten_while_its_data_is_read(run_folder: Any, arrays: Any, ckpt: Ckpt) -> None:
    """Manifests go first, then data: missing data with its manifest gone too is retention at work."""
    snapshot = run_folder.add(1, arrays)
    repository = Repository(open_storage(run_folder.path))
    read = repository.read_object

    def read_then_forget(name: str, snapshot: str) -> Any:
        found = read(name, snapshot)
        run_folder.manifest_file(snapshot).unlink()
        run_folder.data_file(snapshot).unlink()
        return found

    repository.read_object = read_then_forget  # type: ignore[method-assign,assignment]
    assert Checker(repository, lambda nbytes: None).check(snapshot).forgotten


def test_many_problems_are_cut_for_people_and_not_for_programs(ckpt: Ckpt, run_folder: Any) -> None:
    """Twenty lines per snapshot; JSON has all."""
    snapshot = run_folder.add(1, {f"a/{i}": np.zeros(3) for i in range(50)})
    file = run_folder.data_file(snapshot)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1200] + b"\1" * 1200)
    result = ckpt("verify", run_folder.path)
    assert "  ... and 30 more\n" in result.out
    assert len(ckpt("verify", run_folder.path, "--json").json["snapshots"][0]["problems"]) == 50


def test_shared_bytes_are_read_once(run_folder: Any, arrays: Any) -> None:
    """Checking a snapshot again costs its manifest only."""
    snapshot = run_folder.add(1, arrays)
    read: list[int] = []
    checker = Checker(run_folder.repository, read.append)
    assert checker.check(snapshot).read_bytes == 24832
    assert checker.check(snapshot).read_bytes == 0
    assert sum(read) == 24832


def test_a_terminal_sees_progress_and_colours(run_folder: Any, arrays: Any) -> None:
    """The bar is on the error stream, so that standard output stays the answer."""
    snapshot = run_folder.add(1, arrays)
    answer, answer_end = pty.openpty()
    bar, bar_end = pty.openpty()
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "verify", str(run_folder.path)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    subprocess.run(command, stdout=answer_end, stderr=bar_end, check=True, timeout=120, env=environment)
    assert b"verifying" in os.read(bar, 100_000)
    assert os.read(answer, 100_000).startswith(f"\x1b[32m{snapshot}  ok\x1b[0m".encode())
    for fd in (answer, answer_end, bar, bar_end):
        os.close(fd)


def test_every_other_file_of_a_run_is_checked_and_comes_with_what_to_do(
    ckpt: Ckpt, run_folder: Any, arrays: Any
) -> None:
    """Record, lease, status, rollback, attempts, catalog, pins and part records; a single snapshot is checked alone."""
    snapshot = run_folder.add(1, arrays)
    storage = open_storage(str(run_folder.path))
    repository = Repository(storage)
    with acquire(storage):
        repository.create_if_absent()
    pins.pin(repository, snapshot, "the best")
    part = layout.part_name(layout.snapshot_id(2, 2), 0)
    names = [
        layout.RECORD,
        layout.LEASE,
        layout.STATUS,
        layout.ROLLBACK,
        layout.ATTEMPTS,
        layout.CATALOG,
        layout.pin_name(snapshot),
        part,
    ]
    said = {}
    for name in names:
        path = run_folder.path / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.write_bytes((before or b"{") + b"?")
        result = ckpt("verify", run_folder.path)
        assert result.code == 1
        assert f"{snapshot}  ok\n{name}  DAMAGED\n  [CKPT40" in result.out
        assert "1 of 1 snapshot whole, 1 other file damaged" in result.out
        found = ckpt("verify", run_folder.path, "--json").json
        assert (found["ok"], [other["file"] for other in found["others"]]) == (False, [name])
        said[name] = found["others"][0]["message"].partition(" → ")[2]
        assert ckpt("verify", run_folder.path, "latest").code == 0
        path.unlink() if before is None else path.write_bytes(before)
    assert said[layout.RECORD].endswith("the next start writes it again")
    assert "`ckpt pin`" in said[layout.pin_name(snapshot)]
    assert all(said.values())
    assert ckpt("verify", run_folder.path).code == 0


def test_a_record_of_another_run_is_damage(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """It would make a healthy tier "another run"."""
    run_folder.add(1, arrays)
    path = run_folder.path / layout.RECORD
    path.write_bytes(encode_record(RunRecord("0" * 32, 1.0)))
    result = ckpt("verify", run_folder.path)
    assert result.code == 1
    assert f"[CKPT401] it is of run {'0' * 32}, the snapshots are of " in result.out
