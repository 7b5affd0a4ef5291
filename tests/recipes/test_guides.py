"""The guides as a reader copies them: their scripts, their policy and their formula do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ckpt_engine import Checkpointer
from ckpt_engine.config import load_config
from ckpt_engine.config.option_types import parse_duration_seconds
from tests.recipes.lives import REPOSITORY, Life, until
from tests.servers.fixtures import bucket, moto  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server

DOCS = REPOSITORY / "docs"
STORAGE = REPOSITORY / "ckpt_engine" / "store" / "storage"
ACTIONS = {
    "s3:PutObject": {"put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"},
    "s3:GetObject": {"get_object", "head_object"},
    "s3:DeleteObject": {"delete_object"},
    "s3:ListBucket": {"list_objects_v2"},
    "s3:AbortMultipartUpload": {"abort_multipart_upload"},
    "s3:ListMultipartUploadParts": {"list_parts"},
    "s3:ListBucketMultipartUploads": {"list_multipart_uploads"},
}
"""What AWS asks for each request."""
PROTECTION = {
    "get_object_lock_configuration": "s3:GetBucketObjectLockConfiguration",
    "put_object_retention": "s3:PutObjectRetention",
}
"""The requests of `protect`, and what AWS asks for them."""


def code(page: str, language: str, words: str = "") -> str:
    """The one block of a page in that language with these words."""
    found = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (block,) = [one for one in found if words in one]
    return str(block)


def test_the_policy_allows_what_the_engine_asks_and_no_more() -> None:
    """Each request in the source of the S3 storage needs an action of the policy, and each action has a request."""
    source = "".join(path.read_text() for path in sorted(STORAGE.glob("*.py")))
    known = {name for names in ACTIONS.values() for name in names}
    asked = set(re.findall(r"\b((?:put|get|head|delete|list|copy|create|upload|complete|abort)_\w+)\"", source)) | set(
        re.findall(r"client\.(get_\w+)\(", source)
    )
    requests = {one for one in asked if re.search(r"object|multipart|upload|parts|bucket", one)}
    assert requests == known | set(PROTECTION)
    assert all(f"`{action}`" in (DOCS / "cloud-storage.md").read_text() for action in PROTECTION.values())
    policy = json.loads(code("cloud-storage.md", "json"))
    assert {action for one in policy["Statement"] for action in one["Action"]} == set(ACTIONS)
    on_bucket = next(one for one in policy["Statement"] if not one["Resource"].endswith("*"))
    assert set(on_bucket["Action"]) == {"s3:ListBucket", "s3:ListBucketMultipartUploads"}


@pytest.mark.long
@pytest.mark.parametrize("way", ["environment", "storage_options"])
def test_an_s3_server_of_ones_own_is_used(
    way: str,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The YAML of the guide, with the server in the tier or in the environment, and keys from the environment."""
    text = code("cloud-storage.md", "yaml", "minio" if way == "storage_options" else "every: 10 min")
    text = text.replace("/local/nvme", str(tmp_path)).replace("s3://bucket", f"s3://{bucket}")
    for name, value in moto.environment().items():
        if way == "environment" or name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    (tmp_path / "ckpt.yaml").write_text(text.replace("http://minio.example.org:9000", moto.url))
    with Checkpointer(tmp_path / "ckpt.yaml", writer="thread") as ckpt:
        ckpt.save({"a": torch.ones(4)}, step=1).wait(60)
    shutil.rmtree(tmp_path / "run1")
    state = Checkpointer(tmp_path / "ckpt.yaml").load()
    assert state is not None and torch.equal(state["a"], torch.ones(4))


@pytest.mark.cells(1)
@pytest.mark.parametrize(("options", "slots"), [({"slots": 1}, 1), ({}, 2), ({"tiers": ["memory", "run1"]}, 3)])
def test_the_formula_for_host_memory(
    options: dict[str, Any], slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many slots of the size of the state, within the 5 % that the guide names."""
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.zeros(4_000_000), "b": torch.zeros(1_000_000)}
    nbytes = 4 * 5_000_000
    with Checkpointer(**({"tiers": "run1"} | options)) as ckpt:
        ckpt.prepare(state)
        ckpt.save(state, step=1).wait(60)
        assert slots * nbytes <= ckpt.engine._pipeline.slots.nbytes() <= 1.05 * slots * nbytes


def test_the_table_of_sizes_is_the_formula() -> None:
    """State, host memory with and without a memory tier, an eighth of it, and three snapshots on disk."""
    page = (DOCS / "sizing.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) ([MB]) \|((?: [\d.,]+ GB \|){5})$", page, re.MULTILINE)
    assert len(rows) == 4
    for number, unit, cells in rows:
        size = 12 * float(number) * {"M": 1e6, "B": 1e9}[unit] / 1e9
        shown = [float(one.replace(",", "")) for one in re.findall(r"([\d.,]+) GB", cells)]
        assert shown == pytest.approx([size, 2 * size, 3 * size, 2 * size / 8, 3 * size]), number


@pytest.mark.long
def test_a_run_moves_to_another_folder(tmp_path: Path) -> None:
    """By a plain copy under another name, and by `ckpt cp` to a store and back: each resumes."""
    old = tmp_path / "old"
    with Checkpointer(old, writer="thread") as ckpt:
        ckpt.save({"step": 7, "a": torch.ones(3)}, step=7).wait(60)
    shutil.copytree(old, tmp_path / "plain")
    ckpt_cp = [sys.executable, "-m", "ckpt_engine.cli.main", "cp"]
    for source, target in ((old, tmp_path / "store"), (tmp_path / "store", tmp_path / "back")):
        assert Life([*ckpt_cp, source, target], tmp_path).ends() == 0, (tmp_path / "log").read_text()
    for moved in (tmp_path / "plain", tmp_path / "back"):
        with Checkpointer(moved, writer="thread") as ckpt:
            state = ckpt.load()
            assert state is not None and state["step"] == 7
            ckpt.save({**state, "step": 8}, step=8).wait(60)


@pytest.mark.parametrize("page", ["kubernetes.md", "launchers.md"])
def test_a_pod_has_more_time_than_the_run_takes(page: str) -> None:
    """`grace` is shorter than what Kubernetes leaves, in each manifest; nothing here starts a cluster."""
    text = (DOCS / page).read_text()
    seconds = [int(one) for one in re.findall(r"terminationGracePeriodSeconds: (\d+)", text)]
    graces = [parse_duration_seconds(one) for one in re.findall(r"preemption: \{grace: ([\w ]+)\}", text)]
    assert seconds and graces
    assert min(graces) < min(seconds)
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        assert yaml.safe_load(block)


@pytest.mark.parametrize("page", ["slurm.md", "managed-clouds.md"])
def test_torchrun_and_services_leave_the_grace(page: str, tmp_path: Path) -> None:
    """The options of the guide are valid, and what ends a run waits longer than its `grace`."""
    (tmp_path / "ckpt.yaml").write_text(code(page, "yaml", "preemption"))
    grace = load_config(tmp_path / "ckpt.yaml").preemption.grace
    text = (DOCS / page).read_text()
    left = [int(one) for one in re.findall(r"--shutdown-timeout[ =](\d+)|kills it (\d+) s later", text)[0] if one]
    assert grace < left[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_study_of_optuna_continues_its_trial(tmp_path: Path) -> None:
    """The script of the guide, killed in mid epoch, and started again."""
    optuna = pytest.importorskip("optuna")
    place = {"PYTHONPATH": f"{Path(optuna.__file__).parents[1]}{os.pathsep}{REPOSITORY}"}
    (tmp_path / "study.py").write_text(code("hyperparameter-search.md", "python"))
    command = [sys.executable, "study.py"]
    first = Life(command, tmp_path, within=tmp_path, **place)
    until(lambda: first.process.poll() is not None or any((tmp_path / "study1").glob("*/snapshots/*.json")), first.log)
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.ends() == -signal.SIGKILL
    second = Life(command, tmp_path, within=tmp_path, **place)
    until(lambda: second.process.poll() is not None or "resumed at step" in second.log.read_text(), second.log)
    assert "resumed at step" in second.log.read_text(), second.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_stored_without_the_frozen_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of the guide: three snapshots have little more than the bytes of one; the adapter is saved."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code("fine-tuning.md", "python", "get_peft_model"), "guide", "exec"), names)
    exec(compile(code("fine-tuning.md", "python", "save_pretrained"), "guide", "exec"), names)
    found = Checkpointer("run1").snapshots()
    stored = sum(path.stat().st_size for path in (tmp_path / "run1" / "data").iterdir())
    assert len(found) == 3
    assert stored < 1.5 * found[-1].nbytes
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
