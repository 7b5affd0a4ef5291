"""How fast a staged snapshot becomes durable, and what that costs the processors."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from benchmarks.disk import SharedBuffer, buffered_write, direct_write
from benchmarks.engine import save_timed
from benchmarks.measure import CpuMeter, children, each_per, interleave, rate, started_since
from benchmarks.peers import TorchSave
from benchmarks.run import Bench, Scale
from benchmarks.values import BarResult, Check, Series, ratios
from benchmarks.workloads import change_everything, gpt2_state, state_bytes, tensors
from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import Event, SnapshotCommitted

TITLE = "Persist: from staged to durable"
RATE_LIMIT = 0.80
CPU_LIMIT = 0.25


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    nbytes: int
    rounds: int
    slow_rounds: int


SIZES = {
    Scale.FULL: Size(1_493_000_000, 11, 3),
    Scale.QUICK: Size(1_493_000_000, 4, 1),
    Scale.TINY: Size(4_000_000, 2, 1),
}


class Commits:
    """Keeps the commit events, which carry the writer's own figures."""

    def __init__(self) -> None:
        self.seen: list[SnapshotCommitted] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, SnapshotCommitted):
            self.seen.append(event)


def run(bench: Bench) -> BarResult:
    """Measure snapshots, raw direct writes and raw buffered writes of the same bytes, interleaved."""
    size = SIZES[bench.scale]
    state = gpt2_state(size.nbytes)
    nbytes = state_bytes(state)
    gigabytes = nbytes / 1e9
    shared = SharedBuffer(nbytes)
    commits = Commits()
    cpu: dict[str, list[float]] = {"engine": [], "direct": [], "torch.save": []}
    with bench.scratch("persist") as folder, memoryview(shared.memory) as image:
        before = children()
        with Checkpointer(folder / "run") as checkpointer:
            checkpointer.engine.events = commits
            checkpointer.save(state, step=0).wait()
            meters = {"engine": CpuMeter(started_since(before)), "direct": CpuMeter(), "torch.save": CpuMeter()}
            counter = iter(range(1, 1_000_000))
            torch_save = TorchSave(folder)

            def engine() -> float:
                change_everything(state)  # else only what is new would be written
                used = meters["engine"].read()
                _, handle = save_timed(checkpointer, state, next(counter))
                staged = perf_counter()
                handle.wait()
                seconds = perf_counter() - staged
                cpu["engine"].append(meters["engine"].read() - used)
                return seconds

            def direct() -> float:
                used = meters["direct"].read()
                seconds = direct_write(folder / "direct", image)
                cpu["direct"].append(meters["direct"].read() - used)
                return seconds

            def with_torch_save() -> float:
                used = meters["torch.save"].read()
                seconds = torch_save.save(state, 0)
                cpu["torch.save"].append(meters["torch.save"].read() - used)
                return seconds

            engine(), engine(), direct()
            for values in cpu.values():
                values.clear()
            taken = interleave(
                {
                    "engine": engine,
                    "O_DIRECT + fsync": direct,
                    "buffered + fsync": lambda: buffered_write(folder / "buffered", image),
                    "torch.save + fsync": with_torch_save,
                },
                size.rounds,
                at_most={"torch.save + fsync": size.slow_rounds, "buffered + fsync": size.slow_rounds},
                tick=bench.say,
            )
    written = [event.write_seconds for event in commits.seen[-size.rounds :]]
    writer = [event.cpu_seconds for event in commits.seen[-size.rounds :]]
    return BarResult(
        "persist",
        TITLE,
        {
            "state": f"{gigabytes:.2f} GB fp32, {sum(1 for _ in tensors(state))} tensors (GPT-2 with Adam)",
            "engine": "from the return of `save` to durable: digests, data file, fsync, manifest, folder syncs",
            "reference": "one thread, 16 MiB `O_DIRECT` writes from touched shared memory into a new file, then fsync",
            "processor time": "user and system of trainer and writer process, staging copy and digests included",
        },
        (
            Check(
                "rate / O_DIRECT + fsync rate",
                "%",
                "at least",
                100 * RATE_LIMIT,
                tuple(100 * r for r in ratios(taken["O_DIRECT + fsync"], taken["engine"])),
            ),
            Check("processor time", "CPU-s/GB", "at most", CPU_LIMIT, each_per(cpu["engine"], gigabytes)),
        ),
        (
            Series("engine, staged to durable", "GB/s", rate(taken["engine"], gigabytes)),
            Series(
                "engine, data file alone", "GB/s", rate(written, gigabytes), "write and fsync, as the writer saw it"
            ),
            Series("O_DIRECT + fsync", "GB/s", rate(taken["O_DIRECT + fsync"], gigabytes)),
            Series("buffered + fsync", "GB/s", rate(taken["buffered + fsync"], gigabytes)),
            Series("torch.save + fsync", "GB/s", rate(taken["torch.save + fsync"], gigabytes), "blocks training"),
            Series("engine, writer process", "CPU-s/GB", each_per(writer, gigabytes)),
            Series("O_DIRECT + fsync", "CPU-s/GB", each_per(cpu["direct"], gigabytes)),
            Series("torch.save + fsync", "CPU-s/GB", each_per(cpu["torch.save"], gigabytes)),
        ),
        ("Kernel threads that finish buffered writes are not counted in the processor time of torch.save.",),
    )
