"""Rojas et al. (2020), "A study of checkpointing in large scale training of deep neural networks": its grid, here.

`python -m benchmarks.studies.rojas` is one rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.crew import PATIENCE_SECONDS, Answer, Crew, join_group, serve, take_stdout
from benchmarks.engine import save_timed, wait_ready
from benchmarks.measure import interleave, timed
from benchmarks.peers import DcpAsync, TorchSave
from benchmarks.run import Bench, Scale
from benchmarks.studies.emulated import momentum_state, resnet50, vgg16
from benchmarks.values import BarResult, Check, Grid, Series
from benchmarks.workloads import SEED, State, change_everything
from ckpt_engine import Checkpointer
from ckpt_engine.ranks.process_group import ProcessGroupRanks

TITLE = "Rojas et al. (2020): time, size, idle ranks, determinism"
MODELS = {"ResNet50": resnet50, "VGG16": vgg16, "tiny": lambda: [(64, 64)] * 4}
PUBLISHED_PARAMETERS = {"ResNet50": "25.5 million", "VGG16": "128 million", "tiny": "?"}
WAYS = {
    "torch.save": "rank 0 writes, the others wait (Chainer, and most scripts)",
    "safetensors": "rank 0 writes, the others wait",
    "DCP": "each rank writes a part",
    "DCP, in the background": "each rank writes a part",
    "this engine, waiting": "each rank writes a part",
    "this engine": "each rank writes a part, in the background",
}
TRAINED, BATCH = 96, 16


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure: rounds by model, numbers of processes, and of training steps for the determinism."""

    rounds: Mapping[str, int]
    processes: tuple[int, ...]
    steps: int


SIZES = {
    Scale.FULL: Size({"ResNet50": 3, "VGG16": 2}, (1, 2), 40),
    Scale.QUICK: Size({"ResNet50": 2}, (1, 2), 10),
    Scale.TINY: Size({"tiny": 1}, (2,), 2),
}


def run(bench: Bench) -> BarResult:
    """Each model and number of processes in turn; all ways to save interleaved."""
    size = SIZES[bench.scale]
    rows: list[tuple[str, ...]] = []
    idle: list[float] = []
    series: list[Series] = []
    with bench.scratch("rojas") as folder:
        for model, rounds in size.rounds.items():
            for processes in size.processes:
                with Crew(processes, "benchmarks.studies.rojas", [str(folder / f"{model}-{processes}"), model]) as crew:
                    taken = _saved(crew, rounds, bench)
                for way, answers in taken.items():
                    rows.append(_row(model, processes, way, answers))
                    series.append(Series(f"{model}, {processes} ranks, {way}: blocked", "s", _slowest(answers)))
                if processes > 1:
                    idle += [_idle(one) for one in taken["this engine"]]
        determinism, again = _determinism(folder, size, bench)
    checks = (Check("idle share of two ranks during a save in the background", "%", "at most", 20, tuple(idle)),)
    columns = ("model", "ranks", "format", "strategy", "blocked", "durable after", "size", "idle ranks")
    return BarResult(
        "study-rojas",
        TITLE,
        {
            "state": "fp32 weights and momentum of the model, 8 bytes a parameter; the same on all ranks; all of it "
            "changes from save to save",
            "files": "synced; safetensors and torch.save by hand",
            "ranks": "processes of this machine with gloo, one thread of torch each",
            "blocked": "until the slowest rank may train on",
            "idle ranks": "of the time until all may train on, the share that ranks wait for others",
            "published": "the paper's tables are images that could not be had; its findings in words are beside ours",
        },
        checks,
        tuple(series),
        ("All ranks of one machine share its disk: what parts gain that go to several disks does not show.",),
        (Grid("Time, size and idle ranks", columns, tuple(rows)), determinism, _findings(rows, again)),
    )


def _saved(crew: Crew, rounds: int, bench: Bench) -> dict[str, list[list[Answer]]]:
    taken: dict[str, list[list[Answer]]] = {way: [] for way in WAYS}

    def save(way: str) -> float:
        taken[way].append(crew.all("save", way=way))
        return 0.0

    for way in WAYS:
        save(way)
        taken[way].clear()  # the first one makes room
    interleave({way: lambda way=way: save(way) for way in WAYS}, rounds, tick=bench.say)
    return taken


def _slowest(answers: Sequence[Sequence[Answer]], what: str = "blocked") -> tuple[float, ...]:
    return tuple(max(rank[what] for rank in ranks) for ranks in answers)


def _idle(ranks: Sequence[Answer]) -> float:
    """The share of the ranks' time until all may train on, in per cent."""
    longest = max(rank["blocked"] for rank in ranks)
    return 100 * sum(longest - rank["blocked"] for rank in ranks) / (len(ranks) * longest) if longest else 0.0


def _row(model: str, processes: int, way: str, answers: Sequence[Sequence[Answer]]) -> tuple[str, ...]:
    blocked, durable = Series("", "s", _slowest(answers)), Series("", "s", _slowest(answers, "durable"))
    nbytes = median(sum(rank["nbytes"] for rank in ranks) for ranks in answers)
    return (
        model,
        str(processes),
        way,
        WAYS[way],
        f"{blocked.median:.3f} s ({blocked.low:.3f} to {blocked.high:.3f})",
        f"{durable.median:.2f} s",
        f"{nbytes / 1e6:.0f} MB",
        f"{median(map(_idle, answers)):.0f} %" if processes > 1 else "",
    )


# ---------------------------------------------------------------- determinism


def _determinism(folder: Path, size: Size, bench: Bench) -> tuple[Grid, bool]:
    """Steps with and without deterministic algorithms, and whether a restart in the middle changes anything."""

    def steps(deterministic: bool) -> Callable[[], float]:
        def measured() -> float:
            torch.use_deterministic_algorithms(deterministic)
            try:
                return timed(lambda: _trained(None, size.steps)) / size.steps
            finally:
                torch.use_deterministic_algorithms(False)

        return measured

    taken = interleave({"usual": steps(False), "deterministic": steps(True)}, 5, tick=bench.say)
    cost = [100 * (a / b - 1) for a, b in zip(taken["deterministic"], taken["usual"], strict=True)]
    half, where = size.steps // 2, folder / "again"
    _trained(where, half)
    again = all(torch.equal(a, b) for a, b in zip(_trained(where, size.steps), _trained(None, size.steps), strict=True))
    one = Series("", "%", tuple(cost))
    rows = (
        ("a step takes longer with deterministic algorithms", f"{one.median:.1f} % ({one.low:.1f} to {one.high:.1f})"),
        ("weights after a restart in the middle", "bit for bit the same" if again else "others"),
    )
    return Grid("Determinism, of a small convolutional network with dropout on the CPU", ("", "measured"), rows), again


def _trained(folder: Path | None, steps: int) -> list[torch.Tensor]:
    """The weights after so many steps; from the newest snapshot in `folder`, if there is one."""
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)
    )
    model.extend([nn.Flatten(), nn.Dropout(0.2), nn.Linear(2048, 10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(TRAINED, 3, 32, 32, generator=torch.Generator().manual_seed(SEED))
    data = TensorDataset(images, torch.arange(TRAINED) % 10)
    loader = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(SEED))
    with ExitStack() as stack:
        step = epoch = 0
        if folder is not None:
            checkpointer = stack.enter_context(Checkpointer(folder, writer="thread"))
            run = checkpointer.track(model=model, optimizer=optimizer, loader=loader)
            step, epoch = run.global_step, run.epoch
        while step < steps:
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                step += 1
                if step >= steps:
                    break
            epoch += 1
    return [parameter.detach().clone() for parameter in model.parameters()]


def _findings(rows: Sequence[Sequence[str]], again: bool) -> Grid:
    """What the paper says in words, and what is seen here."""
    two = {(row[0], row[2]): row for row in rows if row[1] != "1"}
    model = next(iter(two))[0]
    blocked = {way: two[model, way][4].partition(" (")[0] for way in WAYS}
    idle = {way: two[model, way][7] for way in WAYS}
    return Grid(
        f"Findings ({model}, two ranks)",
        ("published", "here"),
        (
            ("the cost of a checkpoint is not negligible", f"{blocked['torch.save']} with torch.save"),
            (
                "most costly where one process writes and the rest wait; many GPUs are idle during a save",
                f"torch.save: ranks are idle {idle['torch.save']} of the time; this engine: {idle['this engine']} of "
                f"{blocked['this engine']}",
            ),
            (
                "a restart does not hurt accuracy where training is deterministic",
                "a restart gives the same bits" if again else "a restart gives other bits",
            ),
            ("determinism itself costs time", "the table above"),
        ),
    )


# ---------------------------------------------------------------- a rank


class _Rank:
    """One rank's side: the same state on all, and a saver for each way."""

    def __init__(self, root: Path, model: str, stack: ExitStack) -> None:
        self._root, self._state, self._step = root, momentum_state(MODELS[model]()), 0
        self._torch = TorchSave(root / "torch.save")
        self._dcp = DcpAsync(root / "DCP, in the background")
        ranks = ProcessGroupRanks() if dist.get_world_size() > 1 else None
        self._engine = stack.enter_context(Checkpointer(root / "engine", ranks=ranks, keep={"last": 1}))
        self._engine.prepare(self._state)

    def handle(self, order: Mapping[str, Any]) -> Answer:
        """A save, the first moment of which all ranks share."""
        self._step += 1
        change_everything([self._state["model"], self._state["optimizer"]])
        wait_ready(self._engine, lambda: time.sleep(0.001))
        dist.barrier()
        began, clock = time.perf_counter(), time.time()
        finish = self._save(order["way"], self._state)
        blocked = time.perf_counter() - began
        dist.barrier()
        finish()
        durable = time.perf_counter() - began
        dist.barrier()
        return {"blocked": blocked, "durable": durable, "nbytes": self._nbytes(clock)}

    def _save(self, way: str, state: State) -> Callable[[], object]:
        """Save; what waits until it is durable."""
        leads = dist.get_rank() == 0
        match way:
            case "torch.save" if leads:
                self._torch.save(state, self._step)
            case "safetensors" if leads:
                self._root.mkdir(parents=True, exist_ok=True)
                tensors = {
                    f"{part}.{name}": one for part in ("model", "optimizer") for name, one in state[part].items()
                }
                save_file(tensors, self._root / "safetensors")
                timed(lambda: _sync(self._root / "safetensors"))
            case "DCP":
                dcp.save(state, storage_writer=FileSystemWriter(self._root / "DCP", sync_files=True))
            case "DCP, in the background":
                self._dcp.save(state, self._step)
                return self._dcp.finish
            case "this engine" | "this engine, waiting":
                handle = save_timed(self._engine, state, self._step)[1]
                if way == "this engine":
                    return lambda: handle.wait(PATIENCE_SECONDS)
                handle.wait(PATIENCE_SECONDS)
        return lambda: None

    def _nbytes(self, since: float) -> int:
        """Written since then, of all ranks; counted by the first one."""
        if dist.get_rank():
            return 0
        files = (path for path in self._root.rglob("*") if path.is_file() and path.stat().st_size > 1024)
        return sum(path.stat().st_size for path in files if path.stat().st_mtime >= since - 0.01)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _serve(root: str, model: str) -> None:
    answers = take_stdout()
    join_group()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        rank = _Rank(Path(root), model, stack)
        serve(answers, rank.handle)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
