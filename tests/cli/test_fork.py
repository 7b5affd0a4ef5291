"""`ckpt fork`: a run that begins with a snapshot of another one, and needs nothing of it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from s3fs import S3FileSystem

from ckpt_engine import Checkpointer
from ckpt_engine.errors import NoUsableSnapshotError
from ckpt_engine.store import names
from ckpt_engine.store.lease import acquire
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import local, open_storage
from ckpt_engine.store.storage.disk import Disk
from ckpt_engine.store.storage.local import LocalStorage
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.s3 import S3Server
from tests.servers.wire import Wire
from tests.support import interpreters

Ckpt = Callable[..., Any]


@pytest.fixture
def ids(run_folder: Any, arrays: Any) -> list[str]:
    return [run_folder.add(step, arrays) for step in (10, 20, 30)]


def there(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {names.LEASE}


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in there(root)}


@pytest.mark.parametrize(("wanted", "number"), [("", 2), ("#latest", 2), ("#20", 1), ("#step=10", 0), ("#00000001", 0)])
def test_a_fork_has_the_one_snapshot_and_shares_its_files(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, wanted: str, number: int
) -> None:
    """No bytes are sent. It is another run, which says where it was forked, and stays when the first one is removed."""
    new, before = tmp_path / "new", contents(run_folder.path)
    data = run_folder.data_file(ids[number])
    done = ckpt("fork", f"{run_folder.path}{wanted}", new, "--json")
    assert done.code == 0, done.err
    assert (done.json["snapshot"], done.json["copied"]) == (ids[number], [ids[number]])
    assert (done.json["linked_bytes"], done.json["sent_bytes"]) == (data.stat().st_size, 0)
    assert (new / names.data_name(ids[number])).samefile(data)
    assert there(new) == {names.RECORD, names.manifest_name(ids[number]), names.data_name(ids[number])}
    assert contents(run_folder.path) == before
    shutil.rmtree(run_folder.path)
    assert ckpt("verify", new).code == 0
    listed, shown = ckpt("ls", new, "--json").json, ckpt("show", new, "--json").json
    step = 10 * (number + 1)
    point = {
        "url": f"file://{run_folder.path}",
        "run": run_folder.repository.run_id,
        "snapshot": ids[number],
        "step": step,
    }
    assert listed["fork"] == shown["fork"] == point
    assert listed["run"] == shown["run"] != point["run"]
    assert f"forked from {run_folder.path}#{step} ({ids[number]})" in ckpt("ls", new, "--lines").out
    assert f"{run_folder.path}#{step}" in ckpt("show", new).out


def test_lines_are_shown_where_they_are_asked_for(ckpt: Ckpt, run_folder: Any, ids: list[str]) -> None:
    """Of a run with one line of history a listing says nothing of lines."""
    assert "branch" not in ckpt("ls", run_folder.path).out
    out = ckpt("ls", run_folder.path, "--lines").out
    assert "branch unnamed: 3 snapshots up to step 30" in out and "forked" not in out


def test_a_dry_run_says_what_would_be_done(ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path) -> None:
    """The same numbers, and nothing is made."""
    would = ckpt("fork", f"{run_folder.path}#20", tmp_path / "new", "--dry-run")
    assert would.code == 0 and not (tmp_path / "new").exists()
    did = ckpt("fork", f"{run_folder.path}#20", tmp_path / "new")
    assert would.out.startswith(f"would fork {ids[1]} (step 20) to ")
    assert did.out.startswith(f"forked {ids[1]} (step 20) to ")
    assert would.out.partition("fork ")[2] == did.out.partition("forked ")[2]


@pytest.mark.parametrize("kind", ["run", "itself", "files", "file", "held", "begun"])
def test_a_place_that_is_not_empty_is_refused(
    ckpt: Ckpt, run_folder: Any, ids: list[str], arrays: Any, tmp_path: Path, kind: str
) -> None:
    """Another run, the run itself, other files, a file, a place that somebody writes, a run without a snapshot yet."""
    new = run_folder.path if kind == "itself" else tmp_path / "new"
    if kind == "run":
        type(run_folder)(new).add(1, arrays)
    elif kind == "begun":
        type(run_folder)(new)
    elif kind == "files":
        new.mkdir()
        (new / "thesis.tex").touch()
    elif kind == "file":
        new.touch()
    with acquire(LocalStorage(new if kind == "held" else tmp_path / "other")):
        before = contents(new) if new.is_dir() else {}
        refused = ckpt("fork", f"{run_folder.path}#20", new)
    assert refused.code == 2 and refused.out == ""
    assert {"files": "[CKPT402]", "file": "[CKPT305]", "held": "[CKPT500]"}.get(kind, "[CKPT304]") in refused.err
    assert (contents(new) if new.is_dir() else {}) == before


@pytest.mark.parametrize(("root", "code"), [("#40", "CKPT303"), ("#x", "CKPT303"), ("/nothing#10", "CKPT303")])
def test_what_is_not_there_is_not_forked(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, root: str, code: str
) -> None:
    """No such step, no such id, no such run."""
    refused = ckpt("fork", f"{run_folder.path}{root}", tmp_path / "new")
    assert refused.code == 2 and f"[{code}]" in refused.err
    assert not (tmp_path / "new").exists()


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    base = torch.arange(2_000_000, dtype=torch.float32)
    return {
        "base": base,
        "model": {"w": torch.linspace(0, 1, 50_000) + 1e-4 * torch.randn(50_000, generator=generator)},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return torch.equal(one["base"], other["base"]) and torch.equal(one["model"]["w"], other["model"]["w"])


@pytest.mark.long
@pytest.mark.parametrize("codec", ["raw", "delta"])
def test_forks_of_a_run_outlive_it_and_each_other(ckpt: Ckpt, tmp_path: Path, codec: str) -> None:
    """With all that their snapshot refers to; each trains on, and its retention removes nothing of the others."""
    roots = [tmp_path / name for name in ("parent", "a", "b", "c")]
    tier = {"url": str(roots[0]), "codec": codec, "keep": {"last": 1}}
    with Checkpointer(tiers=[tier]) as run:
        for step in (1, 2, 3):
            run.save(state(step), step=step).wait(60)
    for root, new in itertools.pairwise(roots):
        assert ckpt("fork", f"{root}#3", new).code == 0
    for number, new in enumerate(roots[1:]):
        with Checkpointer(tiers=[{**tier, "url": str(new)}]) as fork:
            assert same(fork.load(), state(3))
            fork.save(state(10 + number), step=10).wait(60)
    files = {path.stat().st_ino: path.stat().st_size for root in roots for path in (root / "data").iterdir()}
    assert sum(files.values()) < 1.05 * (4 * 200_000 + 8_000_000)  # the base is there once
    while roots:
        for number, root in enumerate(roots):
            assert ckpt("verify", root).code == 0
            expected = state(3) if root.name == "parent" else state(10 + "abc".index(root.name))
            assert same(Checkpointer(root).load(), expected), number
        shutil.rmtree(roots.pop(0))


class KilledError(BaseException):
    """As `kill -9`: from here on the process does nothing."""


def killed_at(monkeypatch: pytest.MonkeyPatch, call: int) -> list[str]:
    """The process dies at that system call that changes a disk; the names of those before."""
    done: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Disk, *arguments: Any) -> Any:
            if len(done) == call:
                raise KilledError
            done.append(name)
            return real(self, *arguments)

        return change

    for name in ("create", "open", "write", "sync", "link", "rename", "remove", "make_folder", "sync_folder"):
        monkeypatch.setattr(Disk, name, dying(name, getattr(Disk, name)))
    return done


def test_a_fork_that_is_killed_is_whole_or_has_nothing(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each system call; the same command makes it then, unless it is whole. The first run is never touched."""
    before, seen = contents(run_folder.path), set()
    for call in itertools.count():
        new = tmp_path / f"new{call}"
        with monkeypatch.context() as patch:
            done = killed_at(patch, call)
            try:
                ckpt("fork", f"{run_folder.path}#20", new)
            except KilledError:
                pass
            else:
                break
        found = [parsed.id for parsed in Repository(LocalStorage(new)).ids()]
        seen.add(len(found))
        _assert_nothing_is_resumed_silently(new, Repository(LocalStorage(new)))
        again = ckpt("fork", f"{run_folder.path}#20", new)
        assert (found, again.code) in (([], 0), ([ids[1]], 2)), (done, again.err)
        assert ckpt("verify", new).code == 0
        assert contents(run_folder.path) == before
    assert seen == {0, 1} and call > 10


def _assert_nothing_is_resumed_silently(new: Path, place: Repository) -> None:
    """Of what a fork that was killed has left: it has the snapshot, or it is named, or there is no run."""
    run = Checkpointer(new, writer="thread")
    if place.ids() or place.record() is None:
        assert (run.load() is None) == (not place.ids())
    else:
        with pytest.raises(NoUsableSnapshotError, match="is not finished") as caught:
            run.track(model=torch.nn.Linear(2, 2))
        run.close()
        assert f"#20 {place.storage.url}" in str(caught.value.hint)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_there_are_no_links_the_files_are_sent(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Verified on the way; the number of bytes says so."""
    real = Disk.link

    def link(self: Disk, source: str, target: str) -> None:
        if Path(source).is_relative_to(run_folder.path):
            raise OSError(error, os.strerror(error))
        real(self, source, target)

    monkeypatch.setattr(Disk, "link", link)
    done = ckpt("fork", f"{run_folder.path}#20", tmp_path / "new", "--json")
    data = run_folder.data_file(ids[1])
    assert (done.json["linked_bytes"], done.json["sent_bytes"]) == (0, data.stat().st_size)
    assert not (tmp_path / "new" / names.data_name(ids[1])).samefile(data)
    assert ckpt("verify", tmp_path / "new").code == 0


def test_damage_is_not_forked(
    ckpt: Ckpt, run_folder: Any, ids: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another disk the bytes are verified on the way: the new place has no snapshot, and is taken the next time."""
    monkeypatch.setattr(local, "device_of", lambda path: str(path).startswith(str(tmp_path / "new")))
    run_folder.flip(ids[1], "optimizer/exp_avg")
    done = ckpt("fork", f"{run_folder.path}#20", tmp_path / "new")
    assert done.code == 1 and f"{ids[1]}  not copied: [CKPT401]" in done.out
    assert Repository(LocalStorage(tmp_path / "new")).ids() == ()
    assert ckpt("fork", f"{run_folder.path}#30", tmp_path / "new").code == 0
    assert [one.id for one in Repository(LocalStorage(tmp_path / "new")).ids()] == [ids[2]]


@pytest.mark.long
@pytest.mark.parametrize("refuses", [False, True])
def test_one_store_copies_its_objects(
    ckpt: Ckpt,
    run_folder: Any,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
) -> None:
    """The bytes do not come here, unless the store refuses; from a store to a disk they do."""
    rng = np.random.default_rng(0)
    snapshot = run_folder.add(7, {f"state_dict/w{i}": rng.standard_normal(10_000) for i in range(30)})
    size = run_folder.data_file(snapshot).stat().st_size
    options = json.dumps(moto.options(wire.url, retry_seconds=0.2, timeout_seconds=60.0))
    for name in ("old", "new"):
        text = f"tiers: [{{url: 's3://{bucket}/{name}', storage_options: {options}}}]"
        (tmp_path / f"{name}.yaml").write_text(text)
    assert ckpt("cp", run_folder.path, tmp_path / "old.yaml").code == 0
    wire.log.clear()
    wire.answers.clear()
    if refuses:

        async def refuse(*_: Any) -> None:
            raise PermissionError(errno.EACCES, "Access Denied")

        monkeypatch.setattr(S3FileSystem, "_cp_file", refuse)
    done = ckpt("fork", f"{tmp_path / 'old.yaml'}#7", tmp_path / "new.yaml", "--json")
    assert done.code == 0, done.err
    assert (done.json["linked_bytes"], done.json["sent_bytes"]) == ((0, size) if refuses else (size, 0))
    read = sum(
        len(answer[2]) if isinstance(answer[2], bytes) else answer[2]
        for answer in wire.answers
        if "/data/" in answer[1]
    )
    assert refuses or read < size
    assert ckpt("verify", tmp_path / "new.yaml").code == 0
    sent = ckpt("fork", tmp_path / "new.yaml", tmp_path / "disk", "--json")
    assert (sent.json["linked_bytes"], sent.json["sent_bytes"]) == (0, size)
    assert ckpt("verify", tmp_path / "disk").code == 0
    assert (tmp_path / "disk" / names.data_name(snapshot)).read_bytes() == run_folder.data_file(snapshot).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "method", "path"),
    [
        ("lost", "PUT", r"ckpt\.json|/data/|/snapshots/"),
        *[pytest.param(action, ".*", "", marks=pytest.mark.slow) for action in ("refuse", "lost")],
    ],
)
def test_a_fork_in_a_store_that_is_killed_is_finished_by_the_same_command(
    ckpt: Ckpt,
    run_folder: Any,
    moto: S3Server,  # noqa: F811
    bucket: str,  # noqa: F811
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    action: str,
    method: str,
    path: str,
) -> None:
    """At each of its requests, before the store acts or after it; a start meanwhile takes nothing for a run."""
    rng = np.random.default_rng(0)
    snapshot = run_folder.add(20, {f"state_dict/w{i}": rng.standard_normal(10_000) for i in range(3)})
    options = moto.options(wire.url, retry_seconds=0.2, timeout_seconds=60.0)
    for name in ("old", *map(str, range(60))):
        text = f"tiers: [{{url: 's3://{bucket}/{name}', storage_options: {json.dumps(options)}}}]"
        (tmp_path / f"{name}.yaml").write_text(text)
    assert ckpt("cp", run_folder.path, tmp_path / "old.yaml").code == 0
    seen = set()
    for request in itertools.count():
        new = tmp_path / f"{request}.yaml"
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.cli.mortal",
            "0",
            "fork",
            f"{tmp_path}/old.yaml#20",
            new,
        ]
        with interpreters.Popen(command, cwd=interpreters.REPOSITORY, stdout=subprocess.DEVNULL) as process:
            wire.rule(action, method, path, after=request, times=1, then=process.kill)
            status = process.wait()
        wire.clear()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        place = Repository(open_storage(f"s3://{bucket}/{request}", options))
        found = [parsed.id for parsed in place.ids()]
        seen.add((len(found), place.record() is None))
        _assert_nothing_is_resumed_silently(new, place)
        again = ckpt("fork", f"{tmp_path}/old.yaml#20", new)
        assert (found, again.code) in (([], 0), ([snapshot], 2)), again.err
        assert ckpt("verify", new).code == 0
    assert (0, False) in seen
