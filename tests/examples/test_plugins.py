"""The packages under examples/plugins, installed as users install them: they keep the contracts, and runs use them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Checkpointer, plugins
from ckpt_engine.config import load_config
from ckpt_engine.errors import ConfigError, NewerFormatError
from ckpt_engine.store.codecs import codec as codecs
from ckpt_engine.store.codecs.codec import Codec, get_codec
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.testing import CodecContract, StorageContract
from tests.support import interpreters

PLUGINS = Path(__file__).parents[2] / "examples/plugins"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them installed."""
    folder = tmp_path_factory.mktemp("plugins")
    shutil.copytree(PLUGINS, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    sources = [path.parent for path in (folder / "source").glob("*/pyproject.toml")]
    assert sources
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "site", *sources], check=True, timeout=150)
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They are importable, here and in a writer process, as long as a test runs."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setattr(codecs, "_known", {})
    plugins._registered.cache_clear()
    yield
    plugins._registered.cache_clear()


@pytest.mark.usefixtures("installed")
class TestSqliteStorage(StorageContract):
    """A storage of one file."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"sqlite://{tmp_path}/run.db")


@pytest.mark.usefixtures("installed")
class TestXzCodec(CodecContract):
    """A codec."""

    @pytest.fixture
    def codec(self) -> Codec:
        return get_codec("xz")


@pytest.mark.long
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_run_keeps_its_snapshots_with_both(tmp_path: Path, writer: str) -> None:
    """The nearest tier is SQLite, and the next one a folder of .xz: each restores the same state."""
    near, far = f"sqlite://{tmp_path}/run.db", f"file://{tmp_path}/archive"
    options: dict[str, Any] = {"tiers": [{"url": near, "codec": "xz"}, {"url": far, "codec": "xz"}], "writer": writer}
    state = {"model": {"weight": torch.arange(100_000.0)}}
    with Checkpointer(options) as ckpt:
        for step in (1, 2):
            ckpt.save(state, step=step).wait(60)
    assert (tmp_path / "run.db").stat().st_size < 2 * state["model"]["weight"].nbytes
    for url in (near, far):
        with Checkpointer({"tiers": url, "writer": "thread"}) as ckpt:
            loaded = ckpt.load()
            assert loaded is not None and ckpt.snapshots()[-1].step == 2
            assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])


def _ignite(site: Path, *arguments: object) -> list[str]:
    script = Path(__file__).with_name("train_ignite.py")
    command = [sys.executable, script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = interpreters.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.stdout.splitlines()


@pytest.mark.long
def test_an_ignite_trainer_goes_on_exactly(site: Path, tmp_path: Path) -> None:
    """Killed in the second epoch; the restart has another seed. A third start finds nothing left to do."""
    whole = _ignite(site, tmp_path / "whole", 1)
    before = _ignite(site, tmp_path / "killed", 1, 21)
    after = _ignite(site, tmp_path / "killed", 2)
    assert (len(whole), len(before)) == (48, 21)
    assert 48 - 21 <= len(after) < 48
    assert before == whole[:21] and after == whole[-len(after) :]
    assert _ignite(site, tmp_path / "killed", 3) == []


def test_without_the_package_the_message_says_what_to_install(tmp_path: Path) -> None:
    """A codec that only a package knows is refused in a configuration, and when a snapshot has it."""
    with pytest.raises(ConfigError, match="must be 'raw' or"):
        load_config({"tiers": [{"url": str(tmp_path), "codec": "xz"}]})
    with pytest.raises(NewerFormatError, match="install the package that has this codec"):
        get_codec("xz")


@pytest.mark.usefixtures("installed")
def test_a_package_that_cannot_be_imported_is_named(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the package and what its import raises."""
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text("[ckpt_engine.storages]\nnear = nowhere:Storage\nsqlite = else:Storage\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins._registered.cache_clear()
    with pytest.raises(ConfigError, match=r"nowhere:Storage.*No module named 'nowhere'"):
        open_storage("near:///a")
    with pytest.raises(ConfigError, match="both register 'sqlite'"):
        open_storage("sqlite:///a")
