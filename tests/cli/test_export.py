"""`ckpt export`: files that safetensors, torch and Lightning read without us."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from ckpt_engine import Checkpointer
from ckpt_engine.tools import export_snapshot

Ckpt = Callable[..., Any]


def _save(root: Path, *states: dict[str, Any]) -> None:
    with Checkpointer(root, writer="thread", keep={"last": 9}) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(state, step=step).wait(60)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def test_safetensors_has_the_weights_of_every_dtype_and_layout(ckpt: Ckpt, tmp_path: Path) -> None:
    """Names are those of the state dict; views, transposed, empty and 0-d tensors come out as they are."""
    base = torch.arange(24, dtype=torch.float32)
    state = {
        f"of_{dtype}": torch.arange(6).to(dtype) for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float16)
    }
    state |= {
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "head": base[:8].view(2, 4),
        "overlapping": base[4:].view(4, 5).t(),
        "strided": torch.arange(40, dtype=torch.int16)[3:30:3],
        "big": torch.randn(1500, 3000),
    }
    _save(tmp_path / "run", {"state_dict": state, "epoch": 3})
    result = ckpt("export", tmp_path / "run", tmp_path / "out.safetensors", "--to", "safetensors")
    assert result.code == 0, result.err
    loaded = load_file(tmp_path / "out.safetensors")
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert _same(loaded[name], tensor), name


def test_a_dtype_that_safetensors_lacks_is_kept_as_bytes_and_said(ckpt: Ckpt, tmp_path: Path) -> None:
    """The metadata says what the bytes are."""
    tensor = torch.randn(2, 3, dtype=torch.complex128)
    _save(tmp_path / "run", {"state_dict": {"c": tensor}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    assert "stored as bytes, safetensors lacks their dtype: c" in result.out
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata()["ckpt-engine.c"] == "complex128 [2, 3]"
        assert _same(file.get_tensor("c").view(torch.complex128).view(2, 3), tensor)


def test_tied_weights_are_stored_once_and_tied_again_by_safetensors(ckpt: Ckpt, tmp_path: Path) -> None:
    """As `safetensors.torch.save_model` does it, so that `load_model` works."""

    def tied() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"embed": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 8)})
        model["head"].weight = model["embed"].weight
        return model

    model, fresh = tied(), tied()
    _save(tmp_path / "run", {"state_dict": model.state_dict()})
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    assert "1 tied tensor stored once" in result.out
    with safe_open(tmp_path / "out", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "embed.bias", "head.bias"}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    load_model(fresh, tmp_path / "out")
    assert fresh["head"].weight is fresh["embed"].weight
    assert all(_same(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_a_model_of_other_trainers_is_the_default_too(ckpt: Ckpt, tmp_path: Path) -> None:
    """Accelerate, transformers and most plain loops have it under `model`, Lightning under `state_dict`."""
    _save(tmp_path / "run", {"model": {"w": torch.ones(2)}, "optimizer": [torch.zeros(3)]})
    assert ckpt("export", tmp_path / "run", tmp_path / "a", "--to", "safetensors").code == 0
    assert list(load_file(tmp_path / "a")) == ["w"]


def test_other_components_and_all_of_them(ckpt: Ckpt, tmp_path: Path) -> None:
    """Plain loops name their model as they like."""
    state = {"net": {"enc": {"w": torch.ones(2)}, "n": 3}, "opt": [torch.zeros(3)], "np": np.arange(4)}
    _save(tmp_path / "run", state)
    root = tmp_path / "run"
    result = ckpt("export", root, tmp_path / "a", "--to", "safetensors")
    assert (result.code, (tmp_path / "a").exists()) == (2, False)
    assert "has no component 'state_dict'; it has: net, opt, np" in result.err
    result = ckpt("export", root, tmp_path / "b", "--to", "safetensors", "--only", "net")
    assert "1 value that are no tensors left out" in result.out
    assert list(load_file(tmp_path / "b")) == ["enc.w"]
    ckpt("export", root, tmp_path / "c", "--to", "safetensors", "--only", "*")
    loaded = load_file(tmp_path / "c")
    assert set(loaded) == {"net/enc/w", "opt/0", "np"}
    assert loaded["np"].tolist() == [0, 1, 2, 3]


def test_names_that_would_collide_are_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    """`a.b` as one key and as two would overwrite each other."""
    _save(tmp_path / "run", {"state_dict": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors")
    assert (result.code, (tmp_path / "out").exists()) == (2, False)
    assert "two arrays" in result.err
    assert "'a.b'" in result.err


def test_a_part_without_tensors_is_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    """An empty file would look like success."""
    _save(tmp_path / "run", {"state_dict": {"a": 1}})
    assert "there are no tensors" in ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "safetensors").err


def test_an_existing_file_is_replaced_only_by_force(ckpt: Ckpt, tmp_path: Path) -> None:
    """A dry run writes nothing, and refuses what the command itself would refuse."""
    _save(tmp_path / "run", {"state_dict": {"a": torch.ones(2)}}, {"state_dict": {"a": torch.zeros(2)}})
    out = tmp_path / "out.safetensors"
    common = ("export", tmp_path / "run", "step=0", out, "--to", "safetensors")
    result = ckpt(*common, "--dry-run")
    assert (result.code, out.exists()) == (0, False)
    assert result.out.startswith(f"would write {out}: 1 tensor, 8 B of 00000001-")
    assert ckpt(*common).code == 0
    out.write_text("mine")
    for extra in ((), ("--dry-run",)):
        result = ckpt(*common, *extra)
        assert (result.code, out.read_text()) == (2, "mine")
        assert "exists already\n      do:  --force replaces it" in result.err
    assert ckpt(*common, "--force").code == 0
    assert load_file(out)["a"].tolist() == [1, 1]
    assert "is a folder" in ckpt(*common[:3], tmp_path, "--to", "safetensors", "--force").err
    assert "does not exist" in ckpt(*common[:3], tmp_path / "no/out", "--to", "safetensors").err


def test_damage_is_found_and_leaves_nothing_behind(ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path) -> None:
    """A wrong byte is never exported; neither OUT nor a temporary file is left."""
    snapshot = run_folder.add(1, arrays)
    run_folder.flip(snapshot, "state_dict/layer.bias")
    (tmp_path / "target").mkdir()
    result = ckpt("export", run_folder.path, tmp_path / "target/out", "--to", "safetensors")
    assert result.code == 2
    assert "'state_dict/layer.bias' in data/" in result.err
    assert list((tmp_path / "target").iterdir()) == []


def test_a_file_that_comes_into_being_meanwhile_survives(
    ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is taken without replacing, at the end."""
    run_folder.add(1, arrays)
    out = tmp_path / "out"
    write = export_snapshot.write_arrays

    def slow(*args: Any) -> None:
        out.write_text("mine")
        write(*args)

    monkeypatch.setattr(export_snapshot, "write_arrays", slow)
    result = ckpt("export", run_folder.path, out, "--to", "safetensors")
    assert (result.code, out.read_text()) == (2, "mine")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_safetensors_export_does_not_import_torch(run_folder: Any, arrays: Any, tmp_path: Path) -> None:
    """It runs where torch is not installed."""
    run_folder.add(1, arrays)
    arguments = ["export", str(run_folder.path), str(tmp_path / "out"), "--to", "safetensors"]
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom ckpt_engine.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert set(load_file(tmp_path / "out")) == {"layer.weight", "layer.bias"}


def test_export_reports_as_json(ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path) -> None:
    """What was written, for programs."""
    snapshot = run_folder.add(1, arrays)
    found = ckpt("export", run_folder.path, tmp_path / "out", "--to", "safetensors", "--json").json
    assert found == {
        "root": f"file://{run_folder.path}",
        "snapshot": snapshot,
        "source": f"file://{run_folder.path}",
        "out": str(tmp_path / "out"),
        "format": "safetensors",
        "arrays": 2,
        "nbytes": 8448,
        "written": True,
        "notes": [],
        "away": [],
    }


@pytest.mark.parametrize(
    ("name", "form"), [("a.safetensors", "safetensors"), ("a.pt", "torch"), ("b.pth", "torch"), ("c.ckpt", "lightning")]
)
def test_the_name_of_the_file_says_the_format(
    ckpt: Ckpt, run_folder: Any, arrays: Any, tmp_path: Path, name: str, form: str
) -> None:
    """Unless --to says another one."""
    run_folder.add(1, arrays)
    done = ckpt("export", run_folder.path, tmp_path / name, "--dry-run", "--json")
    if form == "lightning":  # of a plain run there is none
        assert (done.code, "Lightning" in done.err) == (2, True)
    else:
        assert done.json["format"] == form
    asked = ckpt("export", run_folder.path, tmp_path / name, "--to", "safetensors", "--dry-run", "--json")
    assert asked.json["format"] == "safetensors"


@pytest.mark.parametrize("name", ["out", "out.bin", "out.safetensor"])
def test_a_name_that_says_no_format_needs_one(ckpt: Ckpt, run_folder: Any, name: str) -> None:
    """The error lists the formats."""
    refused = ckpt("export", run_folder.path, name)
    assert refused.code == 2
    assert "Missing option '--to'" in refused.err and "transformers" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b", "c", "--to", "safetensors"),
        ("out",),
        ("out", "--to", "onnx"),
        ("out", "--to", "torch", "--dtype", "float16"),
        ("out", "--to", "safetensors", "--map", "model"),
    ],
)
def test_wrong_usage(ckpt: Ckpt, run_folder: Any, arguments: tuple[str, ...]) -> None:
    """Contradictions are refused before anything is read."""
    result = ckpt("export", run_folder.path, *arguments)
    assert result.code == 2
    assert "`ckpt export --help` shows its arguments" in result.err


class _Model(BoringModel):
    """With momentum, so that the optimizer has a state that matters."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def _fit(folder: Path, epochs: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, _Model]:
    pl.seed_everything(1, verbose=False)
    model = _Model()
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=epochs,
        limit_train_batches=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_from_the_exported_file(ckpt: Ckpt, tmp_path: Path) -> None:
    """The same run from our file as from Lightning's own checkpoint, with our key left out."""
    trainer, _ = _fit(tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    state = torch.load(tmp_path / "own.ckpt", weights_only=True)
    _save(tmp_path / "run", {**state, "ckpt_engine": {"rng": torch.get_rng_state()}})
    result = ckpt("export", tmp_path / "run", tmp_path / "out.ckpt", "--to", "lightning")
    assert result.code == 0, result.err
    assert "weights_only" not in result.out
    exported = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert list(exported) == list(state)
    ours, theirs = (_fit(tmp_path, 3, str(tmp_path / name)) for name in ("out.ckpt", "own.ckpt"))
    assert ours[0].global_step == theirs[0].global_step == 12
    for one, other in zip(ours[1].parameters(), theirs[1].parameters(), strict=True):
        assert _same(one.detach(), other.detach())


def test_lightning_export_of_another_kind_of_run_is_refused(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Lightning could not load it."""
    run_folder.add(1, arrays)
    result = ckpt("export", run_folder.path, run_folder.path / "x.ckpt", "--to", "lightning")
    assert result.code == 2
    assert "is not of a Lightning run: it has no 'pytorch-lightning_version'" in result.err


def test_what_torch_would_unpickle_is_said(ckpt: Ckpt, tmp_path: Path) -> None:
    """A state with other objects exports too, and says that `weights_only` must be off."""
    state = {"state_dict": {"a": torch.ones(1)}, "pytorch-lightning_version": "2.6.0", "where": Path("x")}
    _save(tmp_path / "run", state)
    result = ckpt("export", tmp_path / "run", tmp_path / "out.ckpt", "--to", "lightning")
    assert "torch.load needs weights_only=False: " in result.out
    assert torch.load(tmp_path / "out.ckpt", weights_only=False)["where"] == Path("x")
