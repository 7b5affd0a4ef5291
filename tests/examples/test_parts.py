"""The demo's parts: the record, the snapshot folder seen from outside, the overhead numbers, the output folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from demo.folder import SnapshotFolder
from demo.main import options
from demo.overhead import Block, Overhead, Pair, pair_up, read_blocks
from demo.record import Start, Step, Validation, read_record
from demo.s3 import Remote
from demo.settings import MARK, Settings, claim

from ckpt_engine.config import load_config
from ckpt_engine.store.names import data_name, manifest_name, snapshot_id
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage

README = Path(__file__).resolve().parents[2] / "examples" / "README.md"


def line(kind: str, **values: object) -> bytes:
    return json.dumps({"kind": kind, "time": 1.0, "pid": 2, **values}).encode() + b"\n"


def test_a_record_is_read_in_pieces_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    """A line without its end may still be growing; a line torn by a kill is closed off by the next process."""
    path = tmp_path / "record.jsonl"
    step = line("step", step=1, epoch=0, batch=0, loss="0x1p+0", lr="0x1p-3", samples=[[3, 4]])
    path.write_bytes(b"\n" + line("start", step=0) + step[:20])
    entries, offset = read_record(path)
    assert entries == [Start(1.0, 2, 0)]
    assert read_record(path, offset) == ([], offset)
    with path.open("ab") as file:
        file.write(b"\n" + step + line("validation", step=1, loss="0x1p+1"))
    entries, offset = read_record(path, offset)
    assert entries == [Step(1.0, 2, 1, 0, 0, "0x1p+0", "0x1p-3", ((3, 4),)), Validation(1.0, 2, 1, "0x1p+1")]
    assert offset == path.stat().st_size


def test_the_snapshot_folder_tells_what_is_durable_and_what_is_unfinished(tmp_path: Path) -> None:
    """A snapshot counts from its manifest on; what its writer has under a temporary name is unfinished."""
    folder = SnapshotFolder(tmp_path)
    assert (folder.look(), folder.unfinished()) == ([], None)
    seen = []

    class Watched(Disk):
        def link(self, source: str, target: str) -> None:
            seen.append(folder.unfinished())
            super().link(source, target)

    storage = LocalStorage(tmp_path, disk=Watched())
    snapshot = snapshot_id(3, 42)
    storage.put(data_name(snapshot), [memoryview(b"x" * 10)])
    assert folder.look() == []
    storage.put(manifest_name(snapshot), [memoryview(b"{}")])
    (durable,) = folder.look()
    assert (durable.snapshot, durable.step) == (snapshot, 42)
    assert folder.look() == []
    assert folder.unfinished() is None
    assert [(one.kind, one.nbytes) for one in seen if one] == [("data file", 10), ("manifest", 2)]
    storage.delete(manifest_name(snapshot))
    assert folder.look() == []
    assert folder.seen == [durable]


def pair(percent: float, seconds: float = 10.0) -> Pair:
    return Pair(Block(seconds, 8.0, 0, None), Block(seconds * (1.0 + percent / 100.0), 8.08, 3, 0.5))


def test_pairs_are_neighbours_whichever_came_first() -> None:
    """The order within a pair alternates; a block that is left over is not used."""
    plain, saving = Block(1.0, 0.9, 0, None), Block(1.1, 1.0, 2, 0.4)
    assert pair_up([plain, saving, saving, plain, plain]) == (Pair(plain, saving), Pair(plain, saving))


def test_the_measured_overhead_is_the_median_of_all_pairs() -> None:
    """No pair is left out, and snapshots are counted."""
    overhead = Overhead(1.0, 40, (pair(-1.0), pair(0.5), pair(9.0)))
    assert overhead.percent == pytest.approx(0.5)
    assert overhead.cpu_percent == pytest.approx(1.0)
    assert overhead.own_percent == 0.5
    assert overhead.snapshots == 9
    assert overhead.noise_percent == 0.0


@pytest.mark.parametrize(
    ("percents", "verdict"),
    [
        ((0.3, 0.4, 0.5, 0.4, 0.3), "within"),
        ((1.4, 1.5, 1.5, 1.6, 1.4), "over"),
        ((-8.0, 0.4, 9.0, -3.0, 7.0), "undecided"),
        ((0.1,), "undecided"),
    ],
)
def test_the_verdict_says_when_noise_is_larger_than_the_distance_to_the_budget(
    percents: tuple[float, ...], verdict: str
) -> None:
    """A number that could as well be on the other side of the budget proves nothing."""
    overhead = Overhead(1.0, 40, tuple(pair(percent) for percent in percents))
    assert overhead.verdict == verdict
    assert overhead.summary.startswith("not decided") == (verdict == "undecided")
    assert json.loads(json.dumps(overhead.to_json(), allow_nan=False))["verdict"] == verdict


def test_a_machine_that_is_busy_with_other_things_decides_nothing() -> None:
    """Pairs may agree by accident although the same training takes twice as long a minute later."""
    overhead = Overhead(1.0, 40, (pair(1.4, 10.0), pair(1.5, 20.0), pair(1.6, 12.0)))
    assert overhead.verdict == "undecided"


def test_blocks_are_read_while_they_are_written(tmp_path: Path) -> None:
    """A line that is not finished is not a block yet, and no file is no block."""
    path = tmp_path / "blocks.jsonl"
    assert read_blocks(path) == []
    path.write_text('{"seconds": 1.5, "cpu_seconds": 1.4, "snapshots": 0, "own_percent": null}\n{"seconds": 2')
    assert read_blocks(path) == [Block(1.5, 1.4, 0, None)]


def test_the_options_of_the_demo_are_a_configuration_with_and_without_s3(tmp_path: Path) -> None:
    """One folder, or a folder and then a bucket; a space in a path is no problem."""
    settings = Settings(tmp_path / "a b", 0, 1, 48, 16, 128, 1, "1%", "5 s", 0, 12, None, "s3")
    settings.out.mkdir()
    options = {"key": "demo", "secret": "demo", "client_kwargs": {"endpoint_url": "http://127.0.0.1:1"}}
    for remote in (None, Remote("s3://demo/run", options)):
        settings.yaml.write_text(settings.yaml_text(remote))
        tiers = load_config(settings.yaml).tiers
        assert tiers[0].url == str(settings.snapshots)
        assert [(tier.url, tier.storage_options) for tier in tiers[1:]] == (
            [] if remote is None else [(remote.url, remote.options)]
        )


def test_only_what_a_demo_made_is_removed_from_its_output_folder(tmp_path: Path) -> None:
    """A folder of somebody else is refused; in its own folder the demo leaves foreign files alone."""
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / "killed").write_text("mine")
    with pytest.raises(FileExistsError, match="--out"):
        claim(foreign)
    assert (foreign / "killed").read_text() == "mine"

    out = tmp_path / "out"
    claim(out)
    (out / "killed").mkdir()
    (out / "killed" / "record.jsonl").write_text("old")
    (out / "notes.txt").write_text("mine")
    claim(out)
    assert sorted(path.name for path in out.iterdir()) == [MARK, "notes.txt"]


def test_the_readme_documents_every_option_and_no_other() -> None:
    """The table of options is complete and current."""
    rows = [row for row in README.read_text().splitlines() if row.startswith("| `--")]
    documented = {name for row in rows for name in re.findall(r"--[a-z-]+", row.split("|")[1])}
    assert documented == {name for action in options()._actions for name in action.option_strings} - {"-h", "--help"}
