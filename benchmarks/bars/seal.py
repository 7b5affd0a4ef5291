"""What it costs to seal a run: the way to durable, the processor, the key of a process, and room."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.engine import save_timed
from benchmarks.measure import CpuMeter, children, each_per, interleave, rate, started_since, timed
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import State, change_everything, gpt2_state, state_bytes
from ckpt_engine import Checkpointer
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.store.names import data_name, snapshot_id
from ckpt_engine.store.storage.seal_keys import KeyPair, KeyRing
from ckpt_engine.store.storage.sealed import CHUNK_BYTES, SealedBlocks, SealedStorage, sealed_bytes

TITLE = "Seal: encrypted and signed, beside plain"
RATE_LIMIT, STALL_LIMIT = 0.80, 1.10
AES_LIMIT, SIGN_LIMIT, SPACE_LIMIT = 2.0, 5.0, 0.1


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    sizes: tuple[int, ...]
    rounds: int
    keys: int


SIZES = {
    Scale.FULL: Size((64_000_000, 512_000_000), 11, 60),
    Scale.QUICK: Size((64_000_000, 512_000_000), 5, 20),
    Scale.TINY: Size((1_000_000, 2_000_000), 2, 2),
}


class Objects:
    """Keys in memory, so that no disk is measured."""

    url = "memory:"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, name: str, blocks: Sequence[memoryview], *, exclusive: bool = True) -> None:
        self.objects[name] = b"".join(blocks)

    def get(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        if name not in self.objects:
            raise StorageMissingError(name)
        return self.objects[name][start:][:nbytes]


class Ways:
    """A plain and a sealed run of one state, each with a writer process of its own."""

    def __init__(self, folder: Path, key: str, nbytes: int, opened: ExitStack) -> None:
        self.state: State = gpt2_state(nbytes)
        self.nbytes = state_bytes(self.state)
        self.stalls: dict[str, list[float]] = {"plain": [], "sealed": []}
        self.cpu: dict[str, list[float]] = {"plain": [], "sealed": []}
        self.ways: dict[str, Callable[[], float]] = {}
        for name, seal in (("plain", {}), ("sealed", {"seal": {"key": key}})):
            before = children()
            root = folder / f"{name}-{nbytes}"
            checkpointer = opened.enter_context(Checkpointer({"tiers": str(root), "keep": {"last": 1}, **seal}))
            checkpointer.save(self.state, step=0).wait()
            self.ways[name] = self._way(name, checkpointer, CpuMeter(started_since(before)))
        for way in self.ways.values():
            way()
        for values in (*self.stalls.values(), *self.cpu.values()):
            values.clear()

    def _way(self, name: str, checkpointer: Checkpointer, meter: CpuMeter) -> Callable[[], float]:
        steps = iter(range(1, 1_000_000))

        def save() -> float:
            change_everything(self.state)  # else only what is new would be written
            used = meter.read()
            stall, handle = save_timed(checkpointer, self.state, next(steps))
            staged = perf_counter()
            handle.wait()
            seconds = perf_counter() - staged
            self.stalls[name].append(stall)
            self.cpu[name].append(meter.read() - used)
            return seconds

        return save


def run(bench: Bench) -> BarResult:
    """Measure plain and sealed runs, interleaved; then sealing from memory to memory, and keys."""
    size = SIZES[bench.scale]
    checks: list[Check] = []
    series: list[Series] = []
    with bench.scratch("seal") as folder:
        key = str(folder / "key")
        KeyPair.make(key)
        for nbytes in size.sizes:
            with ExitStack() as opened:
                ways = Ways(folder, key, nbytes, opened)
                taken = interleave(ways.ways, size.rounds, tick=bench.say)
            what, gigabytes = f"{nbytes / 1e6:.0f} MB", ways.nbytes / 1e9
            relative = tuple(100 * one for one in ratios(taken["plain"], taken["sealed"]))
            checks.append(Check(f"sealed / plain persist rate, {what}", "%", "at least", 100 * RATE_LIMIT, relative))
            stalls = tuple(ratios(ways.stalls["sealed"], ways.stalls["plain"]))
            checks.append(Check(f"sealed / plain stall, {what}", "x", "at most", STALL_LIMIT, stalls))
            for name in ways.ways:
                series.append(Series(f"{name}, {what}", "GB/s", rate(taken[name], gigabytes), "staged to durable"))
                series.append(Series(f"{name}, {what}", "CPU-s/GB", each_per(ways.cpu[name], gigabytes)))
        checks += _primitives(size, key, series)
    return BarResult(
        "seal",
        TITLE,
        {
            "state": "fp32, GPT-2 with Adam, all of it new in each snapshot",
            "persist": "from the return of `save` to durable, on the disk; the writer's processor time beside it",
            "key": "made, wrapped for one recipient by HPKE (MLKEM768_X25519), signed with Ed25519; a manifest signed",
            "memory to memory": "one core; new memory for what is sealed is part of it",
        },
        tuple(checks),
        tuple(series),
    )


def _primitives(size: Size, key: str, series: list[Series]) -> list[Check]:
    objects, nbytes, name = Objects(), size.sizes[0], data_name(snapshot_id(1, 1))
    storage = SealedStorage(objects, KeyRing(key=key))  # type: ignore[arg-type]
    storage.put(name, [memoryview(b"")])
    image = memoryview(bytearray(os.urandom(nbytes)))
    file = replace(storage._file(name, objects.objects[name][:64]), nbytes=nbytes, size=sealed_bytes(nbytes))
    aes, room = AESGCM(os.urandom(32)), memoryview(bytearray(CHUNK_BYTES))

    def sealed() -> float:
        return timed(lambda: sum(len(one) for one in SealedBlocks(file, [image]).views(0, file.size, CHUNK_BYTES)))

    def raw() -> float:
        step = CHUNK_BYTES - 16
        parts = [image[at : at + step] for at in range(0, nbytes - step, step)]
        return timed(lambda: [aes.encrypt_into(at.to_bytes(12, "big"), one, b"", room) for at, one in enumerate(parts)])

    def signed() -> float:
        ring, empty, manifest = KeyRing(key=key), Objects(), bytes(100_000)
        return timed(lambda: ring.signed(ring.own(empty), name, manifest))  # type: ignore[arg-type]

    taken = interleave({"sealed": sealed, "raw": raw}, size.rounds)
    series.append(Series("AES-256-GCM alone, in the cache", "GB/s", rate(taken["raw"], nbytes / 1e9)))
    millis = tuple(1e3 * signed() for _ in range(size.keys))
    room_percent = 100 * (sealed_bytes(nbytes) / nbytes - 1)
    return [
        Check("AES-256-GCM", "GB/s", "at least", AES_LIMIT, rate(taken["sealed"], nbytes / 1e9)),
        Check("sign + wrap", "ms", "at most", SIGN_LIMIT, millis),
        Check("room of a data file", "%", "at most", SPACE_LIMIT, (room_percent,)),
    ]
