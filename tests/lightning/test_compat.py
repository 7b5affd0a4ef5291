"""Every private name of Lightning in use is there; a failure here names the feature at risk."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning.pytorch as pl
import pytest

import lightning_ckpt
from ckpt_engine.data.private_names import PrivateName, lacking
from ckpt_engine.errors import CkptError
from lightning_ckpt import compat
from lightning_ckpt.compat import PRIVATE_NAMES, LightningInternals
from tests.lightning.runs import Case, make_trainer

PACKAGE = Path(lightning_ckpt.__file__).parent


@pytest.fixture
def trainer() -> pl.Trainer:
    return make_trainer(Case(), [], False)


@pytest.mark.parametrize("entry", PRIVATE_NAMES, ids=lambda e: f"{e.owner}.{e.name}")
def test_a_private_name_is_still_there(entry: PrivateName, trainer: pl.Trainer) -> None:
    """Upstream has not renamed it."""
    missing = lacking([entry], LightningInternals(trainer).owners())
    assert entry not in missing, f"Lightning {compat.VERSION} lacks {entry.owner}.{entry.name}: {entry.used_for} fails"


def test_a_missing_name_is_one_clear_error(trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which feature needs what, and what to do."""
    gone = (PrivateName("epoch_loop", "_no_such_thing", "the snapshot instant"),)
    monkeypatch.setattr(compat, "PRIVATE_NAMES", gone)
    with pytest.raises(CkptError, match=r"lacks names .*epoch_loop\._no_such_thing \(for the snapshot instant\)"):
        LightningInternals(trainer).probe()


def test_an_old_lightning_is_refused(trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming after a validation is not exact before 2.5."""
    monkeypatch.setattr(compat, "installed_version", lambda: (2, 4))
    with pytest.raises(CkptError, match="too old"):
        LightningInternals(trainer).probe()


def test_nothing_else_touches_private_names_of_lightning() -> None:
    """Outside of compat no attribute with a leading underscore is used on anything but our own objects."""
    known = {entry.name for entry in PRIVATE_NAMES}
    offenders = []
    for path in PACKAGE.glob("*.py"):
        if path.name in ("compat.py", "compat_data.py"):
            continue
        offenders += [
            f"{path.name}:{node.lineno} {node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in known and node.attr.startswith("_")
        ]
    assert offenders == []


def test_wrapping_is_undone_completely(trainer: pl.Trainer) -> None:
    """That is so where other code had wrapped the same method before us, too."""
    connector = trainer._checkpoint_connector
    connector.resume_start = theirs = connector.resume_start  # an instance attribute now
    internals = LightningInternals(trainer)
    internals.wrap(dict.fromkeys(("resume_start", "advance"), lambda original, given: original(given)))
    assert connector.resume_start is not theirs
    internals.unwrap()
    assert connector.resume_start is theirs
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
