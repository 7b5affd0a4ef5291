"""Repositories written by earlier programs stay readable, and every kind of damage is reported and survived."""

from __future__ import annotations

import filecmp
import json
import math
import shutil
from pathlib import Path

import pytest
import safetensors
import torch
import xxhash

from ckpt_engine import Checkpointer
from ckpt_engine.copy.make_room import prune
from ckpt_engine.errors import CkptError, CorruptError, ForeignError, NewerFormatError
from ckpt_engine.store import names
from ckpt_engine.store.container import digest
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.manifest_codec import encode
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_rules import KeepLast
from ckpt_engine.store.storage.local import LocalStorage
from tests.compat.make_fixtures import ARRAYS, FIRST, HERE, MOMENT, RUN, SECOND, damages, make
from tests.store.samples import files, save

_LOOP = {
    "step": 100,
    "lr": 0.1,
    "best": math.inf,
    "betas": (0.9, 0.999),
    "history": [1, None, True, "grüße"],
}
_UNREADABLE = {
    "manifest-empty": CorruptError,
    "manifest-truncated": CorruptError,
    "manifest-zeros": CorruptError,
    "manifest-bit-flipped": CorruptError,
    "manifest-foreign": ForeignError,
    "manifest-newer": NewerFormatError,
    "manifest-exchanged": CorruptError,
    "manifest-forged": CorruptError,
}
_RECORD = {"record-foreign": ForeignError, "record-newer": NewerFormatError}


@pytest.fixture
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the fixture named by the parameter, a format or a damage, else of v1."""
    name = getattr(request, "param", "v1")
    source = name if (HERE / name).is_dir() else f"damaged/{name}"
    return Path(shutil.copytree(HERE / source, tmp_path / "run"))


def _repository(root: Path) -> Repository:
    return Repository(LocalStorage(root))


def test_the_committed_fixtures_are_what_the_script_makes(tmp_path: Path) -> None:
    """The program of today still writes formats 1 and 4, byte for byte."""
    make(tmp_path)
    made, committed = files(tmp_path), {name for name in files(HERE) if name.startswith(("v1/", "v4/", "damaged/"))}
    assert made == committed
    _, different, errors = filecmp.cmpfiles(tmp_path, HERE, sorted(made), shallow=False)
    assert (different, errors) == ([], [])


def test_a_v1_repository_is_listed(root: Path) -> None:
    """Both snapshots have all that a listing shows, non-finite metrics included."""
    repository = _repository(root)
    older, newer = repository.list()
    assert repository.run_id == RUN
    assert (older.id, older.seq, older.step, older.metrics) == (FIRST, 1, 100, {})
    assert (newer.id, newer.parent, newer.reason, newer.epoch) == (SECOND, FIRST, "interval", 1)
    assert newer.metrics["val_loss"] == 0.25
    assert math.isnan(newer.metrics["accuracy"])
    assert newer.metrics["ratio"] == -math.inf
    assert newer.components == {"model": 24, "optimizer": 32, "rng": 5}


def test_a_v1_repository_is_read_to_the_last_byte(root: Path) -> None:
    """Every array of both snapshots, shared ones and those in several pieces."""
    repository = _repository(root)
    for snapshot, arrays in ((FIRST, ARRAYS), (SECOND, {"optimizer/moment": MOMENT, "rng/torch": ARRAYS["rng/torch"]})):
        manifest = repository.read(snapshot)
        for name, (dtype, shape, data) in arrays.items():
            entry = manifest.entries[name]
            assert (entry.dtype, entry.shape) == (dtype, shape)
            parts = []
            for piece in entry.pieces:
                part = repository.storage.get(manifest.files[piece.file].name, piece.offset, piece.nbytes)
                assert digest(part) == piece.digest
                parts.append(part)
            assert b"".join(parts) == data
        assert encode(manifest) == (root / names.manifest_name(snapshot)).read_bytes()


def test_a_v1_repository_is_read_by_strangers(root: Path) -> None:
    """With nothing but json, xxhash and the safetensors package."""
    text = (root / "snapshots" / f"{SECOND}.json").read_bytes()
    document = json.loads(text)
    body = text[text.index(b'"manifest":') + len(b'"manifest":') : text.rindex(b"}")]
    assert document["digest"] == "xxh3-128:" + xxhash.xxh3_128(body).hexdigest()
    names = [file["name"] for file in document["manifest"]["files"]]
    with safetensors.safe_open(root / names[1], "pt") as data:
        assert torch.equal(data.get_tensor("optimizer/moment"), torch.arange(8.0).reshape(4, 2))
    with safetensors.safe_open(root / names[0], "pt") as data:
        assert data.metadata() == {"snapshot": "fixture"}
        for name, (dtype, shape, raw) in ARRAYS.items():
            tensor = data.get_tensor(name)
            known = dtype != "complex128"
            assert str(tensor.dtype) == (f"torch.{dtype}" if known else "torch.uint8")
            assert tuple(tensor.shape) == (shape if known else (len(raw),))


@pytest.mark.parametrize("root", ["v4"], indirect=True)
def test_a_v4_repository_is_restored(root: Path) -> None:
    """Its component is packed: each array by its schema, also into live tensors."""
    (info,) = _repository(root).list()
    assert json.loads((root / names.manifest_name(info.id)).read_bytes())["manifest"]["version"] == 4
    state = Checkpointer(root).load()
    model = state["model"]
    assert (list(state), list(model), model["lr"]) == (["model"], ["lr", "a", "w", "scales"], 0.1)
    assert torch.equal(model["a"], torch.arange(2.0))
    assert torch.equal(model["w"], torch.arange(2.0, 8.0).reshape(2, 3))
    assert [type(one) for one in model["scales"]] == [torch.nn.Parameter] * 2
    assert [(one.dtype, one.shape, one.item()) for one in model["scales"]] == [
        (torch.bfloat16, (), 1.0),
        (torch.bfloat16, (), -2.0),
    ]
    live = {"model": {**model, "a": torch.zeros(2), "w": torch.zeros(2, 3)}}
    back = Checkpointer(root).load(into=live)
    assert back["model"]["w"] is live["model"]["w"]
    assert torch.equal(live["model"]["w"], model["w"])


def test_a_v1_repository_is_restored(root: Path) -> None:
    """The newest snapshot by default, any other by its step."""
    checkpointer = Checkpointer(root)
    newest, older = checkpointer.load(), checkpointer.load(100)
    assert newest is not None
    assert older is not None
    assert newest["loop"] == {**_LOOP, "step": 200}
    assert torch.equal(newest["optimizer"]["moment"], torch.arange(8.0).reshape(4, 2))
    assert older["loop"] == _LOOP
    for name, (dtype, shape, raw) in ARRAYS.items():
        component, _, key = name.partition("/")
        tensor = older[component][key]
        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == shape
        assert (tensor.flatten().view(torch.uint8).numpy().tobytes() if raw else b"") == raw


def test_a_v1_repository_is_continued(root: Path) -> None:
    """New snapshots join the run; retention removes old ones but not the data that is still shared."""
    repository = _repository(root)
    with acquire(repository.storage) as lease:
        third = save(repository, 300)
        assert repository.read(third).run == RUN
        done = prune(repository, lease, KeepLast(2))
        assert done.plan.remove == (FIRST,)
        assert done.collected.removed == ()
        assert set(prune(repository, lease, KeepLast(1)).collected.removed) == {
            names.data_name(FIRST),
            names.data_name(SECOND),
        }


def test_every_kind_of_damage_has_its_fixture() -> None:
    """The folder and the tests agree on what there is."""
    assert {path.name for path in (HERE / "damaged").iterdir()} == set(damages())


@pytest.mark.parametrize("root", sorted(_UNREADABLE), indirect=True)
def test_a_damaged_manifest_is_named_and_keeps_its_data(root: Path, request: pytest.FixtureRequest) -> None:
    """The right error with the file's name; a collection deletes nothing it might need."""
    kind = request.node.callspec.params["root"]
    repository = _repository(root)
    with pytest.raises(_UNREADABLE[kind], match=f"snapshots/{SECOND}.json"):
        repository.read(SECOND)
    assert repository.read(FIRST).info.step == 100
    before = files(root)
    with acquire(repository.storage) as lease:
        assert prune(_repository(root), lease, KeepLast(1)).plan.remove == ()
    assert files(root) == before | {names.LEASE}


@pytest.mark.parametrize("root", [*_UNREADABLE, "data-missing", "data-truncated", "data-bit-flipped", "data-zeros",
                                  "data-foreign"], indirect=True)  # fmt: skip
def test_a_damaged_newest_snapshot_is_skipped_for_the_older_one(root: Path) -> None:
    """A resume finds the older snapshot whole and uses it."""
    state = Checkpointer(root).load()
    assert state is not None
    assert state["loop"] == _LOOP
    assert torch.equal(state["model"]["ids"], torch.tensor([[1, -2], [2**62, 0]]))


@pytest.mark.parametrize("root", sorted(_RECORD), indirect=True)
def test_a_record_that_cannot_be_used_stops_writers(root: Path, request: pytest.FixtureRequest) -> None:
    """Nothing is written to a folder whose record is newer or somebody else's."""
    before = files(root)
    with pytest.raises(_RECORD[request.node.callspec.params["root"]], match=r"ckpt\.json"):
        acquire(LocalStorage(root))
    assert files(root) == before


@pytest.mark.parametrize("root", ["record-missing", "record-damaged", *sorted(_RECORD)], indirect=True)
def test_snapshots_survive_the_loss_of_the_record(root: Path) -> None:
    """Each snapshot can be read, whatever happened to the record."""
    repository = _repository(root)
    assert [one.id for one in repository.list()] == [FIRST, SECOND]
    assert repository.read(SECOND).run == RUN


@pytest.mark.parametrize("root", ["record-missing", "record-damaged"], indirect=True)
def test_a_record_is_rebuilt(root: Path) -> None:
    """The run keeps its identity."""
    with acquire(LocalStorage(root)):
        assert _repository(root).create_if_absent().run == RUN


def test_damage_is_an_error_of_our_own() -> None:
    """Damage never raises errors of json or of the system, which a caller would have to catch."""
    for kind in (*_UNREADABLE.values(), *_RECORD.values()):
        assert issubclass(kind, CkptError)
