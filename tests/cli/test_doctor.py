"""`ckpt doctor` tells stores apart, and leaves nothing behind."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage
from ckpt_engine.tools import try_storage
from tests.servers.fixtures import bucket, moto  # noqa: F401 - fixtures
from tests.servers.s3 import S3Server

Ckpt = Callable[..., Any]


def _marks(result: Any) -> dict[str, str]:
    return {one["check"]: one["mark"] for one in result.json[0]["findings"]}


def test_a_local_folder_is_healthy_and_left_as_it_was(ckpt: Ckpt, run_folder: Any, arrays: Any) -> None:
    """Next to a run, with the run untouched."""
    run_folder.add(1, arrays)
    before = sorted(path for path in run_folder.path.rglob("*"))
    result = ckpt("doctor", run_folder.path, "--size", "3 MB")
    assert result.code == 0
    assert "a file lock" in result.out
    assert "of 8 creators of one object one succeeds" in result.out
    assert "3 MB written at" in result.out
    assert "BAD" not in result.out
    assert result.out.splitlines()[-1] == "  a run is safe here"
    assert sorted(path for path in run_folder.path.rglob("*")) == before


def test_a_folder_that_does_not_exist_is_not_made(ckpt: Ckpt, tmp_path: Path) -> None:
    """It is tried where it would be made."""
    result = ckpt("doctor", tmp_path / "not/yet", "--size", "1 kB", "--json")
    assert (result.code, set(_marks(result).values())) == (0, {"ok"})
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_healthy(ckpt: Ckpt, moto: S3Server, bucket: str, tmp_path: Path) -> None:
    """Conditional writes work on moto; its channel is plain HTTP."""
    yaml = tmp_path / "ckpt.yaml"
    options = json.dumps(moto.options())
    yaml.write_text(f"tiers: [{{url: 's3://{bucket}/run', storage_options: {options}}}]")
    result = ckpt("doctor", yaml, "--size", "1 MB", "--json")
    assert result.code == 0, result.err
    marks = _marks(result)
    assert marks["create only"] == marks["create at once"] == marks["replace if unchanged"] == marks["clock"] == "ok"
    assert marks["channel"] == "note"
    assert "Contents" not in moto.client().list_objects_v2(Bucket=bucket)
    assert moto.secret not in result.out


def test_a_store_that_replaces_is_bad_news(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 where a run is not safe."""
    put = LocalStorage.put
    monkeypatch.setattr(
        LocalStorage, "put", lambda self, name, blocks, exclusive=True: put(self, name, blocks, exclusive=False)
    )
    result = ckpt("doctor", tmp_path, "--size", "1 kB")
    assert result.code == 1
    assert "create only           BAD   an object was replaced" in result.out
    assert "create at once        note  of 8 creators of one object 8 succeed" in result.out
    assert result.out.splitlines()[-1] == "  no run should be put here"
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_is_bad_news(
    ckpt: Ckpt, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is said, and nothing more is tried."""
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    result = ckpt("doctor", "s3://no-such-bucket/run", "--json")
    assert result.code == 1
    assert [one["check"] for one in result.json[0]["findings"]] == ["write and read"]
    assert "create the bucket first" in result.out


def test_bytes_that_come_back_wrong_are_bad_news(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong bytes of small and of big objects are found."""
    monkeypatch.setattr(LocalStorage, "get", lambda self, name, start=0, nbytes=None: b"?")
    result = ckpt("doctor", tmp_path, "--json")
    assert (result.code, _marks(result)) == (1, {"write and read": "BAD"})
    monkeypatch.undo()
    monkeypatch.setattr(LocalStorage, "get_into", lambda self, name, start, out: None)
    result = ckpt("doctor", tmp_path, "--size", "1 kB", "--json")
    assert (result.code, _marks(result)["throughput"]) == (1, "BAD")


@pytest.mark.parametrize(("skew", "mark"), [(0.0, "ok"), (4.0, "ok"), (-300.0, "note"), (300.0, "note")])
def test_clocks_that_differ_are_reported(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float, mark: str
) -> None:
    """Ahead or behind; nothing depends on it but what is shown."""
    now = try_storage.time.time
    monkeypatch.setattr(try_storage.time, "time", lambda: now() - skew)
    finding = try_storage._clock(LocalStorage(tmp_path))
    assert finding[0] == mark
    assert (("ahead" if skew > 0 else "behind") in finding[1]) == (mark == "note")


def test_a_size_that_is_none_is_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    """The message names the option."""
    result = ckpt("doctor", tmp_path, "--size", "big")
    assert result.code == 2
    assert "--size" in result.err


def test_a_store_that_fails_later_is_said(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One check that fails does not hide the others."""

    def broken(self: LocalStorage) -> int:
        raise StorageError("no statvfs")

    monkeypatch.setattr(LocalStorage, "free_bytes", broken)
    result = ckpt("doctor", tmp_path, "--size", "1 kB", "--json")
    assert result.code == 1
    assert _marks(result)["free space"] == "BAD"
    assert _marks(result)["throughput"] == "ok"


def test_encrypted_channels_differ_from_plain_ones() -> None:
    """The endpoint decides, wherever it is given."""
    assert S3Storage("s3://b/r", {"anon": True}).capabilities.encrypted()
    assert not S3Storage("s3://b/r", {"anon": True, "endpoint_url": "http://x"}).capabilities.encrypted()
    assert not S3Storage(
        "s3://b/r", {"anon": True, "client_kwargs": {"endpoint_url": "http://x"}}
    ).capabilities.encrypted()


def test_what_is_found_is_shown_at_once(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage may hang at any of the checks: those before it are on the screen by then."""

    def hangs(storage: Any, nbytes: int) -> Any:
        yield try_storage.Finding("write and read", try_storage.Mark.OK, "as it should be")
        raise StorageError("hangs")

    monkeypatch.setattr(try_storage, "_findings", hangs)
    result = ckpt("doctor", tmp_path)
    assert result.code == 2
    assert result.out.splitlines() == [str(tmp_path), "  write and read        ok    as it should be"]
