"""Importing a file costs a multiple of its size, whatever it makes of its few bytes."""

from __future__ import annotations

import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckpt_engine.cli.main import commands
from ckpt_engine.errors import CkptError, CorruptError, MismatchError
from ckpt_engine.interop.file_bounds import require_bounded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected pickle protocol")


def imported(source: Path) -> BaseException | None:
    """How importing it ends."""
    done = CliRunner().invoke(commands, ["import", str(source), str(source.parent / "run"), "--step", "1", "--dry-run"])
    return None if done.exit_code == 0 else done.exception


def shared(levels: int = 30) -> Any:
    """Nested lists, each of which has the one before it twice."""
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def cycle() -> Any:
    value: list[Any] = [1]
    value.append(value)
    return value


BLOB = b"x" * 100_000
LARGER = {
    "shared lists": shared,
    "shared lists as keys of a dict": lambda: {"a": shared(), "b": OrderedDict(c=shared())},
    "deep": lambda: nested(400),
    "itself": cycle,
    "a tensor that repeats": lambda: torch.zeros(1).expand(2**40),
    "bytes many times": lambda: [BLOB] * 20_000,
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("make", LARGER.values(), ids=LARGER)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_what_is_far_larger_than_its_file_is_refused(make: Callable[[], Any], legacy: bool, tmp_path: Path) -> None:
    """Before anything goes through it: lists shared thirty levels deep are a thousand million values."""
    torch.save({"a": make()}, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    assert isinstance(imported(tmp_path / "file.pt"), MismatchError)


def test_what_is_shared_as_trainers_share_it_is_taken() -> None:
    """Tied weights, numbers that are in every group, and views of one storage cost what they are."""
    weight, betas = torch.randn(1000), (0.9, 0.99)
    state = {"a": weight, "b": weight, "c": [weight[i : i + 10] for i in range(900)], "groups": [{"betas": betas}] * 50}
    require_bounded(state, 10_000, "it")


def rewritten(source: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write a zip file again with other content."""
    with zipfile.ZipFile(source) as opened:
        parts = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(source, "w", method) as made:
        for name, content in parts.items():
            made.writestr(name, change(name, content))


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    """torch compresses nothing: what is in the file cannot be more than the file."""
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", lambda _, content: content, zipfile.ZIP_DEFLATED)
    assert isinstance(imported(tmp_path / "file.pt"), CorruptError)


ROOM = {
    "a bytearray": b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x10\x00\x85R.",
    "a memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes to come": b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.",
}


@pytest.mark.parametrize("data", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("form", ["zip", "legacy", "dcp"])
def test_no_pickle_makes_room_for_what_it_does_not_have(data: bytes, form: str, tmp_path: Path) -> None:
    """A few bytes of a pickle can ask for any number of bytes."""
    source = tmp_path / "source"
    if form == "zip":
        torch.save({"a": 1}, source)
        rewritten(source, lambda name, content: data if name.endswith("data.pkl") else content)
    elif form == "legacy":
        source.write_bytes(data)
    else:
        source.mkdir()
        (source / ".metadata").write_bytes(data)
    assert isinstance(imported(source), CkptError)


def test_a_description_changes_no_class_of_torch(tmp_path: Path) -> None:
    """The classes that it names are its own: what it puts into them is gone with it."""
    source = tmp_path / "source"
    source.mkdir()
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    state = pickle.dumps((None, {"poisoned": 1}), protocol=2)[2:-1]
    (source / ".metadata").write_bytes(b"\x80\x02" + name + state + b"b.")
    assert isinstance(imported(source), CkptError)
    assert not hasattr(dcp.metadata.Metadata, "poisoned")


def test_a_folder_that_names_the_same_bytes_again_and_again_is_refused(tmp_path: Path) -> None:
    """Each item of a dcp folder is stored once."""
    source = tmp_path / "source"
    dcp.save({f"w{n}": torch.full((500,), float(n)) for n in range(9)}, checkpoint_id=source)
    described = pickle.loads((source / ".metadata").read_bytes())
    largest = max(described.storage_data.values(), key=lambda item: item.offset)
    for item in described.storage_data.values():
        item.offset, item.length = 0, largest.offset + largest.length
    (source / ".metadata").write_bytes(pickle.dumps(described))
    assert isinstance(imported(source), CkptError)


def test_a_file_of_lightning_without_its_counters_takes_the_step_that_is_given(tmp_path: Path) -> None:
    """What a file does not say is asked for; it is no error in the middle."""
    source = tmp_path / "source.ckpt"
    torch.save({"pytorch-lightning_version": "2", "state_dict": {"w": torch.ones(2)}}, source)
    assert imported(source) is None


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(changed))
        changed[at : at + rng.choice([0, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 1, 4]))
    return bytes(changed) or b"x"


def campaign(folder: Path, mutants: int, seed: int = 0) -> list[tuple[int, BaseException]]:
    """Import so many mutants of files and folders; those that end otherwise than with an error of ours."""
    optimizer = {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    plain = {
        "pytorch-lightning_version": "2",
        "global_step": 3,
        "epoch": 1,
        "b": bytearray(b"abc"),
        "t": (1, 2.5, None),
    }
    state = {"state_dict": {"w": torch.randn(4, 5)}, "optimizer": optimizer, **plain}
    torch.save(state, folder / "zip.ckpt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    dcp.save(state, checkpoint_id=folder / "dcp")
    found = []
    for number in range(seed, seed + mutants):
        rng = random.Random(number)
        form = rng.choice(["zip", "pickle", "legacy", "dcp", "item"])
        target = folder / f"{number}" / ("source" if form in ("dcp", "item") else "source.ckpt")
        target.parent.mkdir()
        if form in ("dcp", "item"):
            target.mkdir()
            for file in (folder / "dcp").iterdir():
                chosen = (file.name == ".metadata") == (form == "dcp")
                (target / file.name).write_bytes(mutated(rng, file.read_bytes()) if chosen else file.read_bytes())
        elif form == "pickle":
            target.write_bytes((folder / "zip.ckpt").read_bytes())
            rewritten(
                target, lambda name, content, rng=rng: mutated(rng, content) if name.endswith(".pkl") else content
            )
        else:
            target.write_bytes(mutated(rng, (folder / ("zip.ckpt" if form == "zip" else "legacy.pt")).read_bytes()))
        error = imported(target)
        if error is not None and not isinstance(error, CkptError):
            found.append((number, error))
    return found


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # Python's own, of a text in a damaged pickle
def test_mutants_of_files_are_refused_in_our_words(tmp_path: Path) -> None:
    """Whatever became of a file, importing it ends with a state or an error of ours."""
    assert campaign(tmp_path, 60) == []


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # Python's own, of a text in a damaged pickle
@pytest.mark.slow
def test_thousands_of_mutants_of_files_are_refused_in_our_words(tmp_path: Path) -> None:
    """Many more mutants than in the test above are refused with an error of ours."""
    assert campaign(tmp_path, 2000, seed=1000) == []
