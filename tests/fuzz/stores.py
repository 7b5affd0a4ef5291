"""The runs that mutants are made of: small ones that together use all of the format."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import json
import random
import shutil
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_engine import Checkpointer
from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.preempt.divergence import RollbackRecord, write_rollback
from ckpt_engine.store import catalog, names, pins
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.run_records import TierStatus, WriterStatus, write_status
from tests.support.copies import copy_encoded


class Color(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclass
class Part:
    n: int
    weight: torch.Tensor


class Attributes(dict):
    pass


def every_kind(step: int) -> dict[str, Any]:
    """A state with every kind of node."""
    torch.manual_seed(step)
    memory = torch.randn(64)
    generator = torch.Generator().manual_seed(step)
    model = collections.OrderedDict(weight=torch.randn(8, 16), bias=torch.nn.Parameter(torch.randn(8)))
    model._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "state_dict": model,
        "pytorch-lightning_version": "2.6",
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(8, 16)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "scheduler": {"last_epoch": step, "_last_lr": [0.1]},
        "memory": {"a": memory, "b": memory[8:40], "c": memory.view(8, 8).t(), "d": memory[:1].expand(7)},
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "tied": [model["weight"], model["weight"]],
        "arrays": {"n": np.arange(6.0).reshape(2, 3), "i": np.int32(7), "f": np.float16(0.5), "d": np.dtype("<i8")},
        "bytes": [b"short", b"long" * 40, bytearray(b"y" * 70), bytearray(b"x")],
        "numbers": [1, -(2**80), 1.5, float("nan"), float("inf"), 1 + 2j, True, None, "text", "ü"],
        "containers": {
            1: (1, 2),
            (2, "k"): {3, 4},
            Color.RED: frozenset({5}),
            "q": collections.deque([1, 2], 5),
            "c": collections.Counter("abca"),
            "dd": collections.defaultdict(list, {"a": [1]}),
            "m": Attributes(a=1),
            "p": Point(1, torch.ones(2)),
            "dc": Part(3, torch.ones(3)),
            "ns": argparse.Namespace(a=1),
            "sn": types.SimpleNamespace(b=2),
            "sz": torch.Size([2, 3]),
        },
        "scalars": [
            Path("/a/b"),
            datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC),
            datetime.date(2024, 5, 1),
            datetime.time(1, 2, 3),
            datetime.timedelta(1, 2, 3),
            uuid.UUID(int=7),
            decimal.Decimal("1.10"),
            fractions.Fraction(2, 3),
            range(1, 9, 2),
            slice(None, 3),
            torch.float32,
            torch.device("cpu"),
            torch.strided,
            torch.channels_last,
        ],
        "generators": [generator, np.random.default_rng(step), np.random.RandomState(step), random.Random(step)],
        "rng": {"python": {"version": 3, "words": b"1" * 80, "gauss": None}, "numpy": {}, "torch": b"2" * 80},
        "files": {"config.json": b"{}"},
        "trainer_state": {"global_step": step},
    }


def plain(root: Path) -> None:
    """Two snapshots, and every other file that a run has."""
    with Checkpointer(root, writer="thread", keep={"last": 9}) as ckpt:
        for step in (1, 2):
            ckpt.save(every_kind(step), step=step, metrics={"loss": 0.5, "nan": float("nan")}).wait(60)
    repository = Repository(LocalStorage(root))
    first, last = repository.list()
    pins.pin(repository, first.id, "a note", created=1.7e9)
    write_rollback(repository.storage, RollbackRecord(first.id, 1, last.id, 2, 3, 1, "the loss"))
    write_status(
        LocalStorage(root),
        WriterStatus(
            1,
            "host",
            1.0,
            False,
            (
                TierStatus(str(root), "working", last.id),
                TierStatus("s3://b/r", "away"),
            ),
        ),
    )
    listed = {names.manifest_id(one.name): one for one in repository.storage.list(names.MANIFESTS)}
    cards = [
        catalog.CatalogEntry(one, repository.read(parsed.id).info, repository.files_of(parsed.id))
        for parsed, one in listed.items()
        if parsed is not None
    ]
    (root / names.CATALOG).write_bytes(catalog.encode(repository.run_id, cards))
    holder = {"pid": 1, "host": "a", "started": 1.7e9, "command": "python train.py"}
    (root / names.LEASE).write_text(json.dumps(holder) + "\n")


def encoded(root: Path) -> None:
    """Five steps of Adam, and of a table of which few rows change, as differences."""
    near = root.with_name("near")
    torch.manual_seed(1)
    weight, table = torch.nn.Parameter(torch.randn(64, 96)), torch.randn(400, 16)
    optimizer = torch.optim.AdamW([weight])
    with Checkpointer(near, writer="thread", keep={"last": 9}) as ckpt:
        for step in range(1, 6):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            table[step] += 1
            state = {
                "model": {"w": weight.detach()},
                "table": table,
                "optimizer": optimizer.state_dict(),
                "zeros": torch.zeros(9000),
                "text": torch.tensor([*b"abcd" * 3000], dtype=torch.uint8),
            }
            ckpt.save(state, step=step).wait(60)
    source = Repository(LocalStorage(near))
    far = adopt_run(RunText.of(source), LocalStorage(root))
    for parsed in source.ids():
        copy_encoded(source, far, parsed.id, lambda dtype: "zstd" if dtype == "uint8" else "delta", EncodeStats())
    shutil.rmtree(near)


def ranks(root: Path) -> None:
    """Two snapshots of two ranks, and a part record of a third."""
    _of_ranks(root.parent / "ranks-folder", (0, 0), 0, root)


def nodes(root: Path) -> None:
    """What the first of two nodes has of two snapshots."""
    _of_ranks(root.parent / "nodes-folder", (0, 1), 0, root)


def _of_ranks(folder: Path, of: tuple[int, ...], node: int, root: Path) -> None:
    from tests.ranks.node_roots.committing import Nodes

    run = Nodes(folder, of)
    try:
        for step in (1, 2):
            run.save(step)
    finally:
        run.close()
    shutil.copytree(folder / f"n{node}", root)
    shutil.rmtree(folder)


MAKERS: dict[str, Callable[[Path], None]] = {"plain": plain, "encoded": encoded, "ranks": ranks, "nodes": nodes}


def build(folder: Path, names: Sequence[str] = tuple(MAKERS)) -> dict[str, Path]:
    """Runs by name, below `folder`."""
    for name in names:
        MAKERS[name](folder / name)
    return {name: folder / name for name in names}
