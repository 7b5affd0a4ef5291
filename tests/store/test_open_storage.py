"""From what users write to the storage it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.errors import StorageError
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.store.storage.objects_s3 import S3Storage


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b c", "/a/b c"),
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("FILE:///a", "/a"),
        (Path("/a/b"), "/a/b"),
    ],
)
def test_paths_and_file_urls_open_local_storage(url: str | Path, path: str) -> None:
    """A path and a file URL lead to the same folder, with percent signs decoded."""
    storage = open_storage(url)
    assert isinstance(storage, LocalStorage)
    assert storage.root == path
    assert open_storage(storage.url).url == storage.url


def test_a_relative_path_is_resolved_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing the working folder later does not move the run."""
    monkeypatch.chdir(tmp_path)
    storage = open_storage("runs/one")
    monkeypatch.chdir("/")
    assert storage.url == f"file://{tmp_path}/runs/one"
    assert isinstance(storage, LocalStorage)


@pytest.mark.parametrize("url", ["s3://", "gs://b", "file://server/share", "file:///a?b", "", "file://a"])
def test_a_url_without_a_storage_is_refused_with_what_is_possible(url: str) -> None:
    """The message names the URL and what to write instead."""
    with pytest.raises(StorageError, match="→"):
        open_storage(url)


@pytest.mark.parametrize("url", ["s3://bucket/run", "S3://bucket/run/", "s3a://bucket/run"])
def test_s3_urls_open_s3_storage(url: str) -> None:
    """No credentials and no network are needed for that."""
    storage = open_storage(url)
    assert isinstance(storage, S3Storage)
    assert storage.url in ("s3://bucket/run", "s3a://bucket/run")


def test_options_that_no_storage_reads_are_refused() -> None:
    """A misspelt or misplaced option is not ignored."""
    with pytest.raises(StorageError, match="endpoint_url"):
        open_storage("/a", {"endpoint_url": "http://x"})
