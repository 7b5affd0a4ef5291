"""Reading a snapshot runs no code that it names, whatever lies in the modules of this process."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import enum
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.dcp import CkptReader
from ckpt_engine.errors import CkptError, FormatError, NoUsableSnapshotError
from ckpt_engine.state import json_types
from ckpt_engine.state.rebuild import Rebuilder
from tests.support.forged import forge

RAN: list[str] = []


class Hook:
    """Runs when it is read, called or written as an attribute of a class."""

    def __get__(self, *_: Any) -> Any:
        RAN.append("descriptor read")
        return self

    def __set__(self, *_: Any) -> None:
        RAN.append("descriptor written")

    def __getattr__(self, name: str) -> Any:
        RAN.append(f"attribute {name}")
        raise AttributeError(name)


class Meta(type):
    """Its classes run code when anything of them is looked at."""

    def __getattribute__(cls, name: str) -> Any:
        RAN.append(f"metaclass {name}")
        return super().__getattribute__(name)

    def __call__(cls, *_: Any) -> Any:
        RAN.append("metaclass called")

    def __instancecheck__(cls, _: Any) -> bool:
        RAN.append("metaclass asked for objects")
        return True

    def __subclasscheck__(cls, _: Any) -> bool:
        RAN.append("metaclass asked for classes")
        return True


class EnumHooks(enum.EnumMeta):
    def __getattribute__(cls, name: str) -> Any:
        RAN.append(f"enum metaclass {name}")
        return super().__getattribute__(name)

    def __getitem__(cls, name: str) -> Any:
        RAN.append("enum item")
        return super().__getitem__(name)


@dataclasses.dataclass
class Watched(metaclass=Meta):
    x: int = 1


class Members(enum.Enum, metaclass=EnumHooks):
    x = 1


@dataclasses.dataclass
class Settable:
    """A field of it is a property: putting a value there runs the setter."""

    x: int

    def __new__(cls, *_: Any) -> Any:
        RAN.append("new")
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        RAN.append("setattr")


Settable.x = Hook()  # type: ignore[assignment]


@dataclasses.dataclass
class Asked:
    x: int

    def __getattribute__(self, name: str) -> Any:
        RAN.append(f"object {name}")
        return object.__getattribute__(self, name)


@dataclasses.dataclass
class Ended:
    """Its objects run code when they are dropped."""

    x: int

    def __del__(self) -> None:
        RAN.append("del")


@dataclasses.dataclass
class Made:
    """It can be made: what runs in `__new__`, `__init__` and `__setattr__` does not."""

    x: int

    def __new__(cls, *_: Any) -> Any:
        RAN.append("new")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        RAN.append("post init")

    def __setattr__(self, name: str, value: Any) -> None:
        RAN.append("setattr")


class Table(dict):
    def __new__(cls, *_: Any) -> Any:
        RAN.append("new")
        return dict.__new__(cls)

    def __setitem__(self, key: Any, value: Any) -> None:
        RAN.append("setitem")

    def update(self, *_: Any, **__: Any) -> None:
        RAN.append("update")


class Row(collections.namedtuple("_Row", "x")):
    def __new__(cls, *_: Any) -> Any:
        RAN.append("new")


class Color(enum.Enum):
    x = 1

    @classmethod
    def _missing_(cls, _: Any) -> Any:
        RAN.append("missing")


class Loud(types.ModuleType):
    """A module that runs code when anything of it is looked at, as packages that import lazily do."""

    def __getattribute__(self, name: str) -> Any:
        RAN.append(f"module {name}")
        raise AttributeError(name)


class Stranger:
    """Stands in `sys.modules` and is no module."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        RAN.append("stranger")
        return {}

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        RAN.append("stranger")
        return types.ModuleType


class Ordinary:
    """A class that is no dataclass, no dict and no enum, with an object and a class as attributes."""

    hook = Hook()

    class Inner:
        pass


NAMES = (
    "ctypes:cdll./path/evillib",
    "ctypes:cdll.evillib",
    "ctypes:CDLL",
    "ctypes:cdll",
    "torch:_inductor.x",
    "torch:onnx.x",
    "torch:classes.a.b",
    "torch:ops.a.b",
    "os:system",
    "subprocess:Popen",
    "builtins:eval",
    "builtins:type",
    "builtins:object",
    "antigravity:x",
    "traps:Meta",
    "traps:Watched",
    "traps:Members",
    "traps:Settable",
    "traps:Asked",
    "traps:Ended",
    "traps:Ordinary",
    "traps:Ordinary.hook",
    "traps:Ordinary.hook.x",
    "traps:Ordinary.Inner",
    "traps:Ordinary.Inner.__class__",
    "traps:instance",
    "traps:missing",
    "loud:x",
    "loud:x.y",
    "stranger:x",
    "nothing:x",
    "none:x",
    "",
    ":",
    ":x",
    "traps:",
    "traps:.",
    "traps:Ordinary.",
)


@pytest.fixture(autouse=True)
def traps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules and classes that tell `RAN` when code of theirs runs."""
    module = types.ModuleType("traps")
    vars(module).update(
        {one.__name__: one for one in (Settable, Asked, Ended, Made, Table, Row, Color, Ordinary, Meta)}
    )
    vars(module).update(Watched=Watched, Members=Members, instance=Ordinary())
    module.__getattr__ = lambda name: RAN.append(f"traps {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "traps", module)
    monkeypatch.setitem(sys.modules, "loud", Loud("loud"))
    monkeypatch.setitem(sys.modules, "stranger", Stranger())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "none", None)  # type: ignore[arg-type]
    monkeypatch.setattr(ctypes.LibraryLoader, "__getattr__", lambda _, name: RAN.append(f"library {name}"))
    monkeypatch.setitem(vars(torch), "__getattr__", asked_of_torch)
    RAN.clear()
    yield
    assert RAN == [], "code that a snapshot has named ran"


def asked_of_torch(name: str) -> Any:
    if name != "privateuseone":  # torch asks itself when it saves
        RAN.append(f"torch {name}")
    raise AttributeError(name)


def nodes(name: str) -> dict[str, Any]:
    """A node of every kind that names a type."""
    return {
        "dataclass": {"$": "dataclass", "type": name, "fields": {"x": 1}},
        "mapping": {"$": "mapping", "type": name, "items": [["x", 1]]},
        "namedtuple": {"$": "namedtuple", "type": name, "fields": ["x"], "items": [1]},
        "enum": {"$": "enum", "type": name, "name": "x"},
    }


PLAIN = {"dataclass": types.SimpleNamespace(x=1), "mapping": {"x": 1}, "namedtuple": (1,), "enum": "x"}


def hostile(tree: dict[str, Any]) -> None:
    """Put every kind of node with every name into a tree."""
    tree["named"] = {f"{number}": nodes(name) for number, name in enumerate(NAMES)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run whose snapshot names everything that it should not."""
    model = collections.OrderedDict(w=torch.arange(6.0))
    with Checkpointer(tmp_path / "run", writer="thread") as ckpt:
        ckpt.save({"state_dict": model, "pytorch-lightning_version": "2", "step": 1}, step=1).wait(30)
    forge(tmp_path / "run", lambda body: hostile(body["tree"]))
    return tmp_path / "run"


def test_load_takes_no_class_that_is_not_there_as_it_is(root: Path) -> None:
    """Every node comes back as a plain equivalent, a note names its path, and nothing was imported."""
    before = set(sys.modules)
    checkpointer = Checkpointer(root)
    state = checkpointer.load()
    assert state is not None
    assert checkpointer.loaded is not None
    notes = "\n".join(checkpointer.loaded.notes)
    for number in range(len(NAMES)):
        for kind, plain in PLAIN.items():
            assert state["named"][f"{number}"][kind] == plain, (NAMES[number], kind)
            assert f"named/{number}/{kind}: " in notes
    assert set(sys.modules) == before


def test_a_class_that_is_there_is_made_without_its_own_code() -> None:
    """The values are there, though no `__new__`, `__init__` or way of setting values has run."""
    tree = {kind: nodes(f"traps:{name}")[kind] for kind, name in
            (("dataclass", "Made"), ("mapping", "Table"), ("namedtuple", "Row"), ("enum", "Color"))}  # fmt: skip
    state = Rebuilder({}).state(tree)
    assert [type(one) for one in state.values()] == [Made, Table, Row, Color]
    assert (state["dataclass"].x, dict.__getitem__(state["mapping"], "x"), state["namedtuple"], state["enum"]) == (
        1, 1, (1,), Color.x,
    )  # fmt: skip


def test_classes_of_every_ordinary_form_come_back() -> None:
    """Frozen ones, ones with slots, ordered dicts and nested classes are taken as before."""
    slotted = dataclasses.make_dataclass("Slotted", [("x", int)], slots=True, frozen=True)
    ordered = type("Ordered", (collections.OrderedDict,), {})
    Ordinary.Slotted, Ordinary.Ordered = slotted, ordered  # type: ignore[attr-defined]
    state = Rebuilder({}).state(
        {"a": nodes("traps:Ordinary.Slotted")["dataclass"], "b": nodes("traps:Ordinary.Ordered")["mapping"]}
    )
    assert state == {"a": slotted(1), "b": ordered(x=1)}
    assert list(state["b"].items()) == [("x", 1)]


@pytest.mark.cells(3)
@pytest.mark.parametrize("name", ["onnx", "_inductor", "nn", "load", "__getattr__", "Tensor", "", "float32 ", 3, None])
@pytest.mark.parametrize("where", ["torch.dtype", "torch.layout", "torch.memory_format", "view", "entry"])
def test_no_name_of_torch_is_asked_for_that_is_no_dtype(root: Path, name: Any, where: str) -> None:
    """torch imports what it is asked for: names of dtypes are looked for where they lie."""

    def change(body: dict[str, Any]) -> None:
        (entry,) = body["entries"]
        if where == "entry":
            body["entries"][entry]["dtype"] = name
        elif where == "view":
            view = {"dtype": name, "shape": [1], "stride": [1], "byte_offset": 0}
            body["tree"]["view"] = {"$": "tensor", "entry": entry, "view": view}
        else:
            body["tree"]["name"] = {"$": where, "v": name}

    forge(root, change)
    with pytest.raises(NoUsableSnapshotError):
        Checkpointer(root).load()


@pytest.mark.parametrize("text", ["O", "object", "|O8", "O,i4", "f4,f4", "T", "(2,)f4", "<f4\n", "float32", None, 4])
def test_no_dtype_of_numpy_has_references(text: Any) -> None:
    """Bytes of a snapshot never become addresses of objects."""
    array = torch.zeros(16, dtype=torch.uint8)
    for node in ({"$": "ndarray", "entry": "w", "dtype": text, "shape": [2]},
                 {"$": "npscalar", "dtype": text, "hex": "00" * 8}, {"$": "np.dtype", "v": text}):  # fmt: skip
        with pytest.raises(FormatError):
            Rebuilder({"w": array}).state({"a": node})


def test_omegaconf_is_not_imported_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program has not imported it plain containers come back, and a note says so."""
    monkeypatch.delitem(sys.modules, "omegaconf", raising=False)
    rebuilder = Rebuilder({})
    node = {"$": "omegaconf", "container": {"a": 1}, "flags": {"struct": None, "readonly": None}}
    assert rebuilder.state({"a": node}) == {"a": {"a": 1}}
    assert "a: omegaconf is not imported here" in rebuilder.notes[0]
    assert "omegaconf" not in sys.modules


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_no_verb_runs_what_a_snapshot_names(root: Path, tmp_path: Path) -> None:
    """That is so for every verb that reads the tree, and for every form of export."""
    lines = [[verb, str(root)] for verb in ("ls", "show", "verify", "status", "compact", "pin")]
    lines += [["ls", str(root), "--json"], ["show", str(root), "--all"], ["show", str(root), "--json"]]
    lines += [["prune", str(root), "--last", "1"], ["cp", str(root), str(tmp_path / "to")]]
    lines += [
        ["export", str(root), str(tmp_path / form), "--to", form, "--force"]
        for form in ("safetensors", "lightning", "torch", "dcp", "accelerate", "transformers")
    ]
    for line in lines:
        done = CliRunner().invoke(commands, line)
        assert done.exception is None or isinstance(done.exception, CkptError | SystemExit), (line, done.exc_info)
    color = {"$": "enum", "type": "traps:Color", "name": "x"}
    forge(tmp_path / "to", lambda body: body["tree"]["named"].update({"0": color}))
    done = CliRunner().invoke(commands, ["diff", str(root), str(tmp_path / "to")])
    assert done.exit_code == 1
    assert "named/0" in done.output


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_reads_without_running_what_a_snapshot_names(root: Path) -> None:
    """The reader for torch.distributed.checkpoint makes the same plain equivalents."""
    state = {"state_dict": {"w": torch.zeros(6)}}
    dcp.load(state, storage_reader=CkptReader(root))
    assert torch.equal(state["state_dict"]["w"], torch.arange(6.0))


def reference(module: str, name: str) -> bytes:
    """A pickle of nothing but a name."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"."


@pytest.mark.parametrize(("module", "name"), [("torch", "onnx"), ("torch", "_inductor"), ("os", "system"),
                                              ("traps", "x"), ("loud", "x"), ("torch.onnx", "export")])  # fmt: skip
@pytest.mark.parametrize("form", ["dcp", "torch", "zip"])
def test_import_looks_nothing_up_that_a_file_names(tmp_path: Path, form: str, module: str, name: str) -> None:
    """What is imported names classes, too: none is asked for."""
    source = tmp_path / "source"
    if form == "dcp":
        source.mkdir()
        (source / ".metadata").write_bytes(reference(module, name))
    elif form == "torch":
        source.write_bytes(reference(module, name))
    else:
        torch.save({"a": 1}, source)
        with zipfile.ZipFile(source) as old:
            parts = {one: old.read(one) for one in old.namelist()}
        with zipfile.ZipFile(source, "w") as new:
            for one, content in parts.items():
                new.writestr(one, reference(module, name) if one.endswith("data.pkl") else content)
    done = CliRunner().invoke(commands, ["import", str(source), str(tmp_path / "run")])
    assert isinstance(done.exception, CkptError), done.exc_info


def test_the_lookup_itself_asks_nothing() -> None:
    """By itself, for all names, the lookup finds nothing but what lies there."""
    there = ("traps:Settable", "traps:Ordinary", "traps:Ordinary.Inner", "ctypes:CDLL")
    there += ("builtins:type", "builtins:object")
    assert {name for name in NAMES if json_types.find_class(name) is not None} == set(there)
    assert json_types.find_class("traps:Made") is Made
    assert "__del__" in vars(subprocess.Popen), "this is why no object of this class is made"
