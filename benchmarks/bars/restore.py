"""How fast a snapshot comes back from a cold and from a warm page cache, verified, and with how much memory."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.disk import buffered_read, direct_read, evict, warm
from benchmarks.measure import PeakMemory, interleave, rate, timed
from benchmarks.peers import TorchSave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series
from benchmarks.workloads import State, gpt2_state, state_bytes, tensors
from ckpt_engine import Checkpointer
from ckpt_engine.copy import fresh_pages

TITLE = "Restore: reading a snapshot back, every byte verified"
COLD_LIMIT = 0.85
WARM_LIMIT = 0.80
MEMORY_LIMIT = 1.10


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    nbytes: int
    rounds: int
    slow_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 9, 3),
    Scale.QUICK: Size(1_493_000_000, 3, 1),
    Scale.TINY: Size(4_000_000, 2, 1),
}


def run(bench: Bench) -> BarResult:
    """Measure `load` against raw reads of the same file, cold and warm, interleaved."""
    size = SIZES[bench.scale]
    with bench.scratch("restore") as folder:
        nbytes, count = _write(folder, size)
        [data] = (folder / "run" / "data").iterdir()
        pages = -(-data.stat().st_size // mmap.PAGESIZE)
        # Private memory: direct reads into shared memory, which has small pages, are half as fast.
        warm_out = _huge_pages(pages * mmap.PAGESIZE)
        warm_out.fill_(1)
        out = memoryview(warm_out.numpy())
        live = gpt2_state(size.nbytes)
        run_folder = folder / "run"
        pt = folder / "pt" / "0.pt"

        def cold(path: Path, action: Callable[[], object]) -> Callable[[], float]:
            def measured() -> float:
                evict(path)
                return timed(action)

            return measured

        def hot(path: Path, action: Callable[[], object]) -> Callable[[], float]:
            def measured() -> float:
                warm(path)
                return timed(action)

            return measured

        slow = {"cold torch.load": size.slow_rounds, "warm torch.load": size.slow_rounds}
        taken = interleave(
            {
                "raw direct": cold(data, lambda: direct_read(data, out)),
                "raw direct 2": cold(data, lambda: direct_read(data, out, threads=2)),
                "raw buffered": cold(data, lambda: buffered_read(data, out)),
                **{
                    f"{name}, {kind}": cold(data, partial(_read_into_new, read, data, make, pages * mmap.PAGESIZE))
                    for name, read in _RAW_READS.items()
                    for kind, make in _NEW_MEMORY.items()
                },
                "cold load": cold(data, lambda: Checkpointer(run_folder).load()),
                "cold load into": cold(data, lambda: Checkpointer(run_folder).load(into=live)),
                "cold safetensors": cold(data, lambda: _touch(load_file(data))),
                "cold torch.load": cold(pt, lambda: torch.load(pt, weights_only=True)),
                "warm copy": hot(data, lambda: _mapped_copy(data, warm_out)),
                "warm copy fresh": hot(data, lambda: _mapped_copy(data, torch.empty_like(warm_out))),
                "warm copy huge": hot(data, lambda: _mapped_copy(data, _huge_pages(pages * mmap.PAGESIZE))),
                "warm load": hot(data, lambda: Checkpointer(run_folder).load()),
                "warm load into": hot(data, lambda: Checkpointer(run_folder).load(into=live)),
                "warm torch.load": hot(pt, lambda: torch.load(pt, weights_only=True)),
            },
            size.rounds,
            at_most=slow,
            tick=bench.say,
        )
        memory = [_extra(run_folder, None) / nbytes for _ in range(3)]
        memory_into = [_extra(run_folder, live) / nbytes for _ in range(3)]
    new = [f"{name}, {kind}" for name in _RAW_READS for kind in _NEW_MEMORY]
    raws_new = [min(each) for each in zip(*(taken[name] for name in new), strict=True)]
    raws = [min(three) for three in zip(taken["raw direct"], taken["raw direct 2"], taken["raw buffered"], strict=True)]
    gigabytes = nbytes / 1e9

    def speed(key: str, name: str, note: str = "") -> Series:
        return Series(name, "GB/s", rate(taken[key], gigabytes), note)

    return BarResult(
        "restore",
        TITLE,
        {
            "state": f"{gigabytes:.2f} GB fp32, {count} tensors (GPT-2 with Adam)",
            "cold": "the file's pages dropped with posix_fadvise, checked with mincore; a hypervisor may still cache",
            "raw cold read": "the fastest in each round of direct reads with one thread, with two, and buffered reads; "
            "16 MiB blocks into touched memory",
            "raw cold read into new memory": "the fastest in each round of the same three into memory that is mapped "
            "within the time: small pages, and huge pages that are made present block by block",
            "warm": "the file read into the page cache before; references: map the file, one copy, into touched memory "
            "for `into` and into new memory for `load`",
            "load": "new tensors, all digests verified; `into` overwrites live tensors instead",
            "memory": "peak resident memory during `load` beyond that before it, per byte of state",
        },
        (
            Check("cold load / raw cold read", "%", "at least", 100 * COLD_LIMIT, _percent(raws, taken["cold load"])),
            Check(
                "cold load / raw cold read into new memory",
                "%",
                "at least",
                100 * COLD_LIMIT,
                _percent(raws_new, taken["cold load"]),
            ),
            Check(
                "warm load(into=) / mapped copy into the same kind of memory",
                "%",
                "at least",
                100 * WARM_LIMIT,
                _percent(taken["warm copy"], taken["warm load into"]),
            ),
            Check(
                "warm load / mapped copy into new memory",
                "%",
                "at least",
                100 * WARM_LIMIT,
                _percent(taken["warm copy fresh"], taken["warm load"]),
            ),
            Check("peak extra memory of load", "x state", "at most", MEMORY_LIMIT, tuple(memory)),
            Check("peak extra memory of load(into=)", "x state", "at most", MEMORY_LIMIT, tuple(memory_into)),
        ),
        (
            speed("cold load", "cold: load"),
            speed("cold load into", "cold: load(into=)"),
            speed("raw direct", "cold: raw direct read"),
            speed("raw direct 2", "cold: raw direct read, two threads"),
            speed("raw buffered", "cold: raw buffered read"),
            *(speed(name, f"cold: {name}") for name in new),
            speed("cold safetensors", "cold: safetensors load_file", "not verified"),
            speed("cold torch.load", "cold: torch.load", "not verified"),
            speed("warm load", "warm: load"),
            speed("warm load into", "warm: load(into=)"),
            speed("warm copy", "warm: mapped copy into touched memory"),
            speed("warm copy fresh", "warm: mapped copy into new memory"),
            speed("warm copy huge", "warm: mapped copy into new huge pages", "what `load` allocates"),
            speed("warm torch.load", "warm: torch.load", "not verified"),
        ),
        (
            "A virtual machine may have given free huge pages back to its host: the first touch of those costs up to "
            "2 s/GB, and small pages come from what it has kept. The mapped copy into new huge pages shows it.",
        ),
    )


def _small_pages(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _huge_pages(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_RAW_READS: Mapping[str, Callable[..., float]] = {
    "raw direct read": direct_read,
    "raw direct read, two threads": partial(direct_read, threads=2),
    "raw buffered read": buffered_read,
}
_NEW_MEMORY: Mapping[str, Callable[[int], torch.Tensor]] = {
    "new small pages": _small_pages,
    "new huge pages": _huge_pages,
}


def _read_into_new(
    read: Callable[..., float], path: Path, make: Callable[[int], torch.Tensor], nbytes: int
) -> torch.Tensor:
    """The memory, which is freed after the clock is read, as that of `load` is."""
    memory = make(nbytes)
    read(path, memoryview(memory.numpy()), prepare=fresh_pages.populate)
    return memory


def _write(folder: Path, size: Size) -> tuple[int, int]:
    """Write one snapshot and one `torch.save` file; the state's bytes and number of tensors."""
    state = gpt2_state(size.nbytes)
    with Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(state, step=1).wait()
    TorchSave(folder / "pt").save(state, 0)
    return state_bytes(state), sum(1 for _ in tensors(state))


def _percent(reference: list[float], measured: list[float]) -> tuple[float, ...]:
    return tuple(100 * a / b for a, b in zip(reference, measured, strict=True))


def _touch(loaded: dict[str, torch.Tensor]) -> float:
    """Read what may only be mapped."""
    return sum(float(t.view(-1)[::1024].sum()) for t in loaded.values() if t.is_floating_point())


def _mapped_copy(path: Path, out: torch.Tensor) -> None:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        mapped = torch.frombuffer(view, dtype=torch.uint8)
        out[: mapped.numel()].copy_(mapped)
        del mapped


def _extra(folder: Path, into: State | None) -> float:
    gc.collect()
    checkpointer = Checkpointer(folder)
    peak = PeakMemory()
    state = checkpointer.load(into=into)
    extra = peak.extra_bytes()
    del state
    return extra
