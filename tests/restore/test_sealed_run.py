"""Sealed runs from end to end: saved, killed, resumed, verified, copied, followed, and refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_engine import Checkpointer, follow
from ckpt_engine.cli.main import main
from ckpt_engine.config import load_config
from ckpt_engine.copy.job import RankConfig, WriterConfig
from ckpt_engine.errors import ConfigError, CorruptError, ForeignError, NoUsableSnapshotError, SealError
from ckpt_engine.store import names
from ckpt_engine.store.names import KEY_VARIABLE
from ckpt_engine.store.storage.seal_keys import KeyPair
from ckpt_engine.writer.memory_snapshots import Ids
from ckpt_engine.writer.persister import Persister
from tests.servers.fixtures import bucket, moto  # noqa: F401
from tests.servers.s3 import S3Server
from tests.store.test_object_storage_obstore import options as obstore_options
from tests.support import interpreters

SCRIPT = Path(__file__).parent / "sealed_script.py"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A key file, and no other one in the environment."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    KeyPair.make(str(tmp_path / "key"))
    return str(tmp_path / "key")


def trained(config: dict[str, Any], last: int, kill_after: int | None = None) -> list[str]:
    """What the script prints; it is killed once a step is durable."""
    command = [sys.executable, str(SCRIPT), json.dumps(config), str(last)]
    with interpreters.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == f"durable {kill_after}":
                process.kill()
        assert process.wait(60) == (0 if kill_after is None else -signal.SIGKILL)
    return lines


def ckpt(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)


def weights_at(step: int) -> torch.Tensor:
    """What the script saves."""
    return torch.arange(50_000.0) + (torch.arange(50_000) < step * 10) * step


@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_a_killed_run_resumes_and_shows_nothing_of_its_state(tmp_path: Path, key: str, codec: str) -> None:
    """Every object but the lease is sealed; another process without the key is refused by name."""
    root = tmp_path / "run"
    tier = {"url": str(root), "codec": codec, "keep": {"last": 3}}
    config = {"tiers": [tier], "seal": {"key": key}}
    assert trained(config, 9, kill_after=4)[-1] == "durable 4"
    assert trained(config, 7)[0] in ("from 4", "from 5"), "the writer process may have finished a step more"
    with Checkpointer(config) as opened:
        state = opened.load()
        assert state is not None
        assert torch.equal(state["model"]["secret_name"], weights_at(7))
        assert [info.step for info in opened.snapshots()] == [5, 6, 7]
    for path in root.rglob("*"):
        if path.is_file() and path.name != names.LEASE:
            text = path.read_bytes()
            assert b"secret_name" not in text
            assert path.parent.name == "keys" or text.startswith(names.SEALED), path
    keys = {path.name.removesuffix(".copy") for path in (root / "keys").iterdir()} - {"root"}
    assert len(keys) <= 3, "one for each writer process, and not for each snapshot"
    data = {path.read_bytes()[8:40].hex() for path in (root / "data").iterdir()}
    assert data and data <= keys
    with pytest.raises(NoUsableSnapshotError, match="this run is sealed"):
        Checkpointer(str(root)).load()


def test_who_only_writes_needs_no_key_that_opens(tmp_path: Path, key: str) -> None:
    """Snapshots and retention work; the recipient resumes; who cannot open them does not continue."""
    signer = str(tmp_path / "signer")
    writes = {"to": [KeyPair.make(signer).recipient, KeyPair.read(key).recipient][1:], "sign": signer}
    config = {"tiers": [{"url": str(tmp_path / "run")}], "seal": writes}
    assert trained(config, 4)[-1] == "durable 4"
    with pytest.raises(NoUsableSnapshotError, match="there is no key"), Checkpointer(config) as opened:
        opened.load()
    with pytest.raises(SealError, match="there is no key"), Checkpointer(config) as opened:
        opened.save({"step": 5}, step=5)
    reads = {"key": key, "signed_by": [KeyPair.read(signer).recipient]}
    with Checkpointer({**config, "seal": reads}) as opened:
        state = opened.load()
        assert state is not None and torch.equal(state["model"]["secret_name"], weights_at(4))


@pytest.mark.long
def test_a_run_in_two_tiers_on_a_disk_and_on_s3(
    tmp_path: Path,
    key: str,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The further tier has what the near one had; verify, export, cp and follow work with the key."""
    far = {"url": f"s3://{bucket}/run", "storage_options": moto.options(part_bytes=5 << 20)}
    config = {"tiers": [{"url": str(tmp_path / "run")}, far], "seal": {"key": key}}
    assert trained(config, 3)[-1] == "durable 3"
    only_far = {"tiers": [far], "seal": {"key": key}}
    with Checkpointer(only_far) as opened:
        state = opened.load()
        assert state is not None and torch.equal(state["model"]["secret_name"], weights_at(3))
    step, tensors = next(follow(only_far, component="model"))
    assert step == 3 and torch.equal(tensors["secret_name"], weights_at(3))
    yaml = tmp_path / "far.yaml"
    yaml.write_text(json.dumps(only_far))
    assert ckpt("verify", yaml) == 0
    assert ckpt("cp", yaml, tmp_path / "opened") == 0
    assert ckpt("verify", tmp_path / "opened") == 0
    assert ckpt("export", yaml, tmp_path / "out.safetensors", "--to", "safetensors") == 0
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert ckpt("cp", "--seal", tmp_path / "opened", tmp_path / "sealed") == 0
    assert ckpt("verify", tmp_path / "sealed") == 0
    damaged = next((tmp_path / "sealed/data").iterdir())
    text = bytearray(damaged.read_bytes())
    text[len(text) // 2] ^= 1
    damaged.write_bytes(text)
    assert ckpt("verify", tmp_path / "sealed") == 1


@pytest.mark.long
@pytest.mark.parametrize("transport", ["fsspec", "obstore"])
def test_objects_of_more_than_a_part_arrive_at_s3_and_are_read_in_ranges(
    tmp_path: Path,
    key: str,
    transport: str,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
) -> None:
    """Parts are sealed when they are sent, and again when they are checked; here only the further tier is sealed."""
    far = {"url": f"s3://{bucket}/run", "storage_options": {"transport": transport, "part_bytes": 5 << 20}}
    own = moto.options(verify="always") if transport == "fsspec" else obstore_options(moto)
    far["storage_options"] |= own
    tiers = [str(tmp_path / "plain"), {**far, "seal": {"key": key}}]
    big = torch.arange(4_000_000.0)
    with Checkpointer({"tiers": tiers}) as opened:
        opened.save({"big": big}, step=1).wait(60)
    with Checkpointer({"tiers": tiers[1:]}) as opened:
        state = opened.load()
        assert state is not None and torch.equal(state["big"], big)


def test_keys_are_made_shown_and_rotated(tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Data and manifests stay byte for byte; the old key opens nothing any more."""
    root, new = tmp_path / "run", str(tmp_path / "new")
    assert trained({"tiers": [{"url": str(root)}], "seal": {"key": key}}, 3)[-1] == "durable 3"
    assert ckpt("keys", "new", new) == 0
    recipient = capsys.readouterr().out.strip()
    assert ckpt("keys", "show", new) == 0
    assert capsys.readouterr().out == f"{recipient}\n"
    assert ckpt("keys", "rotate", root) == 2
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.parent.name != "keys"}
    yaml = tmp_path / "rotated.yaml"
    signed_by = [KeyPair.read(key).recipient]
    seal = {"key": key, "sign": new, "to": [recipient], "signed_by": signed_by}
    yaml.write_text(json.dumps({"tiers": str(root), "seal": seal}))
    assert ckpt("keys", "rotate", yaml) == 0
    assert ckpt("keys", "rotate", yaml) == 0, "what is rotated already stays"
    assert {path: path.read_bytes() for path in before if path.name != names.LEASE} == {
        path: text for path, text in before.items() if path.name != names.LEASE
    }
    with Checkpointer({"tiers": str(root), "seal": {"key": new}}) as opened:
        state = opened.load()
        assert state is not None and int(state["step"]) == 3
    with (
        pytest.raises((SealError, NoUsableSnapshotError)),
        Checkpointer({"tiers": str(root), "seal": {"key": key}}) as opened,
    ):
        opened.load()


def test_a_plain_run_is_refused_where_seal_is_configured(tmp_path: Path, key: str) -> None:
    """Neither loaded nor continued."""
    assert trained({"tiers": [{"url": str(tmp_path / "run")}]}, 2)[-1] == "durable 2"
    sealed = {"tiers": str(tmp_path / "run"), "seal": {"key": key}}
    with pytest.raises((SealError, NoUsableSnapshotError, ForeignError), match="not sealed"):
        Checkpointer(sealed).load()


def test_a_sealed_folder_of_each_node_is_refused(tmp_path: Path, key: str) -> None:
    """The nodes would read each other's files, which are sealed."""
    ranks = RankConfig(0, 2, "session", None, 1.0, place=(0,), places=((0,), (1,)))
    config = WriterConfig(str(tmp_path / "run"), storage_options={"seal": {"key": key}}, ranks=ranks)
    with pytest.raises(ConfigError, match="a folder of each node"):
        Persister(config, lambda _: None, Ids()).open()


@pytest.mark.long
def test_equal_tensors_are_stored_once_as_in_a_plain_run(tmp_path: Path, key: str) -> None:
    """A second process refers to what the first one has sealed, and retention keeps that."""
    stored = []
    for name, seal in (("plain", None), ("sealed", {"key": key})):
        config = {"tiers": [{"url": str(tmp_path / name), "keep": {"last": 2}}], "seal": seal}
        frozen = torch.arange(2_000_000.0)
        for first in (1, 3):
            with Checkpointer(config) as opened:
                opened.load()
                for step in (first, first + 1):
                    opened.save({"frozen": frozen, "moving": torch.full((50_000,), float(step))}, step=step).wait(60)
        with Checkpointer(config) as opened:
            state = opened.load()
            assert state is not None and torch.equal(state["frozen"], frozen)
            assert [info.step for info in opened.snapshots()] == [3, 4]
        stored.append(sum(path.stat().st_size >= frozen.nbytes for path in (tmp_path / name / "data").iterdir()))
    assert stored == [1, 1]


@pytest.mark.cells(2)
@pytest.mark.parametrize("at", [0, 20, 41, 50, 100, -100, -1])
def test_a_record_that_was_changed_after_it_was_sealed_says_what_the_snapshots_say(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    """Wherever a bit has flipped: `ckpt verify` names it, all else works, the next start writes it again, for the
    same run. What opens nothing of the run is refused as ever.
    """
    root, yaml, stranger = tmp_path / "run", tmp_path / "run.yaml", str(tmp_path / "stranger")
    config = {"tiers": str(root), "seal": {"key": key}, "keep": {"last": 9}}
    yaml.write_text(json.dumps(config))
    assert trained(config, 2)[-1] == "durable 2"
    with Checkpointer(config) as opened:
        assert opened.load() is not None
        was = opened.loaded
    text = bytearray((root / names.RECORD).read_bytes())
    text[at] ^= 1
    (root / names.RECORD).write_bytes(text)
    for command in (["ls"], ["show"], ["prune"], ["cp", tmp_path / "copy"]):
        assert ckpt(command[0], yaml, *command[1:]) == 0, command
    capsys.readouterr()
    for seen in ("verify", "repair"):
        assert ckpt(seen, yaml) == 1
        out = capsys.readouterr().out
        assert f"{names.RECORD}  DAMAGED" in out and "the next start writes it again" in out
    KeyPair.make(stranger)
    other = {**config, "seal": {"key": stranger, "signed_by": [KeyPair.read(key).recipient]}}
    for options in (other, {**config, "seal": None}):
        with pytest.raises((SealError, CorruptError)), Checkpointer(options) as opened:
            opened.save({"step": 3}, step=3)
    assert trained(config, 3) == ["from 2", "durable 3"]
    assert ckpt("verify", yaml) == 0
    with Checkpointer(config) as opened:
        assert opened.load() is not None and opened.loaded is not None
        assert was is not None and opened.loaded.manifest.run == was.manifest.run


@pytest.mark.long
def test_what_commands_do_with_a_plain_run_they_do_with_a_sealed_one(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed, shown, compared, mended, scrubbed, pinned, forked, protected; without the key refused by name."""
    places = [tmp_path / "near", tmp_path / "far"]
    config = {"tiers": [str(one) for one in places], "seal": {"key": key}, "protect": {"days": 1}, "keep": {"last": 1}}
    assert trained(config, 3)[-1] == "durable 3"
    yaml = tmp_path / "run.yaml"
    yaml.write_text(json.dumps(config))
    for command in (["ls"], ["status"], ["goodput"]):
        assert ckpt(command[0], yaml, *command[1:]) == 0, command
    assert ckpt("fork", yaml, tmp_path / "fork of a file of options") == 0
    assert (tmp_path / "fork of a file of options/ckpt.json").read_bytes().startswith(names.SEALED)
    assert ckpt("show", f"{yaml}#latest") == 0
    assert "secret_name" in capsys.readouterr().out
    assert ckpt("diff", f"{yaml}#2", f"{yaml}#3") in (0, 1)
    for seen in (["repair"], ["scrub"]):
        damaged = next(iter((places[0] / "data").glob("00000003-*")))  # the far tier skips older ones when it lags
        text = bytearray(damaged.read_bytes())
        text[len(text) // 2] ^= 1
        damaged.write_bytes(text)
        assert ckpt("verify", yaml) == 1
        assert ckpt(*seen, yaml) == 0
        assert ckpt("verify", yaml) == 0
    assert ckpt("pin", f"{yaml}#3") == 0
    capsys.readouterr()
    assert ckpt("prune", yaml) == 0
    assert "protected until" in capsys.readouterr().out
    page = str(tmp_path / "page.html")
    for command in (
        ["ls"],
        ["status"],
        ["status", "--json"],
        ["report", "--html", page],
        ["goodput"],
        ["plan"],
        ["show"],
        ["verify"],
        ["repair"],
        ["scrub"],
        ["prune"],
        ["compact"],
    ):
        assert ckpt(command[0], places[0], *command[1:]) != 0, command
        seen = "".join(capsys.readouterr())
        assert "CKPT405" in seen and KEY_VARIABLE in seen, (command, seen)
    assert not Path(page).exists()
    assert ckpt("ls", tmp_path) == 0
    assert "CKPT405" in capsys.readouterr().out
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert ckpt("ls", tmp_path) == 0
    assert "CKPT405" not in capsys.readouterr().out
    assert ckpt("fork", f"{places[0]}#2", tmp_path / "fork") == 0
    assert ckpt("verify", tmp_path / "fork") == 0
    assert (tmp_path / "fork/ckpt.json").read_bytes().startswith(names.SEALED)


@pytest.mark.long
def test_a_sealed_run_resumes_from_the_memory_of_its_writer(tmp_path: Path, key: str) -> None:
    """The memory tier is not sealed; what its writer makes durable after the trainer has died is."""
    tiers = [{"url": "memory", "every_n_steps": 1}, {"url": str(tmp_path / "run")}]
    config = {"tiers": tiers, "seal": {"key": key}}
    assert trained(config, 4, kill_after=3)[-1] == "durable 3"
    assert trained(config, 5)[0] in ("from 3", "from 4")
    only = {"tiers": [str(tmp_path / "run")], "seal": {"key": key}}
    with Checkpointer(only) as opened:
        state = opened.load()
        assert state is not None and torch.equal(state["model"]["secret_name"], weights_at(5))


def test_no_key_is_in_logs_in_text_forms_or_in_process_lists(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is named; what it has is nowhere."""
    secret = Path(key).read_text().splitlines()[-1]
    config = {"tiers": [str(tmp_path / "run")], "seal": {"key": key}}
    with caplog.at_level("DEBUG"), Checkpointer(config) as opened:
        opened.save({"step": 1}, step=1).wait(60)
        shown = [repr(KeyPair.read(key)), str(load_config(config)), repr(load_config(config))]
        for process in psutil.Process().children(recursive=True):
            shown += [" ".join(process.cmdline()), json.dumps(process.environ())]
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert secret not in "\n".join([caplog.text, *shown])
    assert not any(secret.encode() in text for text in files)
