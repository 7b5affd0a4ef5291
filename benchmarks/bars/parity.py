"""How fast one processor core makes the parity of a data file, and makes lost parts again, beside a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from benchmarks.measure import interleave, rate
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from ckpt_engine.copy.file_parity import FileParity
from ckpt_engine.store import names
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.storage.local import LocalStorage

TITLE = "Parity of data files: making it, and making lost parts again"
DATA, PARITY = 8, 2
LEAST_GIGABYTES = 2.0
MOST_SPACE = PARITY / DATA + 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    nbytes: int
    rounds: int


SIZES = {Scale.FULL: Size(400_000_000, 15), Scale.QUICK: Size(400_000_000, 5), Scale.TINY: Size(3_000_000, 2)}


def run(bench: Bench) -> BarResult:
    """Encode, make two of eight ranges again, and copy, interleaved in one process."""
    size = SIZES[bench.scale]
    with bench.scratch("parity") as folder:
        return _measure(bench, size, LocalStorage(folder))


def _measure(bench: Bench, size: Size, storage: LocalStorage) -> BarResult:
    name = ParityName(names.data_name(names.snapshot_id(1, 1)), DATA, PARITY, size.nbytes)
    parity = FileParity(storage, name)
    image = memoryview(np.random.default_rng(1).bytes(size.nbytes))
    made, out = memoryview(bytearray(parity.nbytes)), memoryview(bytearray(size.nbytes))
    made[:], out[:] = bytes(parity.nbytes), bytes(size.nbytes)  # memory that is new takes longer
    parity.encode(image, made, lambda: None)
    storage.put(str(name), [made])

    def read(start: int, block: memoryview) -> None:
        lost = start < 2 * name.range_bytes
        block[:] = bytes(block.nbytes) if lost else image[start : start + block.nbytes]

    def decode() -> None:
        assert parity.mend(read, 0, out)

    def copy() -> None:
        out[:] = image

    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: parity.encode(image, made, lambda: None),
        "decode": decode,
        "copy": copy,
    }
    taken = interleave({what: _clock(way) for what, way in ways.items()}, size.rounds, tick=bench.say)
    assert out == image
    speeds = {what: rate(seconds, size.nbytes / 1e9) for what, seconds in taken.items()}
    return BarResult(
        "parity",
        TITLE,
        {
            "file": f"{size.nbytes / 1e6:.0f} MB of random bytes in memory; its parity in a file in the page cache",
            "parity": f"{PARITY} parts for {DATA} ranges; decode: the first two ranges are lost",
            "time": "processor seconds of the thread, with all digests, per byte of the data file",
            "versions": f"pyeclib {version('pyeclib')}",
        },
        (
            Check("encode", "GB/s per core", "at least", LEAST_GIGABYTES, speeds["encode"]),
            Check("decode", "GB/s per core", "at least", LEAST_GIGABYTES, speeds["decode"]),
            Check("space", "x the data file", "at most", MOST_SPACE, (parity.nbytes / size.nbytes,)),
        ),
        tuple(Series(what, "GB/s per core", speed) for what, speed in speeds.items()),
    )


def _clock(way: Callable[[], object]) -> Callable[[], float]:
    def measured() -> float:
        began = time.thread_time()
        way()
        return time.thread_time() - began

    return measured
