"""A durable snapshot is one instant, wherever and in whichever trainer weights change; else it fails by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpt_engine.snapshot import cuda
from tests.snapshot.isolation.cells import AHEAD, KINDS, NEVER_TORN, PLACES, TRAINERS, run
from tests.support.delayed_devices import delay_copies, record_instants


def require_whole(trainer: str, kind: str, where: str, lazy: str, root: Path, *, device: bool) -> None:
    """Every durable snapshot is its instant; on a device a torn copy is refused once, and named."""
    with pytest.MonkeyPatch.context() as patch:
        if device:
            delay_copies(patch)
        instants = record_instants(patch)
        log = run(trainer, kind, where, root, lazy)
    refused = [line for line in log.lines if "changed while it was copied" in line]
    assert instants.torn(root) == [], (trainer, kind, where)
    # Lightning runs forward and backward inside of `optimizer.step`, behind the hooks that come before it.
    ahead = where in AHEAD or (trainer == "lightning" and where == "before step")
    expected = device and ahead and kind not in NEVER_TORN
    assert len(refused) == (1 if expected else 0), (trainer, kind, where, log.lines)
    assert not expected or "CKPT200" in refused[0] or "lazy: off" in refused[0]


def spread(places: Sequence[str]) -> list[tuple[str, str]]:
    """Each kind at one place, so that each place has some."""
    return [(kind, places[number % len(places)]) for number, kind in enumerate(KINDS)]


def test_host_memory_is_copied_before_it_can_change(tmp_path: Path) -> None:
    """Right by construction: nothing is copied behind training."""
    for kind, where in spread(PLACES):
        require_whole("plain", kind, where, "on", tmp_path / kind / "run", device=False)


def test_a_torn_copy_of_a_device_is_refused_and_later_ones_are_whole(tmp_path: Path) -> None:
    """From then on snapshots are copied before training continues; that is reported once."""
    for kind, where in spread(PLACES):
        require_whole("plain", kind, where, "auto", tmp_path / kind / "run", device=True)


@pytest.mark.cells(1)
@pytest.mark.parametrize("trainer", TRAINERS[1:])
def test_it_is_so_in_every_trainer(trainer: str, tmp_path: Path) -> None:
    """No trainer needs a call of the user."""
    for kind, where in [("clamp by data", "fetch"), ("moment", "in backward")]:
        require_whole(trainer, kind, where, "on", tmp_path / where / "run", device=True)


def require_torn(kind: str, where: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has durable snapshots that are no instants."""
    instants = record_instants(monkeypatch)
    run("plain", kind, where, root, "on")
    assert instants.torn(root), (kind, where)


def test_without_the_proof_each_kind_tears_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    monkeypatch.setattr(cuda.Flight, "_find_torn", lambda flight: None)
    delay_copies(monkeypatch)
    for kind, where in spread(AHEAD):
        if kind not in NEVER_TORN:
            require_torn(kind, where, tmp_path / kind / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("where", AHEAD)
def test_without_the_proof_each_kind_tears_a_snapshot_at_each_place_ahead_of_the_fence(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for all kinds at all places."""
    monkeypatch.setattr(cuda.Flight, "_find_torn", lambda flight: None)
    delay_copies(monkeypatch)
    for kind in KINDS:
        if kind not in NEVER_TORN:
            require_torn(kind, where, tmp_path / kind / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
def test_all_kinds_in_all_places_of_every_trainer(trainer: str, where: str, device: bool, tmp_path: Path) -> None:
    """More than a thousand cells, none of them torn and durable."""
    for number, kind in enumerate(KINDS):
        lazy = "on" if number % 2 else "auto"
        require_whole(trainer, kind, where, lazy, tmp_path / kind / "run", device=device)
