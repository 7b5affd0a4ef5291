"""`ckpt export --to peft`: the adapters of a run as the folder that `PeftModel.from_pretrained` reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_engine import Checkpointer
from tests.accelerate import hf
from tests.accelerate.test_transformers_changes import run as run_transformers
from tests.loop import test_resume_changes
from tests.loop.changes import Objects, Setup
from tests.loop.runs import every_boundary
from tests.loop.test_resume_changes import TRAINERS
from tests.loop.test_wrapped_names import Whole

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
Ckpt = Callable[..., Any]
ADAPTERS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False, use_dora=True),
    "bias": lambda: peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False, bias="all"),
    "saved": lambda: peft.LoraConfig(target_modules=["0"], modules_to_save=["head"], r=2, init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["0"], feedforward_modules=[], init_ia3_weights=False),
    "vera": lambda: peft.VeraConfig(target_modules=["head"], r=2, init_weights=False),
    "oft": lambda: peft.OFTConfig(target_modules=["head"], r=2, oft_block_size=0, init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["head"], init_r=4, total_step=1000, init_lora_weights=False),
}


def module() -> nn.Sequential:
    """A small model that is no one's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential())


def trained(model: nn.Module, root: Path, **objects: Any) -> None:
    """Two steps of a loop of its own, and the snapshot at the end."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Checkpointer(**every_boundary(root)) as checkpointer:
        run = checkpointer.track(model=model, optimizer=optimizer, **objects)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
            run.step()


def outputs(model: nn.Module) -> torch.Tensor:
    """What a model computes of fixed numbers."""
    with torch.no_grad():
        out: torch.Tensor = model.eval()(torch.linspace(-1, 1, 24).view(4, 6))
    return out


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, Any]]:
    """The base and the PEFT model of each script that begins."""
    original, found = Objects.of.__func__, []  # type: ignore[attr-defined]

    def of(kind: Any, setup: Setup) -> Objects:
        mine: Objects = original(kind, setup)
        base = copy.deepcopy(mine.model)
        mine.model = peft.get_peft_model(mine.model, ADAPTERS["lora"]())
        mine.optimizer.param_groups[0]["params"] = [p for p in mine.model.parameters() if p.requires_grad]
        found.append((base, mine.model))
        return mine

    monkeypatch.setattr(Objects, "of", classmethod(of))
    monkeypatch.setattr(test_resume_changes, "Module", Whole)
    return found


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_adapter_of_each_trainer_computes_the_same(
    trainer: str, made: list[tuple[nn.Module, Any]], ckpt: Ckpt, tmp_path: Path
) -> None:
    """Bit for bit, on the base that the run began with; the files are those that PEFT itself writes."""
    TRAINERS[trainer].train(Setup(epochs=1), every_boundary(tmp_path / "run"), 0)
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft")
    assert result.code == 0, result.err
    assert "2 tensors" in result.out
    (base, model), *_ = made
    assert torch.equal(outputs(peft.PeftModel.from_pretrained(base, tmp_path / "out")), outputs(model))
    same_as_saved(model, tmp_path)


def same_as_saved(model: Any, tmp_path: Path) -> None:
    """The exported folder is the one that `save_pretrained` writes, but for the embedding layers and the model card."""
    model.save_pretrained(tmp_path / "theirs")
    ours = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()}
    theirs = {path.relative_to(tmp_path / "theirs") for path in (tmp_path / "theirs").rglob("*") if path.is_file()}
    assert ours == {one for one in theirs if one.suffix != ".md"}
    for one in ours:
        pair = tmp_path / "out" / one, tmp_path / "theirs" / one
        if one.suffix == ".json":
            config, expected = (json.loads(path.read_text()) for path in pair)
            assert {**config, "auto_mapping": None} == {**expected, "auto_mapping": None}
        else:
            tensors, expected = (load_file(path) for path in pair)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_the_adapter_of_a_transformers_trainer_computes_the_same(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the snapshot at the end of training."""
    original, found = hf.GPT2LMHeadModel, list[Any]()

    def make(config: Any) -> Any:
        base = original(config)
        settings = peft.LoraConfig(
            target_modules=["c_attn"], r=2, fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        found.extend((copy.deepcopy(base), peft.get_peft_model(base, settings)))
        return found[-1]

    monkeypatch.setattr(hf, "GPT2LMHeadModel", make)
    (tmp_path / "trainer").mkdir()
    run_transformers(tmp_path / "trainer", every_boundary(tmp_path / "run"), 0)
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft")
    assert result.code == 0, result.err
    base, model = found[:2]
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens, labels=tokens).logits
        assert torch.equal(
            peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()(input_ids=tokens, labels=tokens).logits,
            expected,
        )
    same_as_saved(model, tmp_path)


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_other_tuners_are_exported_as_peft_saves_them(kind: str, ckpt: Ckpt, tmp_path: Path) -> None:
    """Their names are those that PEFT gives them."""
    base = module()
    base.head = nn.Linear(8, 8)
    copied = copy.deepcopy(base)
    model = peft.get_peft_model(base, ADAPTERS[kind]())
    trained(model, tmp_path / "run")
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft")
    assert result.code == 0, result.err
    assert torch.equal(outputs(peft.PeftModel.from_pretrained(copied, tmp_path / "out")), outputs(model))
    same_as_saved(model, tmp_path)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fully_shard])
def test_the_adapter_of_a_wrapped_model_computes_the_same(wrap: Any, ckpt: Ckpt, tmp_path: Path) -> None:
    """DDP and FSDP2, of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        base = module()
        base.head = nn.Linear(8, 8)
        copied = copy.deepcopy(base)
        model = wrap(peft.get_peft_model(base, ADAPTERS["dora"]()))
        trained(model, tmp_path / "run")
        result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft")
        assert result.code == 0, result.err
        assert torch.equal(outputs(peft.PeftModel.from_pretrained(copied, tmp_path / "out")), outputs(model))
    finally:
        dist.destroy_process_group()


def two(base: nn.Module) -> Any:
    """A model with two adapters, of which the second one trains."""
    base.head = nn.Linear(8, 8)
    model = peft.get_peft_model(base, ADAPTERS["lora"]())
    model.add_adapter("other", ADAPTERS["lora"]())
    model.set_adapter("other")
    return model


def test_several_adapters_lie_where_peft_has_them(ckpt: Ckpt, tmp_path: Path) -> None:
    """`default` in the folder, and each other one in a folder with its name."""
    model = two(module())
    trained(model, tmp_path / "run")
    assert ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft").code == 0
    same_as_saved(model, tmp_path)


@pytest.mark.long
def test_a_compiled_block_has_the_names_of_a_plain_one(ckpt: Ckpt, tmp_path: Path) -> None:
    """So that the adapter fits a base that is not compiled; PEFT alone would keep the name of the wrapper."""
    base = nn.ModuleDict({"block": nn.Sequential(nn.Linear(6, 6))})
    base.forward = lambda x: base["block"](x)  # type: ignore[method-assign]
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    model.base_model.model["block"] = torch.compile(model.base_model.model["block"], backend="eager")
    trained(model, tmp_path / "run")
    assert ckpt("export", tmp_path / "run", tmp_path / "out", "--to", "peft").code == 0
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    assert set(found) == {f"base_model.model.block.0.lora_{one}.weight" for one in "AB"}


def test_what_is_no_whole_adapter_is_refused_by_name(ckpt: Ckpt, tmp_path: Path) -> None:
    """Weights that train beside the adapter, computed ones, no adapter, and one of two PEFT models."""
    prompt = peft.PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=2,
        token_dim=8,
        num_transformer_submodules=1,
        num_attention_heads=1,
        num_layers=1,
    )
    with Checkpointer(**every_boundary(tmp_path / "prompt")) as checkpointer:
        model = peft.get_peft_model(
            hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8)), prompt
        )
        checkpointer.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).step()
    refused = ckpt("export", tmp_path / "prompt", tmp_path / "out", "--to", "peft")
    assert refused.code == 2
    assert "PROMPT_TUNING adapter 'default', whose weights PEFT computes" in " ".join(refused.err.split())
    base = module()
    base.head = nn.Linear(8, 8)
    pruned = peft.get_peft_model(base, ADAPTERS["adalora"]())
    pattern = {"base_model.model.head.lora_E.default": [True, True, False, False]}
    pruned.peft_config["default"].rank_pattern = pattern
    trained(pruned, tmp_path / "pruned")
    assert pruned.peft_config["default"].rank_pattern is pattern
    assert "lora_E.default" in next(iter(pattern))
    refused = ckpt("export", tmp_path / "pruned", tmp_path / "out", "--to", "peft")
    assert refused.code == 2
    assert "ADALORA adapter 'default', whose weights PEFT computes" in " ".join(refused.err.split())
    beside = peft.get_peft_model(module(), ADAPTERS["ia3"]())
    beside.base_model.model[0].base_layer.bias.requires_grad_(True)
    trained(beside, tmp_path / "beside")
    refused = ckpt("export", tmp_path / "beside", tmp_path / "out", "--to", "peft")
    assert (refused.code, "0.bias" in refused.err) == (2, True), refused.err
    trained(module(), tmp_path / "plain")
    refused = ckpt("export", tmp_path / "plain", tmp_path / "out", "--to", "peft")
    assert refused.code == 2
    assert "has no PEFT model" in " ".join(refused.err.split())
    more = two(module())
    trained(two(module()), tmp_path / "two", more=more)
    refused = ckpt("export", tmp_path / "two", tmp_path / "out", "--to", "peft")
    assert refused.code == 2
    assert "model, more" in refused.err
    assert not (tmp_path / "out").exists()
    assert ckpt("export", tmp_path / "two", tmp_path / "out", "--to", "peft", "--only", "more").code == 0
    same_as_saved(more, tmp_path)
