"""How fast a staged snapshot reaches an object store under TLS, and what that costs the processors and the memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.far_network import SERVER_HOST, FarNetwork, can_run
from benchmarks.measure import each_per, interleave, rate
from benchmarks.null_sink import NullSink
from benchmarks.run import Bench, Scale
from benchmarks.uploaders import Image, Job, Upload, Uploader, ways
from benchmarks.values import BarResult, Check, Series, ratios

TITLE = "Upload: from staged to an object store, under TLS"
RATE_LIMIT = 0.95
CPU_LIMIT = 1.10
MEMORY_LIMIT = 64 << 20
FAR_RTT_SECONDS, FAR_LOSS = 0.05, 0.01
_LABELS = {
    "engine": "engine, transport s3fs (default)",
    "engine, obstore": "engine, transport obstore",
    "raw": "aiobotocore, raw multipart",
    "s3fs": "s3fs pipe_file",
    "obstore": "obstore put",
    "awscrt": "awscrt",
}
_NOTES = {"s3fs": "in waves", "awscrt": "of a file, certificate not checked"}


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure, on this machine and far away."""

    nbytes: int
    part_bytes: int
    concurrency: int
    rounds: int
    far_nbytes: int
    far_rounds: int


SIZES = {
    Scale.FULL: Size(1_000_000_000, 64 << 20, 4, 9, 32 << 20, 5),
    Scale.QUICK: Size(500_000_000, 64 << 20, 4, 5, 24 << 20, 3),
    Scale.TINY: Size(12_000_000, 5 << 20, 2, 2, 0, 0),
}

_Taken = dict[str, list[Upload]]


def run(bench: Bench) -> BarResult:
    """Measure the engine's transports and other clients, interleaved, against a sink in a process."""
    size = SIZES[bench.scale]
    taken = _measure(bench, NullSink(tls=True), size.nbytes, size.part_bytes, size.concurrency, size.rounds)
    far: _Taken = {}
    if size.far_rounds and can_run():
        with FarNetwork(FAR_RTT_SECONDS, FAR_LOSS) as network:
            sink = NullSink(tls=True, run=network.run, host=SERVER_HOST)
            far = _measure(bench, sink, size.far_nbytes, 5 << 20, size.concurrency, size.far_rounds)
    gigabytes = size.nbytes / 1e9

    def seconds(way: str) -> list[float]:
        return [one.seconds for one in taken[way]]

    def cpu(way: str) -> list[float]:
        return [one.cpu_seconds for one in taken[way]]

    def memory(way: str) -> tuple[float, ...]:
        return tuple(one.extra_bytes / 1e6 for one in taken[way])

    def fastest(candidates: list[str]) -> str:
        return min(candidates, key=lambda way: statistics.median(seconds(way)))

    best = fastest([way for way in taken if way.startswith("engine")])
    peer = fastest([way for way in taken if not way.startswith("engine")])
    series = [Series(_LABELS[way], "GB/s", rate(seconds(way), gigabytes), _NOTES.get(way, "")) for way in taken]
    series += [Series(_LABELS[way], "CPU-s/GB", each_per(cpu(way), gigabytes)) for way in taken]
    series += [Series(_LABELS[way], "MB", memory(way), "peak, beyond what was used before the first") for way in taken]
    series += [
        Series(f"far: {_LABELS[way]}", "MB/s", rate([one.seconds for one in uploads], size.far_nbytes / 1e6))
        for way, uploads in far.items()
    ]
    pair = f"{_LABELS[best]} / {_LABELS[peer]}"
    missing = [way for way in _LABELS if way not in taken]
    return BarResult(
        "upload",
        TITLE,
        {
            "image": f"{gigabytes:.2f} GB of shared memory; parts of {size.part_bytes >> 20} MiB, "
            f"{size.concurrency} at once",
            "engine": "`put` of the image on an s3:// storage, from looking whether it exists to the completed upload",
            "reference": "aiobotocore: the bytes of each part lie ready in private memory; all clients sign no payload",
            "server": "a process on this machine that speaks TLS 1.3 and answers at once; it counts bodies by the "
            "lengths of their records and decrypts none, so that it sets no limit, and shares the processors",
            "far": f"{FAR_RTT_SECONDS * 1e3:.0f} ms there and back, {FAR_LOSS:.0%} of the packets lost each way; "
            f"{size.far_nbytes >> 20} MiB in parts of 5 MiB"
            if far
            else "not measured: needs root and /dev/net/tun",
            "memory": "resident memory at its peak, beyond what the prepared process used before its first upload",
            "processor time": "user and system of the uploading process; on the loopback device that includes much of "
            "what the kernel does for the receiver",
        },
        (
            Check(
                f"rate: {pair}",
                "%",
                "at least",
                100 * RATE_LIMIT,
                tuple(100 * r for r in ratios(seconds(peer), seconds(best))),
            ),
            Check(f"processor time: {pair}", "x", "at most", CPU_LIMIT, tuple(ratios(cpu(best), cpu(peer)))),
            Check("extra memory", "MB", "at most", MEMORY_LIMIT / 1e6, memory(best)),
        ),
        tuple(series),
        (f"Not installed, so they did not take part: {', '.join(missing)}.",) if missing else (),
    )


def _measure(bench: Bench, sink: NullSink, nbytes: int, part_bytes: int, concurrency: int, rounds: int) -> _Taken:
    taken: _Taken = {way: [] for way in ways()}
    with ExitStack() as stack:
        image = stack.enter_context(Image(nbytes))
        stack.enter_context(sink)
        job = Job(sink.url, image.path, nbytes, part_bytes, concurrency, sink.certificate)

        def candidate(way: str) -> Callable[[], float]:
            uploader = stack.enter_context(Uploader(way, job))

            def upload() -> float:
                before = sink.taken_bytes()
                one = uploader.upload()
                came = sink.taken_bytes() - before
                if came < nbytes:
                    raise RuntimeError(f"{way} sent {came} bytes instead of {nbytes}")
                taken[way].append(one)
                return one.seconds

            return upload

        candidates = {way: candidate(way) for way in taken}
        for way, upload in candidates.items():
            bench.say(f"warming up · {way}")
            upload()
            taken[way].clear()
        interleave(candidates, rounds, tick=bench.say)
    return taken
