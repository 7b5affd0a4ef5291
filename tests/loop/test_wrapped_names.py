"""A run resumes with and without what wraps its model or a module of it: snapshots have the names below the wrapper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from ckpt_engine import Checkpointer
from ckpt_engine.errors import MismatchError
from ckpt_engine.loop.components import dump_flags, restore_flags
from ckpt_engine.state import module_names
from ckpt_engine.state.module_names import canonical, stored_name
from tests.loop import test_resume_changes
from tests.loop.changes import AT, End, FirstParts, Objects, Setup, Trainer, by_hand
from tests.loop.runs import digest, report, resume_only
from tests.loop.test_resume_changes import TRAINERS
from tests.probe import lives
from tests.support.sweeps import crossed

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile
Wrap = Callable[[nn.Module], nn.Module]


def _submodule(model: nn.Module) -> nn.Module:
    model.head = torch.compile(model.head, backend="eager")  # type: ignore[assignment]
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    model.body[0] = checkpoint_wrapper(model.body[0])  # type: ignore[index, operator]
    return model


def _checkpointed_and_compiled(model: nn.Module) -> nn.Module:
    return _submodule(_checkpointed(model))


def _divided(model: nn.Module) -> nn.Module:
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch has no FSDP2 on CPUs")
    return fully_shard(model)


WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "whole": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "submodule": _submodule,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp2": _divided,
    "checkpointed": _checkpointed,
    "both": _checkpointed_and_compiled,
}


class Whole(test_resume_changes.Module):
    """The model is one module of a LightningModule."""

    def __init__(self, mine: Objects) -> None:
        super().__init__(dataclasses.replace(mine, model=nn.Module()))
        self.net = mine.model

    def forward(self, x: Any) -> Any:
        return self.net(x)


def whole(values: list[Any]) -> list[Any]:
    """Tensors, those that FSDP2 divides too."""
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in values]


RANKED = ["plain", "whole", "ddp", "fsdp2"]
PAIRS = [
    ("checkpointed", "both"),
    ("plain", "whole"),
    ("whole", "plain"),
    ("plain", "submodule"),
    ("submodule", "plain"),
]
"""Before and now. The names below a wrapper do not depend on the trainer: the quick suite has all pairs for the plain
loop, and for each other trainer the one in which two kinds of wrappers meet."""


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the next objects of a script with this wrapper."""
    original, chosen = Objects.of.__func__, ["plain"]  # type: ignore[attr-defined]

    def of(kind: Any, setup: Setup) -> Objects:
        made: Objects = original(kind, setup)
        made.model = WRAPS[chosen[0]](made.model)
        made.optimizer.param_groups[0]["params"] = [*made.model.parameters()]
        return made

    def ends(self: Objects) -> End:
        moments = [value for p in self.model.parameters() for value in self.optimizer.state[p].values()]
        return self.trace, digest(weights=whole([*self.model.parameters()]), optimizer=whole(moments))

    monkeypatch.setattr(Objects, "of", classmethod(of))
    monkeypatch.setattr(Objects, "ends", ends)
    monkeypatch.setattr(test_resume_changes, "Module", Whole)
    return lambda kind: chosen.__setitem__(0, kind)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def resumed(trainer: Trainer, folder: Path, setup: Setup) -> End:
    return trainer.train(setup, resume_only(folder), 11)


@pytest.mark.cells(2)
@pytest.mark.parametrize(("trainer", "pair"), crossed(tuple(TRAINERS), PAIRS), ids=str)
def test_a_run_resumes_with_another_wrapper(
    trainer: str, pair: tuple[str, str], first_parts: FirstParts, tmp_path: Path, wrapped: Callable[[str], None]
) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    assert_resumes(TRAINERS[trainer], *pair, first_parts, tmp_path, wrapped)


@pytest.mark.cells(2)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("adapts", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "now"), crossed(RANKED, RANKED))
def test_a_run_resumes_with_another_wrapper_of_ranks(
    before: str,
    now: str,
    adapts: bool,
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one process, so that each wrapper computes the same; around an adapter, too."""
    if adapts:
        for kind in {before, now}:
            monkeypatch.setitem(WRAPS, kind, lambda model, outer=WRAPS[kind]: outer(lora(model)))
    assert_resumes(TRAINERS["plain"], before, now, first_parts, tmp_path, wrapped, f" of ranks {adapts}")


@pytest.mark.cells(2)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ["whole", "ddp", "fsdp2"])
@pytest.mark.parametrize("adapted", ["before", "now"])
def test_an_adapter_under_a_wrapper_of_ranks_is_refused_by_name(
    kind: str,
    adapted: str,
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only one of both has it, and before training begins."""
    monkeypatch.setitem(WRAPS, "lora", lora)
    before, now = ("lora", kind) if adapted == "before" else (kind, "lora")
    wrapped(before)
    folder = first_parts.copy(TRAINERS["plain"], Setup(), tmp_path / "1", before)
    wrapped(now)
    with pytest.raises(MismatchError, match=r"head\.lora_A\.default\.weight"):
        resumed(TRAINERS["plain"], folder, Setup())


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    ("trainer", "pair"), crossed(tuple(TRAINERS), [one for one in PAIRS if one[0] != "plain"]), ids=str
)
def test_a_snapshot_with_the_names_of_wrappers_is_read(
    trainer: str,
    pair: tuple[str, str],
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As earlier versions have written them."""
    before, now = pair
    with monkeypatch.context() as earlier:
        earlier.setattr(module_names, "_attributes", lambda _: ())
        wrapped(before)
        first_parts.copy(TRAINERS[trainer], Setup(), tmp_path / "1", f"{before} with its names")
    assert_continues(TRAINERS[trainer], tmp_path / "1", now, wrapped)


def assert_resumes(
    trainer: Trainer,
    before: str,
    now: str,
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    kind: str = "",
) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    wrapped(before)
    assert_continues(trainer, first_parts.copy(trainer, Setup(), tmp_path / "1", before + kind), now, wrapped)


def assert_continues(trainer: Trainer, folder: Path, now: str, wrapped: Callable[[str], None]) -> None:
    """The rest of the run is as if nothing had been interrupted."""
    setup = Setup()
    wrapped(now)
    expected = by_hand(trainer, setup)
    end = resumed(trainer, folder, setup)
    assert end[0] == expected[0][AT:]
    assert end[1] == expected[1]
    assert not report(folder).not_restored


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("before", "now"), [("plain", "whole"), ("whole", "plain"), ("plain", "inner"), ("inner", "whole")]
)
def test_repeated_steps_are_compared(before: str, now: str, tmp_path: Path) -> None:
    """They are the same for another wrapper that computes the same."""
    lives.train(tmp_path, _wrapped_job(before), lives.SNAPSHOT + 2)
    replay = lives.replay_of(lives.train(tmp_path, _wrapped_job(now), 2 * lives.SNAPSHOT))
    assert (replay.result, replay.steps) == ("exact", 2)


def _wrapped_job(kind: str) -> lives.Job:
    job = lives.make()
    if kind == "inner":
        name, inner = next(iter(job.model.named_children()))
        setattr(job.model, name, torch.compile(inner, backend="eager"))
    elif kind == "whole":
        job.model = torch.compile(job.model, backend="eager")
    return job


class Own(nn.Module):
    """Attributes of a user that are called as those of wrappers are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["module", "_orig_mod", "base_layer", "model", "_fsdp_wrapped_module"])
@pytest.mark.parametrize("outside", ["plain", "whole"])
def test_an_attribute_of_the_user_keeps_its_name(name: str, outside: str) -> None:
    """Also inside a wrapper."""
    model = WRAPS[outside](Own(name))
    assert [*map(canonical(model), model.state_dict())] == [f"{name}.weight", f"{name}.bias"]
    assert stored_name(model)(f"{name}.weight") == f"{name}.weight"


class Shared(nn.Module):
    """A module under two names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        setattr(self, name, self.net)

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Prefixed(nn.Module):
    """A model whose `state_dict` has names of its own."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix, self.net = f"{prefix}.", nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {self.prefix + key: value for key, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, saved: Any, *args: Any, **options: Any) -> Any:
        assert all(key.startswith(self.prefix) for key in saved)
        own = {key.removeprefix(self.prefix): value for key, value in saved.items()}
        return super().load_state_dict(own, *args, **options)


@pytest.mark.parametrize("name", ["module", "_orig_mod", "base_layer"])
@pytest.mark.parametrize("kind", [Shared, Prefixed])
def test_a_run_resumes_with_the_names_of_the_user(kind: Callable[[str], nn.Module], name: str, tmp_path: Path) -> None:
    """A second name of a module, and one that only the `state_dict` has, are no rest of a wrapper."""
    found: list[dict[str, str]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = kind(name)
        optimizer = torch.optim.Adam(model.parameters())
        with Checkpointer(tmp_path, writer="thread") as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer)
            found.append(digest(weights=model.state_dict()))
            if not seed:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                run.step()
                found.append(digest(weights=model.state_dict()))
    assert found[2]["weights"] == found[1]["weights"] != found[0]["weights"]


@pytest.mark.parametrize("outer", [nn.DataParallel, checkpoint_wrapper, WRAPS["whole"]])
@pytest.mark.parametrize("trains", [True, False])
def test_the_mode_of_a_model_is_not_that_of_its_wrapper(outer: Wrap, trains: bool) -> None:
    """A script may switch only what is inside."""
    inner = nn.Linear(2, 2)
    model = outer(inner).train(not trains)
    inner.train(trains)
    saved = dump_flags(model)
    inner.train(not trains)
    restore_flags(model, saved)
    assert inner.training == trains


class WithHead(nn.DataParallel):
    """A wrapper that has a parameter of its own."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.register_parameter(name, nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("name", "expected"), [("scale", {"scale", "weight", "bias"}), ("bias", {"bias", "module.weight", "module.bias"})]
)
def test_no_two_names_become_one(name: str, expected: set[str]) -> None:
    """A name that both have stays as it is."""
    model = WithHead(nn.Linear(2, 2), name)
    assert set(map(canonical(model), model.state_dict())) == expected


def test_names_of_parameters_that_an_optimizer_has_are_those_of_the_script(tmp_path: Path) -> None:
    """They follow the order of the parameters."""
    names = []
    for compiled, backwards in ((False, False), (True, True), (False, True)):
        model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        model = torch.compile(model, backend="eager") if compiled else model
        named = [*model.named_parameters()]
        optimizer = torch.optim.Adam(named[::-1] if backwards else named)
        with Checkpointer(tmp_path, writer="thread") as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.step()
        names.append(optimizer.param_groups[0]["param_names"])
        found = {id(p): name for name, p in named}
        assert names[-1] == [found[id(p)] for p in optimizer.param_groups[0]["params"]]
    assert [name.removeprefix("_orig_mod.") for name in names[1]] == names[0] == names[2]


def lora(model: nn.Module) -> nn.Module:
    """An adapter of the head."""
    peft = pytest.importorskip("peft")
    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False))
    return made


@pytest.mark.cells(2)
@pytest.mark.parametrize("now", ["lora", "compiled lora"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_adapter_resumes(
    trainer: str,
    now: str,
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the frozen weights below it."""
    monkeypatch.setitem(WRAPS, "lora", lora)
    monkeypatch.setitem(WRAPS, "compiled lora", lambda model: _compiled_body(lora(model)))
    assert_resumes(TRAINERS[trainer], "lora", now, first_parts, tmp_path, wrapped)


def _compiled_body(model: Any) -> nn.Module:
    model.base_model.model.body = torch.compile(model.base_model.model.body, backend="eager")
    return model


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_adapter_begins_with_the_weights_of_its_base(
    trainer: str,
    first_parts: FirstParts,
    tmp_path: Path,
    wrapped: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `only` and `strict: no`; else the weights that the snapshot lacks are named before training begins."""
    monkeypatch.setitem(WRAPS, "lora", lora)
    one = TRAINERS[trainer]
    folder = first_parts.copy(one, Setup(), tmp_path / "1", "plain")
    base = dict(Checkpointer(folder).load())
    wrapped("lora")
    for section in ({}, {"resume": {"only": ["model"]}}):
        with pytest.raises(MismatchError, match=r"head\.lora_A\.default\.weight"):
            one.train(Setup(), resume_only(folder, **section), 11)
    found: list[Any] = []
    make = lambda model: found.append(lora(model)) or found[-1]  # noqa: E731
    monkeypatch.setitem(WRAPS, "lora", make)
    one.train(Setup(epochs=1), resume_only(folder, resume={"only": ["model"], "strict": False}), 11)
    frozen = found[0].base_model.model.body[0].weight
    assert any(torch.equal(frozen, value) for value in base.get("model", base.get("state_dict")).values())
    left = {row.name.removeprefix("model.").removeprefix("net.") for row in report(folder).changes}
    assert {"head.lora_A.default.weight", "head.lora_B.default.weight"} <= left


def test_an_adapter_is_refused_without_it(
    first_parts: FirstParts, tmp_path: Path, wrapped: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the snapshot has in addition is named; with `strict: no` the base remains."""
    monkeypatch.setitem(WRAPS, "lora", lora)
    wrapped("lora")
    folder = first_parts.copy(TRAINERS["plain"], Setup(), tmp_path / "1", "lora")
    wrapped("plain")
    with pytest.raises(MismatchError, match=r"head\.lora_A\.default\.weight"):
        TRAINERS["plain"].train(Setup(), resume_only(folder), 11)
    TRAINERS["plain"].train(Setup(), resume_only(folder, resume={"only": ["model"], "strict": False}), 11)
