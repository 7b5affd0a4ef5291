"""`ckpt ls`, `show`, `verify`, `export` and `cp` of a ckpt.yaml with several tiers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage

Ckpt = Callable[..., Any]


@dataclass(frozen=True)
class Tiered:
    """A run on two tiers: `old` is only on the further tier, `both` on both, `new` only on the nearest."""

    yaml: Path
    near: Any
    far: Path
    old: str
    both: str
    new: str

    @property
    def urls(self) -> tuple[str, str]:
        return f"file://{self.near.path}", f"file://{self.far}"

    def flip_near(self, entry: str) -> None:
        self.near.flip(self.both, entry)


@pytest.fixture
def tiered(run_folder: Any, arrays: Any, tmp_path: Path, ckpt: Ckpt) -> Tiered:
    old, both = run_folder.add(10, arrays), run_folder.add(20, arrays)
    far = tmp_path / "far"
    assert ckpt("cp", run_folder.path, far).code == 0
    run_folder.repository.forget([old])
    run_folder.data_file(old).unlink()
    new = run_folder.add(30, arrays)
    yaml = tmp_path / "ckpt.yaml"
    yaml.write_text(f"tiers: [{run_folder.path}, {far}]\n")
    return Tiered(yaml, run_folder, far, old, both, new)


def cut(tiered: Tiered) -> None:
    """The far tier is away."""
    shutil.rmtree(tiered.far)
    tiered.far.write_text("not a folder")


def test_ls_says_where_each_snapshot_is(ckpt: Ckpt, tiered: Tiered) -> None:
    """A column with the numbers of the tiers, and a line for each tier that says what it has."""
    done = ckpt("ls", tiered.yaml)
    lines = done.out.splitlines()
    assert done.code == 0
    assert lines[0].split() == ["snapshot", "step", "epoch", "taken", "size", "tiers", "why", "metrics"]
    at = lines[0].index("tiers")
    assert [(line.split()[0], line[at:].split("  ")[0].strip()) for line in lines[1:4]] == [
        (tiered.old, "2"),
        (tiered.both, "1 2"),
        (tiered.new, "1"),
    ]
    assert lines[4].startswith("tier 1: 2 snapshots, ") and lines[4].endswith(f"on disk at {tiered.near.path}")
    assert lines[5].startswith("tier 2: 2 snapshots, ") and lines[5].endswith(f"on disk at {tiered.far}")
    found = ckpt("ls", tiered.yaml, "--json").json
    assert [(row["id"], row["tiers"]) for row in found["snapshots"]] == [
        (tiered.old, [tiered.urls[1]]),
        (tiered.both, list(tiered.urls)),
        (tiered.new, [tiered.urls[0]]),
    ]
    assert [(tier["url"], tier["snapshots"]) for tier in found["tiers"]] == [(url, 2) for url in tiered.urls]
    assert found["data_bytes"] == sum(tier["data_bytes"] for tier in found["tiers"])
    assert found["away"] == []


def test_ls_keeps_the_numbers_of_tiers_when_the_first_is_away(ckpt: Ckpt, tiered: Tiered) -> None:
    """Tier 2 stays tier 2, and what is left out is said, also as JSON; the exit code is that of success."""
    shutil.rmtree(tiered.near.path)
    tiered.near.path.write_text("not a folder")
    done = ckpt("ls", tiered.yaml)
    assert done.code == 0
    assert "tier 2: 2 snapshots" in done.out and "tier 1" not in done.out
    assert f"left out: {tiered.near.path}: [CKPT305]" in done.out
    found = ckpt("ls", tiered.yaml, "--json").json
    assert [(one["url"], one["code"]) for one in found["away"]] == [(tiered.urls[0], "CKPT305")]


def test_ls_of_an_empty_tier_and_of_another_run(ckpt: Ckpt, tiered: Tiered, arrays: Any, tmp_path: Path) -> None:
    """Nothing copied yet is nothing wrong; a tier with snapshots of another run is left out, and said."""
    tiered.yaml.write_text(f"tiers: [{tiered.near.path}, {tmp_path / 'unused'}]\n")
    done = ckpt("ls", tiered.yaml)
    assert done.code == 0 and "tier 2: 0 snapshots" in done.out
    other = type(tiered.near)(tmp_path / "other")
    strange = other.add(99, arrays)
    tiered.yaml.write_text(f"tiers: [{tiered.near.path}, {other.path}]\n")
    done = ckpt("ls", tiered.yaml)
    assert done.code == 0 and strange not in done.out
    assert f"left out: {other.path}: [CKPT402]" in done.out and "holds another run" in done.out


def test_damage_is_of_a_tier(ckpt: Ckpt, tiered: Tiered) -> None:
    """A manifest that is damaged on one tier is listed from the other one, and the damage is named with its tier."""
    tiered.near.manifest_file(tiered.both).write_bytes(b"\0" * 100)
    done = ckpt("ls", tiered.yaml)
    assert f"{tiered.both}  damaged on tier 1: [CKPT4" in done.out
    rows = ckpt("ls", tiered.yaml, "--json").json
    assert [(bad["id"], bad["tier"]) for bad in rows["damaged"]] == [(tiered.both, tiered.urls[0])]
    assert [row["tiers"] for row in rows["snapshots"] if row["id"] == tiered.both] == [[tiered.urls[1]]]


def test_show_finds_a_snapshot_on_any_tier(ckpt: Ckpt, tiered: Tiered) -> None:
    """Each copy is a line; `latest` is the newest of all tiers; a damaged manifest is read elsewhere."""
    done = ckpt("show", tiered.yaml, "10")
    assert done.code == 0 and tiered.old in done.out
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("copy")] == [str(tiered.far)]
    assert ckpt("show", tiered.yaml, "--json").json["snapshot"]["id"] == tiered.new
    tiered.near.manifest_file(tiered.both).write_bytes(b"\0" * 100)
    found = ckpt("show", tiered.yaml, "20", "--json").json
    assert [(tier["url"], tier["error"] is None) for tier in found["tiers"]] == [
        (tiered.urls[0], False),
        (tiered.urls[1], True),
    ]
    assert f"copy          {tiered.near.path}, damaged: [CKPT4" in ckpt("show", tiered.yaml, "20").out


def test_what_an_absent_tier_may_have_is_said(ckpt: Ckpt, tiered: Tiered) -> None:
    """A snapshot that cannot be found while a tier is away may be there."""
    cut(tiered)
    done = ckpt("show", tiered.yaml, "10")
    assert done.code == 2
    assert f"no snapshot '10' at {tiered.near.path}" in done.err
    assert f"{tiered.far} may have it, but does not answer" in done.err
    assert f"left out: {tiered.far}: [CKPT305]" in ckpt("show", tiered.yaml, "30").out


def test_verify_reads_every_copy(ckpt: Ckpt, tiered: Tiered) -> None:
    """Damage to one of two copies is found, named with its tier, and ends with exit code 1."""
    good = ckpt("verify", tiered.yaml)
    assert good.code == 0
    assert [line for line in good.out.splitlines() if line.startswith("/")] == [str(tiered.near.path), str(tiered.far)]
    assert good.out.splitlines()[-1].startswith("4 of 4 copies whole, ")
    path = tiered.far / names.data_name(tiered.both)
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    bad = ckpt("verify", tiered.yaml)
    assert bad.code == 1
    lines = bad.out.splitlines()
    assert f"{tiered.both}  DAMAGED" in lines[lines.index(str(tiered.far)) :]
    assert f"{tiered.both}  ok" in lines[: lines.index(str(tiered.far))]
    assert any(line.startswith("3 of 4 copies whole, ") for line in lines)
    rows = ckpt("verify", tiered.yaml, "20", "--json")
    assert rows.code == 1
    assert [(row["tier"], row["ok"]) for row in rows.json["snapshots"]] == [
        (tiered.urls[0], True),
        (tiered.urls[1], False),
    ]


def test_verify_goes_on_without_a_tier(ckpt: Ckpt, tiered: Tiered) -> None:
    """What is there is whole: exit code 0. That a tier was not looked at is said."""
    cut(tiered)
    done = ckpt("verify", tiered.yaml)
    assert done.code == 0
    assert "2 of 2 copies whole" in done.out
    assert f"left out: {tiered.far}: [CKPT305]" in done.out
    assert [one["url"] for one in ckpt("verify", tiered.yaml, "--json").json["away"]] == [tiered.urls[1]]


def test_export_reads_any_tier_and_mends(ckpt: Ckpt, tiered: Tiered, arrays: Any, tmp_path: Path) -> None:
    """A snapshot only on the further tier, and one damaged on the nearest: the bytes are right, and a note says it."""
    out = tmp_path / "old.safetensors"
    done = ckpt("export", tiered.yaml, "10", out, "--to", "safetensors")
    assert done.code == 0 and f"read from {tiered.far}" in done.out
    tiered.flip_near("state_dict/layer.bias")
    out = tmp_path / "both.safetensors"
    done = ckpt("export", tiered.yaml, "20", out, "--to", "safetensors", "--json")
    assert done.code == 0
    assert done.json["source"] == tiered.urls[0]
    assert any("'state_dict/layer.bias'" in note and tiered.urls[1] in note for note in done.json["notes"])
    assert (load_file(out)["layer.bias"] == arrays["state_dict/layer.bias"]).all()


def test_export_of_what_is_left_of_a_file(ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path) -> None:
    """The tail of a file is lost: the weights before it can be had all the same; what was lost cannot."""
    snapshot = run_folder.add(1, arrays)
    path = run_folder.data_file(snapshot)
    path.write_bytes(path.read_bytes()[:-100])
    done = ckpt("export", run_folder.path, tmp_path / "w.safetensors", "--to", "safetensors")
    assert done.code == 0 and "not whole: " in done.out
    assert (load_file(tmp_path / "w.safetensors")["layer.bias"] == arrays["state_dict/layer.bias"]).all()
    lost = ckpt("export", run_folder.path, tmp_path / "o.safetensors", "--to", "safetensors", "--only", "optimizer")
    assert lost.code == 2 and "[CKPT401]" in lost.err
    assert not (tmp_path / "o.safetensors").exists()


def test_cp_takes_each_snapshot_from_where_it_is_whole(ckpt: Ckpt, tiered: Tiered, tmp_path: Path) -> None:
    """The snapshots of all tiers are copied; one that is damaged on the nearest tier comes from the further one."""
    tiered.flip_near("optimizer/exp_avg")
    done = ckpt("cp", tiered.yaml, tmp_path / "copy")
    assert done.code == 0 and done.out.startswith("3 snapshots copied")
    copy = Repository(LocalStorage(tmp_path / "copy"))
    assert [one.id for one in copy.list()] == [tiered.old, tiered.both, tiered.new]
    assert ckpt("verify", tmp_path / "copy").code == 0
