"""A manifest names a codec: no file of a store or of the working folder runs for it, and what is none is refused."""

from __future__ import annotations

import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckpt_engine import Checkpointer, plugins
from ckpt_engine.cli.main import commands
from ckpt_engine.errors import NewerFormatError
from ckpt_engine.store.codecs import codec as codecs
from ckpt_engine.store.codecs.codec import get_codec
from tests.support.forged import forge

MODULES = ("evil", "evil.inner", "evil.inner.deep")
VALUES = ("{module}:C", "{module}:C.decode", "{module}", "{module}:missing")
FOREIGN = (
    "os:system",
    "builtins:dict",
    "ctypes:cdll",
    "antigravity:fly",
    "tests.store.codecs.laws:Laws",
    "nowhere:C",
    "...:C",
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; nothing that a test imports from anywhere stays."""
    before = set(sys.modules)
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(codecs, "_known", {})
    plugins._registered.cache_clear()
    yield tmp_path / "site"
    plugins._registered.cache_clear()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "evil":
            del sys.modules[name]


def plant(
    folder: Path, value: str, code: str = "", *, module: str = "evil", recorded: bool = False, kind: str = "dist-info"
) -> Path:
    """Put a distribution that registers the codec "evil" into a folder; the file that its code leaves when it runs."""
    mark = folder.parent / "code-ran"
    files = []
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        last = length == len(parts)
        path = folder.joinpath(*parts[:length])
        file = path.with_suffix(".py") if last else path / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(mark)!r}, 'w').close()\n" + textwrap.dedent(code) if last else "")
        files.append(str(file.relative_to(folder)))
    about = folder / f"evil-1.0.{kind}"
    about.mkdir()
    (about / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
        "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
    )
    (about / "entry_points.txt").write_text(f"[ckpt_engine.codecs]\nevil = {value}\n")
    if kind != "dist-info":
        (about / "SOURCES.txt").write_text("\n".join(files))
    if recorded:
        (about / "RECORD").write_text("".join(f"{one},,\n" for one in files))
    return mark


CODEC = """
    class C:
        name = "evil"
        needs_base = False
        def encode(self, data, chunk, base):
            return bytes(data)
        def decode(self, stored, out, base):
            out.cast("B")[:] = stored
"""


def require_refused(seed: int, folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seeded way to plant a codec: its code does not run, and its name is refused by a code."""
    chance = random.Random(seed)
    module = chance.choice(MODULES)
    value = chance.choice((*VALUES, *FOREIGN)).format(module=module)
    place = chance.choice(("the working folder", "the working folder as ''", "the program's folder", "the path"))
    where = site if place == "the path" else folder
    recorded = where is folder and chance.random() < 0.5
    mark = plant(where, value, CODEC, module=module, recorded=recorded, kind=chance.choice(("dist-info", "egg-info")))
    if where is folder:
        monkeypatch.setattr(sys, "path", ["" if place.endswith("''") else str(folder), *sys.path])
        if place == "the program's folder":
            monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
        else:
            monkeypatch.chdir(folder)
    plugins._registered.cache_clear()
    with pytest.raises(NewerFormatError, match="evil"):
        get_codec("evil")
    assert not mark.exists(), (seed, place, value)


@pytest.mark.cells(3)
@pytest.mark.parametrize("seed", range(12))
def test_planted_code_does_not_run(seed: int, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder, the program's, or one on the path where no installer has recorded it."""
    (tmp_path / "store").mkdir()
    require_refused(seed, tmp_path / "store", site, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 320))
def test_hundreds_of_planted_codecs(seed: int, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for many more draws."""
    (tmp_path / "store").mkdir()
    require_refused(seed, tmp_path / "store", site, monkeypatch)


def test_a_planted_module_does_not_take_the_place_of_an_installed_one(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry point is an installed package's; the module of that name in the working folder is another."""
    plant(site, "evil:C", CODEC, recorded=True)
    mark = tmp_path / "planted-ran"
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path / "store")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(NewerFormatError, match="would be imported from"):
        get_codec("evil")
    assert not mark.exists()


def test_an_installed_codec_and_an_editable_one_are_used(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an installer has recorded counts wherever it lies, also the source of an editable package."""
    plant(site, "evil:C", CODEC, recorded=True)
    assert get_codec("evil").name == "evil"
    source = tmp_path / "source"
    source.mkdir()
    (site / "evil.py").rename(source / "evil.py")
    (site / "evil-1.0.dist-info" / "RECORD").write_text("evil-1.0.dist-info/METADATA,,\n")
    (site / "evil-1.0.dist-info" / "direct_url.json").write_text(
        f'{{"url": "{source.as_uri()}", "dir_info": {{"editable": true}}}}'
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(source)])
    monkeypatch.setattr(codecs, "_known", {})
    del sys.modules["evil"]
    plugins._registered.cache_clear()
    assert get_codec("evil").name == "evil"


WRONG = {
    "no codec": "class C: pass",
    "not called": "C = 5",
    "raises": CODEC + "        def __init__(self): raise RuntimeError('no')\n",
    "another name": CODEC.replace('name = "evil"', 'name = "good"'),
    "cannot be imported": "import nowhere",
    "decodes with its own error": CODEC.replace('out.cast("B")[:] = stored', "raise KeyError('x')"),
    "decodes nothing": CODEC.replace('out.cast("B")[:] = stored', "pass"),
}


@pytest.mark.cells(2)
@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_codec_costs_one_snapshot(code: str, tmp_path: Path, site: Path) -> None:
    """The next older snapshot is loaded, and the reason has a code; `verify` does not say that both are whole."""
    root = tmp_path / "run"
    with Checkpointer(root, writer="thread", keep={"last": 2}) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.full((500,), float(step))}, step=step).wait(30)
    plant(site, "evil:C", code, recorded=True)
    plugins._registered.cache_clear()
    forge(root, lambda body: body["entries"]["w"]["pieces"][0].update(codec="evil", raw_digest="xxh3-128:00"))
    ckpt = Checkpointer(root)
    state = ckpt.load()
    assert state is not None and state["w"][0] == 1
    assert ckpt.loaded is not None and ckpt.loaded.rejected[0].code in ("CKPT401", "CKPT403")
    if "def decode" not in code or ckpt.loaded.rejected[0].code == "CKPT403":
        assert CliRunner().invoke(commands, ["verify", str(root)]).exit_code == 1
