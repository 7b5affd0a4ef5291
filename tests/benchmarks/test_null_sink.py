"""The endpoint that keeps nothing speaks enough S3, and counts what came."""

from __future__ import annotations

import pytest

from benchmarks.null_sink import NullSink
from benchmarks.uploaders import Image, Job, Uploader, ways
from ckpt_engine.errors import StorageExistsError
from ckpt_engine.store.storage import open_storage

PART_BYTES = 5 << 20


def test_it_takes_objects_and_knows_their_sizes() -> None:
    """Small ones, big ones, listings, and that one exists; bodies are counted, answers and heads are not."""
    with NullSink() as sink:
        options = {"key": "benchmark", "secret": "benchmark", "endpoint_url": sink.url, "verify": "never"}
        path_style = {"s3": {"addressing_style": "path"}}
        storage = open_storage("s3://bucket/run", {**options, "config_kwargs": path_style, "part_bytes": PART_BYTES})
        storage.put("small", [memoryview(b"12345")])
        storage.put("data/big", [memoryview(bytes(12 << 20)), memoryview(b"end")])
        assert sink.taken_bytes() == 5 + (12 << 20) + 3
        assert {item.name: item.nbytes for item in storage.list("")} == {"small": 5, "data/big": (12 << 20) + 3}
        assert [item.name for item in storage.list("data/")] == ["data/big"]
        with pytest.raises(StorageExistsError):
            storage.put("small", [memoryview(b"x")])
        storage.delete("small")
        assert [item.name for item in storage.list("")] == ["data/big"]


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "engine" else pytest.mark.slow) for way in ways()],
)
def test_every_way_uploads_the_whole_image(way: str) -> None:
    """Each in its process; what it took is plausible, and the process ends with the context."""
    nbytes = (11 << 20) + 1
    with (
        NullSink(tls=True) as sink,
        Image(nbytes) as image,
        Uploader(way, Job(sink.url, image.path, nbytes, PART_BYTES, 2, sink.certificate)) as uploader,
    ):
        for count in (1, 2):
            took = uploader.upload()
            assert took.seconds > 0
            assert took.cpu_seconds > 0
            assert took.extra_bytes >= 0
            assert sink.taken_bytes() == count * nbytes


@pytest.mark.long
def test_a_failing_upload_is_reported() -> None:
    """With its cause, instead of being counted."""
    with (
        Image(1 << 20) as image,
        Uploader("raw", Job("http://127.0.0.1:1", image.path, 1 << 20, PART_BYTES, 2)) as uploader,
        pytest.raises(RuntimeError, match="EndpointConnectionError"),
    ):
        uploader.upload()
