"""A `transformers.Trainer` resumes with and without what wraps its model or a module of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import extract_model_from_parallel

from ckpt_engine.errors import MismatchError
from tests.accelerate import hf
from tests.accelerate.test_transformers_changes import AT, SEED, run
from tests.loop.runs import every_boundary, only, report, saved

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile


def _blocks(model: Any) -> Any:
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    try:
        extract_model_from_parallel(model)
    except KeyError:
        pytest.skip("the trainer of this Accelerate does not begin with compiled blocks")
    return model


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, init_lora_weights=False)
    return peft.get_peft_model(model, settings)


WRAPS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, Any]]] = {
    "plain": (lambda model: model, {}),
    "whole": (lambda model: model, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "blocks": (_blocks, {}),
    "lora": (_lora, {}),
}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the script with a wrapper."""
    original = hf.GPT2LMHeadModel

    def made(kind: str, options: Any, seed: int = 0) -> Any:
        wrap, arguments = WRAPS[kind]
        monkeypatch.setattr(hf, "GPT2LMHeadModel", lambda config: wrap(original(config)))
        return run(tmp_path, options, seed, **arguments)

    return made


def killed(tmp_path: Path, process: Callable[..., Any], kind: str) -> Path:
    process(kind, every_boundary(tmp_path / "run"))
    snapshot = next(one for one in saved(tmp_path / "run") if one.step == AT and one.reason != "end")
    return only(tmp_path / "run", snapshot, tmp_path / "1")


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("plain", "whole"),
        ("whole", "plain"),
        ("plain", "blocks"),
        ("blocks", "plain"),
        ("blocks", "whole"),
        ("lora",) * 2,
    ],
)
def test_a_run_resumes_with_another_wrapper(before: str, now: str, tmp_path: Path, process: Callable[..., Any]) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    folder, expected = killed(tmp_path, process, before), process(now, None)
    resumed = process(now, every_boundary(folder), SEED)
    assert resumed.trace
    assert resumed.trace == expected.trace[len(expected.trace) - len(resumed.trace) :]
    assert not report(folder).not_restored


@pytest.mark.long
@pytest.mark.parametrize(("before", "now"), [("plain", "lora"), ("lora", "plain")])
def test_an_adapter_is_refused_before_training(
    before: str, now: str, tmp_path: Path, process: Callable[..., Any]
) -> None:
    """By the names that one of both lacks; with `only` and `strict: no` the weights of the base are restored."""
    folder = killed(tmp_path, process, before)
    with pytest.raises(MismatchError, match=r"c_attn\.lora_A\.default\.weight"):
        process(now, every_boundary(folder), SEED)
    section = {"resume": {"only": ["model"], "strict": False}}
    assert process(now, every_boundary(folder, **section), SEED).trace
