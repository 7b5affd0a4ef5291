"""`ckpt import`: what other programs have saved becomes a snapshot, and goes back to them unchanged."""

from __future__ import annotations

import inspect
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import main
from ckpt_engine.data import rng
from lightning_ckpt import AdaptiveCheckpoint
from tests.interop.training import Loop, same_tree, tiny_trainer

Ckpt = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE: Any = {"weights_only": False} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
"""Older Lightning loads everything."""


@pytest.fixture(autouse=True)
def _streams_as_before() -> Any:
    before = rng.capture()
    yield
    rng.restore(before)


class Attack:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (_touch, (self.trace,))


def _touch(trace: Path) -> None:
    trace.touch()


class Settings:
    """A class of the user's script."""

    def __init__(self) -> None:
        self.width = 3


def _load(root: Path) -> tuple[Any, Checkpointer]:
    checkpointer = Checkpointer(root)
    return checkpointer.load(), checkpointer


def test_a_torch_file_comes_back_as_it_was(ckpt: Ckpt, tmp_path: Path) -> None:
    """Numbers of parameters stay numbers; the step is found in the file; a dry run writes nothing."""
    state = {**Loop().trained(3).state(), "where": Path("data"), "epoch": 2}
    torch.save(state, tmp_path / "last.pt")
    result = ckpt("import", tmp_path / "last.pt", tmp_path / "run", "--dry-run")
    assert (result.code, (tmp_path / "run").exists()) == (0, False), result.err
    assert result.out.startswith(f"would import {tmp_path / 'last.pt'} (torch) into ")
    report = ckpt("import", tmp_path / "last.pt", tmp_path / "run", "--json").json
    loaded, checkpointer = _load(tmp_path / "run")
    same_tree(loaded, state)
    assert (report["form"], report["step"], report["epoch"]) == ("torch", 3, 2)
    assert [info.id for info in checkpointer.snapshots()] == [report["snapshot"]]
    assert checkpointer.loaded is not None
    assert checkpointer.loaded.info.reason == "import"
    assert ckpt("verify", tmp_path / "run").code == 0


def test_a_missing_step_is_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    """A guess would order snapshots wrongly."""
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "a.pt")
    result = ckpt("import", tmp_path / "a.pt", tmp_path / "run")
    assert (result.code, (tmp_path / "run").exists()) == (2, False)
    assert "does not say at which step it was saved\n      do:  give it with --step" in result.err
    assert ckpt("import", tmp_path / "a.pt", tmp_path / "run", "--step", "8").code == 0


@pytest.mark.parametrize(("counted", "kind"), [(0, torch.optim.Adam), (2, torch.optim.Adam), (0, torch.optim.SGD)])
def test_a_step_that_accelerate_does_not_count_is_asked_for(
    ckpt: Ckpt, tmp_path: Path, counted: int, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    """Accelerate's own counter stays 0 without `accumulate`, and begins again in each epoch with it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(plain, kind(plain.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    accelerator.step = counted
    accelerator.save_state(str(tmp_path / "theirs"))
    result = ckpt("import", tmp_path / "theirs", tmp_path / "run")
    assert (result.code, (tmp_path / "run").exists()) == (2, False)
    assert "does not say at which step it was saved\n      do:  give it with --step" in result.err
    assert "step 3" in ckpt("import", tmp_path / "theirs", tmp_path / "run", "--step", "3").out


def test_dcp_there_and_back(ckpt: Ckpt, tmp_path: Path) -> None:
    """Our export and torch's own folder give the same state again: lists, numbers as keys and empty dicts included."""
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    state = {**Loop().trained(3).state(), "sgd": [sgd.state_dict()], "list": [1, {"a": torch.ones(2, 3)}]}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    assert ckpt("import", tmp_path / "theirs", tmp_path / "run").code == 0
    imported, _ = _load(tmp_path / "run")
    for key in state:
        same_tree(imported[key] if key != "model" else dict(imported[key]), state[key])
    assert ckpt("export", tmp_path / "run", tmp_path / "ours", "--to", "dcp").code == 0
    assert ckpt("import", tmp_path / "ours", tmp_path / "run2").code == 0
    same_tree(_load(tmp_path / "run2")[0], imported)


def test_accelerate_there_and_back(ckpt: Ckpt, tmp_path: Path) -> None:
    """What `save_state` wrote is, after import and export, what `load_state` reads: streams and loaders included."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader, TensorDataset

    def made(seed: int) -> tuple[Any, Loop, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        loop = Loop(seed=seed)
        loader = DataLoader(TensorDataset(torch.arange(40.0).view(10, 4)), batch_size=2, shuffle=True)
        return accelerator, loop, accelerator.prepare(loop.model, loop.optimizer, loop.scheduler, loader)[3]

    accelerator, loop, loader = made(0)
    next(iter(loader))
    loop.trained(3)
    accelerator.step = 3
    accelerator.save_state(str(tmp_path / "theirs"))
    streams = rng.capture()
    result = ckpt("import", tmp_path / "theirs", tmp_path / "run")
    assert result.code == 0, result.err
    assert "(accelerate) as 00000001-s0000000003" in result.out
    assert ckpt("export", tmp_path / "run", tmp_path / "ours", "--to", "accelerate").code == 0
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "theirs").iterdir()}
    followed = []
    for folder in ("theirs", "ours"):
        accelerator, fresh, loader = made(5)
        accelerator.load_state(str(tmp_path / folder))
        assert rng.capture() == streams
        assert accelerator.step == 3
        same_tree(fresh.model.state_dict(), loop.model.state_dict())
        same_tree(fresh.optimizer.state_dict(), loop.optimizer.state_dict())
        followed.append(list(loader))
    assert len(followed[0]) == 4
    same_tree(*followed)


def test_transformers_there_and_back(ckpt: Ckpt, tmp_path: Path) -> None:
    """A Trainer resumes from the exported folder to bitwise the same end as from its own."""
    tiny_trainer(tmp_path / "first", steps=4).train()
    own = tmp_path / "first/checkpoint-4"
    result = ckpt("import", own, tmp_path / "run")
    assert result.code == 0, result.err
    assert "training_args.bin left out" in result.out
    out = tmp_path / "checkpoint-4"
    assert ckpt("export", tmp_path / "run", out, "--to", "transformers").code == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in own.iterdir()} - {"training_args.bin"}
    ends = []
    for index, checkpoint in enumerate((own, out)):
        again = tiny_trainer(tmp_path / f"again{index}", steps=8, seed=9)
        again.train(resume_from_checkpoint=str(checkpoint))
        ends.append(again.model.state_dict())
    same_tree(*ends)


class _Model(BoringModel):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _trainer(folder: Path, epochs: int, *callbacks: Any) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        limit_train_batches=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=list(callbacks),
    )


def test_a_lightning_file_resumes_with_auto_and_the_report_says_what_it_lacks(ckpt: Ckpt, tmp_path: Path) -> None:
    """The run goes on as Lightning's own resume would; hyper-parameters that are objects are left out."""
    pl.seed_everything(1)
    trainer = _trainer(tmp_path, 1)
    trainer.fit(_Model(Settings()))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    result = ckpt("import", tmp_path / "own.ckpt", tmp_path / "run")
    assert result.code == 0, result.err
    assert "hyper_parameters/config left out: tests.cli.test_import.Settings is not loaded" in result.out
    assert "no random streams and no data position" in result.out
    ends = []
    for path in ("auto", str(tmp_path / "own.ckpt")):
        pl.seed_everything(2)
        model = _Model(Settings())
        callbacks = [AdaptiveCheckpoint(tmp_path / "run", writer="thread")] if path == "auto" else []
        again = _trainer(tmp_path, 3, *callbacks)
        again.fit(model, ckpt_path=path, **WHOLE)
        assert again.global_step == 12
        ends.append(model.state_dict())
    same_tree(*ends)
    report = json.loads((tmp_path / "run/resume-report.json").read_text())
    assert report["step"] == 4
    assert [one["name"] for one in report["not_restored"]] == ["random streams", "data position", "running means"]
    assert "imported from" in report["notes"][0]
    # From here on it is a run like any other, with the same samples.
    pl.seed_everything(2)
    last = _trainer(tmp_path, 4, AdaptiveCheckpoint(tmp_path / "run", writer="thread"))
    last.fit(_Model(Settings()), ckpt_path="auto")
    assert last.global_step == 16
    assert json.loads((tmp_path / "run/resume-report.json").read_text())["not_restored"] == []


def test_nothing_else_in_the_run_changes(ckpt: Ckpt, tmp_path: Path) -> None:
    """The import is the newest snapshot, retention removes none, and that the run goes on from it is said."""
    with Checkpointer(tmp_path / "run", writer="thread", keep={"last": 9}) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save({"a": torch.ones(1)}, step=step).wait(60)
    torch.save({"a": torch.zeros(1), "step": 5}, tmp_path / "a.pt")
    config = tmp_path / "ckpt.yaml"
    config.write_text(f"tiers: [{{url: {tmp_path / 'run'}, keep: {{last: 1}}}}, {tmp_path / 'far'}]\n")
    result = ckpt("import", tmp_path / "a.pt", config)
    assert "the run has 3 snapshots, the newest of step 30: it resumes from step 5 now" in result.out
    loaded, checkpointer = _load(tmp_path / "run")
    assert loaded["a"].item() == 0
    assert [info.step for info in checkpointer.snapshots()] == [10, 20, 30, 5]


@pytest.mark.parametrize("protocol", ["zip", "old"])
def test_objects_are_refused_by_class_and_leaf_and_no_code_runs(ckpt: Ckpt, tmp_path: Path, protocol: str) -> None:
    """Nothing is unpickled that could run code, neither while reading nor while looking for the leaf."""
    state = {"step": 1, "list": [torch.ones(1), {"bad": Attack(tmp_path / "trace")}], "settings": Settings()}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=protocol == "zip")
    for extra in ((), ("--dry-run",), ("--as", "torch")):
        result = ckpt("import", tmp_path / "a.pt", tmp_path / "run", *extra)
        assert (result.code, (tmp_path / "run").exists(), (tmp_path / "trace").exists()) == (2, False, False)
        assert "CKPT201" in result.err
        if protocol == "zip":
            assert "tests.cli.test_import._touch at list/1/bad" in result.err
            assert "tests.cli.test_import.Settings at settings" in result.err
        assert "put plain data in that place" in result.err
    (tmp_path / "trace").unlink(missing_ok=True)
    pickle.loads(pickle.dumps(Attack(tmp_path / "trace")))
    assert (tmp_path / "trace").exists(), "the attack is none"


def test_a_dcp_folder_cannot_run_code_either(ckpt: Ckpt, tmp_path: Path) -> None:
    """Its description and its values, both of which torch's own reader unpickles, run no code."""
    dcp.save({"a": torch.ones(2), "bad": Attack(tmp_path / "trace")}, checkpoint_id=tmp_path / "one")
    result = ckpt("import", tmp_path / "one", tmp_path / "run", "--step", 1)
    assert (result.code, (tmp_path / "trace").exists()) == (2, False)
    assert "bad in " in result.err
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "two")
    (tmp_path / "two/.metadata").write_bytes(pickle.dumps(Attack(tmp_path / "trace")))
    result = ckpt("import", tmp_path / "two", tmp_path / "run", "--step", 1)
    assert (result.code, (tmp_path / "trace").exists()) == (2, False)
    assert "no part of a checkpoint's description" in result.err
    assert not (tmp_path / "run").exists()


def test_damaged_folders_are_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """A missing file, a cut one and a wrong one each say which file it is."""
    dcp.save({"a": torch.ones(1000)}, checkpoint_id=tmp_path / "dcp")
    data = tmp_path / "dcp/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:3000])
    assert "__0_0.distcp is cut off" in ckpt("import", tmp_path / "dcp", tmp_path / "run", "--step", 1).err
    data.unlink()
    assert (
        "__0_0.distcp, a part of the checkpoint, is missing"
        in ckpt("import", tmp_path / "dcp", tmp_path / "run", "--step", 1).err
    )
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": "three"}')
    (folder / "model.safetensors").write_bytes(b"{}")
    assert "model.safetensors is not a whole safetensors file" in ckpt("import", folder, tmp_path / "run").err
    assert not (tmp_path / "run").exists()


def _flipped(file: Path, value: torch.Tensor) -> None:
    """One bit of the value, where it lies in the file, is another."""
    data = bytearray(file.read_bytes())
    data[data.index(value.numpy().tobytes()) + 5] ^= 16
    file.write_bytes(data)


def test_a_flipped_bit_of_a_tensor_is_no_state(ckpt: Ckpt, tmp_path: Path) -> None:
    """torch reads it without a word; the checksum beside the tensor says that it is damaged."""
    value = torch.arange(1000.0)
    for folder in ("dcp", "accelerate"):
        (tmp_path / folder).mkdir()
    torch.save({"step": 1, "w": value}, tmp_path / "file.pt")
    torch.save({"w": value}, tmp_path / "accelerate/pytorch_model.bin")
    dcp.save({"w": value}, checkpoint_id=tmp_path / "dcp")
    for source, file, named in (
        ("file.pt", "file.pt", "file.pt"),
        ("accelerate", "accelerate/pytorch_model.bin", "pytorch_model.bin"),
        ("dcp", "dcp/__0_0.distcp", "w in "),
    ):
        assert ckpt("import", tmp_path / source, tmp_path / "run", "--step", 1, "--dry-run").code == 0
        _flipped(tmp_path / file, value)
        result = ckpt("import", tmp_path / source, tmp_path / "run", "--step", 1)
        assert (result.code, (tmp_path / "run").exists()) == (2, False)
        assert named in result.err
        assert "is damaged: Bad CRC-32" in result.err


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="this torch always writes checksums")
def test_a_file_without_checksums_is_imported(ckpt: Ckpt, tmp_path: Path) -> None:
    """Its writer has asked torch for none, and there is nothing to compare."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"step": 1, "w": torch.ones(9)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert ckpt("import", tmp_path / "a.pt", tmp_path / "run").code == 0


def test_a_folder_in_place_of_a_file_is_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """As whatever else the system refuses to read."""
    (tmp_path / "checkpoint-3/trainer_state.json").mkdir(parents=True)
    torch.save({"w": torch.ones(1)}, tmp_path / "checkpoint-3/pytorch_model.bin")
    result = ckpt("import", tmp_path / "checkpoint-3", tmp_path / "run")
    assert result.code == 2
    assert "checkpoint-3/trainer_state.json: Is a directory" in result.err


def test_what_cannot_be_imported_says_what_to_do(ckpt: Ckpt, tmp_path: Path) -> None:
    """Folders of several processes, adapters, weights alone, runs of ours, folders of checkpoints, nothing at all."""
    with Checkpointer(tmp_path / "ours", writer="thread") as checkpointer:
        checkpointer.save({"a": 1}, step=1).wait(60)
    (tmp_path / "fsdp/pytorch_model_fsdp_0").mkdir(parents=True)
    (tmp_path / "fsdp/pytorch_model_fsdp_0/.metadata").touch()
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero/zero_to_fp32.py").touch()
    (tmp_path / "out/checkpoint-9").mkdir(parents=True)
    (tmp_path / "out/checkpoint-10").mkdir()
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/trainer_state.json").write_text("{}")
    (tmp_path / "peft/adapter_model.safetensors").touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "zeros.bin").write_bytes(bytes(50))
    (tmp_path / "empty.pt").touch()
    torch.save({"step": 1, "w": torch.ones(100)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("a.txt", "hello")
    for name, answer in (
        ("ours", "is a run of ckpt-engine already\n      do:  `ckpt cp` copies it"),
        ("fsdp", f"ckpt import {tmp_path / 'fsdp/pytorch_model_fsdp_0'}"),
        ("zero", "zero_to_fp32.py"),
        ("out", f"for example {tmp_path / 'out/checkpoint-10'}"),
        ("peft", "has an adapter and not the whole model"),
        ("model.safetensors", "weights need no import"),
        ("text.txt", "is no file of torch.save: it begins with b'hello'"),
        ("zeros.bin", "is no file of torch.save: it begins with b'\\x00"),
        ("empty.pt", "is empty\n      do:  it is damaged or was not written to its end"),
        ("cut.pt", "is cut off: it begins as a zip file of torch.save does\n      do:  it is damaged"),
        ("other.zip", "is a zip file, and no whole one of torch.save: "),
        ("nothing", "does not exist"),
    ):
        result = ckpt("import", tmp_path / name, tmp_path / "run")
        assert (result.code, (tmp_path / "run").exists()) == (2, False), name
        assert answer in result.err, name
        assert "Weights only load failed" not in result.err, name
    assert "is a folder; --as torch reads a file" in ckpt("import", tmp_path / "zero", "x", "--as", "torch").err
    assert "is a file; --as dcp reads a folder" in ckpt("import", tmp_path / "text.txt", "x", "--as", "dcp").err


def test_a_url_of_another_machine_is_not_taken_for_a_path(ckpt: Ckpt, tmp_path: Path) -> None:
    """It says that a copy here is needed, before anything is read; a file URL is a path."""
    result = ckpt("import", "s3://bucket/checkpoint-5", tmp_path / "run")
    assert (result.code, (tmp_path / "run").exists()) == (2, False)
    assert (
        "SRC is read from a local path, and s3://bucket/checkpoint-5 is a URL\n      do:  copy it to this machine"
        in result.err
    )
    torch.save({"step": 1, "w": torch.ones(1)}, tmp_path / "a.pt")
    assert ckpt("import", f"file://{tmp_path / 'a.pt'}", tmp_path / "run").code == 0


def test_what_cannot_be_stored_is_named_before_anything_is_written(ckpt: Ckpt, tmp_path: Path) -> None:
    """A file with a sparse tensor is refused by the name of the tensor."""
    torch.save({"step": 1, "deep": [{"s": torch.ones(2, 2).to_sparse()}]}, tmp_path / "a.pt")
    result = ckpt("import", tmp_path / "a.pt", tmp_path / "run")
    assert (result.code, (tmp_path / "run").exists()) == (2, False)
    assert "cannot store tensor at deep/0/s: layout sparse_coo" in result.err


def test_a_full_disk_leaves_no_snapshot(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is that of the disk, and the run is as before."""
    from ckpt_engine.store.storage.local import LocalStorage

    torch.save({"a": torch.ones(9), "step": 5}, tmp_path / "a.pt")
    assert ckpt("import", tmp_path / "a.pt", tmp_path / "run").code == 0
    before = sorted(tmp_path.rglob("run/*/*"))

    def full(self: Any, name: str, *_: Any, **__: Any) -> Any:
        from ckpt_engine.errors import StorageFullError

        raise StorageFullError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", full)
        result = ckpt("import", tmp_path / "a.pt", tmp_path / "run", "--step", 6)
    assert result.code == 2
    assert sorted(tmp_path.rglob("run/*/*")) == before


@settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**9), flips=st.integers(1, 8), cut=st.floats(0, 1))
def test_nonsense_ends_with_a_message(
    tmp_path_factory: pytest.TempPathFactory, seed: int, flips: int, cut: float
) -> None:
    """A damaged file is imported as far as torch reads it, or refused with an error of ours: never a traceback."""
    folder = tmp_path_factory.mktemp("nonsense")
    torch.save({"a": torch.arange(4), "step": 1, "b": {"c": [1.5, "x"]}}, folder / "a.pt")
    data = bytearray((folder / "a.pt").read_bytes())
    chance = random.Random(seed)
    for _ in range(flips):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    (folder / "a.pt").write_bytes(data[: int(len(data) * cut)] if seed % 2 else data)
    with pytest.raises(SystemExit) as end:
        main(["import", str(folder / "a.pt"), str(folder / "run"), "--step", "1", "--dry-run"])
    assert end.value.code in (0, 2, None)


def test_a_damaged_end_of_a_zip_file_is_no_crash(ckpt: Ckpt, tmp_path: Path) -> None:
    """It looks like one volume of several, which Python's reader refuses with an error of its own."""
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 2)
    (tmp_path / "model.pt").write_bytes(locator + b"PK\x05\x06" + bytes(18))
    done = ckpt("import", str(tmp_path / "model.pt"), str(tmp_path / "run"))
    assert done.code == 2
    assert "model.pt" in done.err
