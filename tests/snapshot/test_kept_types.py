"""Values keep their class, or are refused by their path: none comes back as another kind."""

from __future__ import annotations

import enum
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.errors import UnstorableLeafError


class Name(str):
    """A text of a class of its own."""

    __slots__ = ()


class Count(int):
    """A whole number of a class of its own."""


class Share(float):
    """A number of a class of its own."""


class Tagged(str):
    """A text with an attribute."""

    tag: str


class Folder(pathlib.PurePosixPath):
    """A path of a class of its own."""


class Unit(np.ndarray[Any, Any]):
    """An array of a class of its own."""


class Level(enum.IntEnum):
    """Enums are whole numbers, too, and have a kind of their own."""

    LOW = 1


def there_and_back(value: Any, folder: Path) -> Any:
    with Checkpointer(folder, writer="thread") as ckpt:
        ckpt.save({"here": {"value": value}}, step=1).wait(30)
    with Checkpointer(folder, writer="thread") as ckpt:
        state = ckpt.load()
    assert state is not None
    return state["here"]["value"]


KEPT = {
    "str": Name("a"),
    "int": Count(3),
    "float": Share(0.5),
    "not finite": Share("inf"),
    "as a key": {Name("k"): 1},
    "Windows path": pathlib.PureWindowsPath("C:\\data\\run"),
    "path": pathlib.PurePosixPath("/data"),
    "enum": Level.LOW,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_value_keeps_its_class(name: str, tmp_path: Path) -> None:
    back = there_and_back(KEPT[name], tmp_path)
    assert back == KEPT[name] and type(back) is type(KEPT[name])
    if isinstance(back, dict):
        assert [type(key) for key in back] == [Name]


def tagged() -> Tagged:
    text = Tagged("a")
    text.tag = "b"
    return text


REFUSED = {
    "text with attributes": tagged(),
    "path of a class of its own": Folder("/data"),
    "matrix": np.eye(2).view(np.matrix),
    "array of a class of its own": np.eye(2).view(Unit),
    "array with a mask": np.ma.masked_array([1.0, 2.0], [True, False]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_lose_something_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, writer="thread") as ckpt,
        pytest.raises(UnstorableLeafError, match="here/value"),
    ):
        ckpt.save({"here": {"value": REFUSED[name]}}, step=1)


@pytest.mark.parametrize("requires", [True, False])
def test_a_tensor_keeps_whether_it_is_trained(requires: bool, tmp_path: Path) -> None:
    one = torch.ones(2, requires_grad=requires)
    back = there_and_back([one, one, (one * 2)], tmp_path)
    assert [tensor.requires_grad for tensor in back] == [requires, requires, False]
    assert back[0] is back[1]
