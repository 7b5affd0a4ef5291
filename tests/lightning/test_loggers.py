"""`kill -9` at random moments, and every logger has one curve, each step once, with the values of an unbroken run."""

from __future__ import annotations

import csv
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_ckpt.compat_data import curves_of
from tests.lightning import log_script
from tests.lightning.log_script import READERS, logger_of, run
from tests.support.curves import Curve, kills, need, wait_for_a_snapshot
from tests.support.trainers import ForkServer, log, signal_after, wait_for_entries

NEEDS = {"csv": "lightning", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
TRACE_ENTRIES = 24
PACE_SECONDS = 0.01


class Trainers(ForkServer):
    """Trains with loggers; jobs are those of `tests.lightning.log_script`."""

    def __init__(self) -> None:
        super().__init__("tests.lightning.log_script")

    def lives(self, job: dict[str, Any], entries: int | None, delay_seconds: float = 0.0) -> str:
        """One process, killed some time after its trace has so many entries; what it has logged."""
        pid = self.start(job)
        if entries is not None:
            wait_for_entries(pid, Path(job["trace"]), entries)
            wait_for_a_snapshot(Path(job["root"]))
            signal_after(pid, delay_seconds)
        status = self.join()
        assert status in ((0,) if entries is None else (0, -signal.SIGKILL)), log(job["trace"])
        return log(job["trace"])


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    server = Trainers()
    yield server
    server.close()


def job_of(kind: str, folder: Path, life: Any, **more: Any) -> dict[str, Any]:
    """One start of the same command."""
    return {
        "kind": kind,
        "folder": str(folder / "logs"),
        "root": str(folder / "run"),
        "trace": str(folder / f"{life}.trace"),
        "seed": 0,
        "pace": PACE_SECONDS,
        **more,
    }


def unbroken(kind: str, folder: Path, **more: Any) -> Curve:
    """What a run logs that nothing interrupts, without us."""
    folder.mkdir()
    run(job_of(kind, folder, "unbroken", **more) | {"root": None, "pace": 0.0})
    return READERS[kind](folder / "logs")


def assert_one_curve(kind: str, folder: Path, trainers: Trainers, number: int = 0, **more: Any) -> None:
    """Three processes are killed, the fourth one ends the run, and a fifth finds nothing left to do."""
    need(NEEDS[kind])
    expected = unbroken(kind, folder / "unbroken", **more)
    assert len(expected) > TRACE_ENTRIES
    for life, kill in enumerate([*kills(TRACE_ENTRIES // 2, number), (None, 0.0), (None, 0.0)]):
        trainers.lives(job_of(kind, folder, life, **more), *kill)
    assert READERS[kind](folder / "logs") == expected


@pytest.mark.parametrize("version", [None, "mine"])
@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_killed_run_has_one_curve(kind: str, version: str | None, tmp_path: Path, trainers: Trainers) -> None:
    """All lives log into one version folder, which the user named or Lightning chose."""
    assert_one_curve(kind, tmp_path, trainers, version=version)


def test_a_table_is_whole_while_it_gets_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning writes the table again then; a process that ends in the middle of that leaves the earlier one."""
    logger = CSVLogger(str(tmp_path), version="mine")
    (curve,) = curves_of([logger])
    assert curve.begin(None) == ""
    logger.log_metrics({"loss": 1.0}, step=0)
    assert curve.marks() == {"rows": 1}
    table = tmp_path / "lightning_logs" / "mine" / "metrics.csv"
    before = table.read_bytes()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", fail)
    logger.log_metrics({"val": 2.0}, step=1)
    with pytest.raises(KeyboardInterrupt):
        logger.save()
    assert table.read_bytes() == before


@pytest.mark.slow
def test_a_killed_run_is_one_run_of_mlflow(tmp_path: Path, trainers: Trainers) -> None:
    """With a folder as its store."""
    assert_one_curve("mlflow", tmp_path, trainers)


@pytest.mark.slow
def test_a_killed_run_is_one_run_of_wandb(tmp_path: Path, trainers: Trainers) -> None:
    """Offline each start has a folder, and `wandb sync` makes one run of those with one id."""
    need("wandb")
    for life, kill in enumerate([(8, 0.0), (8, 0.0), (None, 0.0)]):
        trainers.lives(job_of("wandb", tmp_path, life, pace=0.05), *kill)
    found = [path.name.rpartition("-")[2] for path in (tmp_path / "logs" / "wandb").glob("offline-run-*")]
    assert len(found) == 3
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tensorboard", ["_version", "_experiment", "_kwargs"]),
        ("mlflow", ["_tracking_uri", "_experiment_name", "_run_id", "_initialized"]),
        ("wandb", ["_id", "_experiment", "_wandb_init"]),
    ],
)
def test_the_private_names_of_a_logger_are_there(kind: str, names: list[str], tmp_path: Path) -> None:
    """Those that `lightning_ckpt.compat_data` sets; those of `CSVLogger` are in `PRIVATE_NAMES`."""
    need(NEEDS[kind])
    logger = logger_of(kind, str(tmp_path), None)
    assert [name for name in names if not hasattr(logger, name)] == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_fork_begins_a_curve_of_its_own(kind: str, tmp_path: Path) -> None:
    """It names its parent among the hyper-parameters, and its later starts continue that curve, not the parent's."""
    need(NEEDS[kind])
    run(job_of(kind, tmp_path, "parent", epochs=1))
    before = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file()}
    fork = {"root": str(tmp_path / "fork"), "options": {"resume": {"from": f"{tmp_path / 'run'}#4"}}}
    for epochs in (2, 3):
        run(job_of(kind, tmp_path, f"fork{epochs}", epochs=epochs, **fork))
    assert {path: path.read_bytes() for path in before} == before
    (folder,) = {path.parent for path in (tmp_path / "logs").rglob("*") if path.is_file()} - {p.parent for p in before}
    hparams = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert (hparams["width"], hparams["forked_from"].rpartition(" ")[0]) == (8, f"file://{tmp_path / 'run'}#4")
    steps = [step for tag, step, _ in READERS[kind](folder) if tag == "loss_step"]
    assert steps == list(range(4, 4 + len(steps)))


@pytest.mark.slow
def test_a_fork_is_a_run_of_its_own_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script asks W&B to fork its run: at the first start alone, later ones continue the new run."""
    need("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = list[Any]()

    def logger_with(*_: Any) -> WandbLogger:
        made.append(WandbLogger(save_dir=str(tmp_path), offline=True, resume=None, fork_from="parent?_step=4"))
        return made[-1]

    run(job_of("wandb", tmp_path, "parent", epochs=1))
    monkeypatch.setattr(log_script, "logger_of", logger_with)
    fork = {"root": str(tmp_path / "fork"), "options": {"resume": {"from": f"{tmp_path / 'run'}#4"}}}
    for epochs in (2, 3):
        run(job_of("wandb", tmp_path, f"fork{epochs}", epochs=epochs, **fork))
        made[-1].experiment.finish()
    first, second = made
    assert first.version == second.version
    assert first.experiment.config["forked_from"].startswith(f"file://{tmp_path / 'run'}#4")
