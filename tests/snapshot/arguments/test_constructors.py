"""Whatever is passed to a constructor: it is taken, or refused at once by the name of the option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_ckpt import AdaptiveCheckpoint as Accelerated
from accelerate_ckpt import TransformersCallback
from ckpt_engine import Checkpointer
from ckpt_engine.config import OPTION_NAMES
from ckpt_engine.errors import ConfigError
from lightning_ckpt import AdaptiveCheckpoint
from tests.accelerate.runs import make_accelerator
from tests.loop.runs import Case
from tests.snapshot.arguments.values import ALL, HUGE, LONE

MAKERS: dict[str, Callable[..., Any]] = {
    "plain": Checkpointer,
    "lightning": AdaptiveCheckpoint,
    "transformers": TransformersCallback,
}


@pytest.mark.cells(1)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_option_is_taken_or_refused_by_its_name(make: Callable[..., Any], tmp_path: Path) -> None:
    """Every option, every value; in a mapping as well, which all of them read alike."""
    taken = 0
    for option in OPTION_NAMES:
        for value in ALL.values():
            calls = [lambda option=option, value=value: make(tmp_path, **{option: value})]
            if make is Checkpointer:
                calls.append(lambda option=option, value=value: make({"tiers": str(tmp_path), option: value}))
            for call in calls:
                try:
                    call()
                except ConfigError as err:
                    assert option in err.message or "given twice" in err.message
                    err.message.encode()
                else:
                    taken += 1
    assert taken > 100  # None, what the options are made of, and numbers of any make


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_misspelt_option_is_refused_with_the_one_that_is_meant(make: Callable[..., Any], tmp_path: Path) -> None:
    """As a keyword and as a key, by the same words."""
    for call in (lambda: make(tmp_path, overheat=0.01), lambda: make({"tiers": str(tmp_path), "overheat": 0.01})):
        with pytest.raises(ConfigError, match=r"overheat: unknown key; did you mean 'overhead'\?"):
            call()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_place_is_a_text_or_a_path(make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else is refused at once, and so is a path that no system call takes."""
    monkeypatch.chdir(tmp_path)
    for name, value in ALL.items():
        for root in (value, {"tiers": value}, {"tiers": [str(tmp_path), value]}):
            try:
                made = make(root)
            except ConfigError as err:
                err.message.encode()
            else:
                assert isinstance(value, str | Path) or name in ("PurePath",), (name, root)
                assert made.config.root_url
    for bad in (LONE, "a\0b", Path(LONE), b"bytes", ""):
        with pytest.raises(ConfigError):
            make(bad)


def test_an_accelerated_loop_refuses_what_is_no_option(tmp_path: Path) -> None:
    """Before anything is started; the options are those of all constructors."""
    accelerator = make_accelerator(Case())
    for value in (object(), -5, b"x", LONE, HUGE):
        with pytest.raises(ConfigError):
            Accelerated(accelerator, value)
        with pytest.raises(ConfigError, match="every_seconds"):
            Accelerated(accelerator, tmp_path, every_seconds=value)


def test_what_cannot_be_tracked_is_named(tmp_path: Path) -> None:
    """Every value beside a model and its optimizer."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for value in ALL.values():
        ckpt = Checkpointer(tmp_path, writer="thread")
        try:
            ckpt.track(model=model, optimizer=optimizer, extra=value).release()
        except ConfigError as err:
            assert "extra" in err.message
        finally:
            ckpt.close()
