"""How fast a staged snapshot reaches an object store, and what that costs the processors and the memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.measure import each_per, interleave, rate
from benchmarks.null_sink import NullSink
from benchmarks.run import Bench, Scale
from benchmarks.uploaders import Image, Job, Upload, Uploader, obstore_is_installed
from benchmarks.values import BarResult, Check, Series, ratios

TITLE = "Upload: from staged to an object store"
RATE_LIMIT = 0.90
CPU_LIMIT = 1.0
MEMORY_LIMIT = 64 << 20
"""Beside the image, for each part under way."""
_LABELS = {
    "engine": "engine",
    "raw": "raw multipart, same options",
    "raw, defaults": "raw multipart, default options",
    "s3fs": "s3fs pipe_file, same options",
    "obstore": "obstore put",
    "obstore, fsspec": "obstore through fsspec",
    "engine, verifying": "engine, checking with MD5",
}
_NOTES = {
    "raw, defaults": "every part signed (SHA-256) and summed (CRC32)",
    "s3fs": "in waves",
    "obstore, fsspec": "parts of 5 MiB, 12 at once: it takes no other",
    "engine, verifying": "as on a channel that does not protect the bytes",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    nbytes: int
    part_bytes: int
    concurrency: int
    rounds: int
    slow_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 64 << 20, 4, 15, 5),
    Scale.QUICK: Size(1_493_000_000, 64 << 20, 4, 5, 2),
    Scale.TINY: Size(12_000_000, 5 << 20, 2, 2, 1),
}


def run(bench: Bench) -> BarResult:
    """Measure the engine, the requests it consists of, and other clients, interleaved, against a sink in a process."""
    size = SIZES[bench.scale]
    gigabytes = size.nbytes / 1e9
    ways = [way for way in _LABELS if obstore_is_installed() or not way.startswith("obstore")]
    taken: dict[str, list[Upload]] = {way: [] for way in ways}
    with ExitStack() as stack:
        image = stack.enter_context(Image(size.nbytes))
        sink = stack.enter_context(NullSink())
        job = Job(sink.url, image.path, size.nbytes, size.part_bytes, size.concurrency)

        def candidate(way: str) -> Callable[[], float]:
            uploader = stack.enter_context(Uploader(way, job))

            def upload() -> float:
                before = sink.taken_bytes()
                one = uploader.upload()
                came = sink.taken_bytes() - before
                if came != size.nbytes:
                    raise RuntimeError(f"{way} sent {came} bytes instead of {size.nbytes}")
                taken[way].append(one)
                return one.seconds

            return upload

        candidates = {way: candidate(way) for way in ways}
        for way, upload in candidates.items():
            bench.say(f"warming up · {way}")
            upload()
            taken[way].clear()
        interleave(
            candidates,
            size.rounds,
            at_most={"raw, defaults": size.slow_rounds, "engine, verifying": size.slow_rounds},
            tick=bench.say,
        )

    def seconds(way: str) -> list[float]:
        return [one.seconds for one in taken[way]]

    def cpu(way: str) -> tuple[float, ...]:
        return each_per([one.cpu_seconds for one in taken[way]], gigabytes)

    def memory(way: str) -> tuple[float, ...]:
        return tuple(one.extra_bytes / 1e6 for one in taken[way])

    series = [Series(_LABELS[way], "GB/s", rate(seconds(way), gigabytes), _NOTES.get(way, "")) for way in ways]
    series += [Series(_LABELS[way], "CPU-s/GB", cpu(way)) for way in ways]
    series += [Series(_LABELS[way], "MB", memory(way), "peak, beyond what was held before the first") for way in ways]
    return BarResult(
        "upload",
        TITLE,
        {
            "image": f"{gigabytes:.2f} GB of shared memory; parts of {size.part_bytes >> 20} MiB, "
            f"{size.concurrency} at once",
            "engine": "`put` of the image on an s3:// storage, from looking whether it exists to the completed upload; "
            "`verify: never`, as on a channel that is encrypted",
            "reference": "aiobotocore with the same client options; the bytes of each part lie ready in private memory",
            "server": "a process on this machine that answers at once and discards all bodies: it sets no limit, and "
            "shares the processors",
            "memory": "resident memory at its peak, beyond what the prepared process held before its first upload",
            "processor time": "user and system of the uploading process; on the loopback device that includes much of "
            "what the kernel does for the receiver",
        },
        (
            Check(
                "rate / raw multipart rate",
                "%",
                "at least",
                100 * RATE_LIMIT,
                tuple(100 * r for r in ratios(seconds("raw"), seconds("engine"))),
            ),
            Check("processor time", "CPU-s/GB", "at most", CPU_LIMIT, cpu("engine")),
            Check("extra memory", "MB", "at most", MEMORY_LIMIT * size.concurrency / 1e6, memory("engine")),
        ),
        tuple(series),
        () if obstore_is_installed() else ("obstore is not installed, so it did not take part.",),
    )
