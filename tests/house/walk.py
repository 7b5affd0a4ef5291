"""Counts the files, functions and calls of our packages that one save and one load take: `python -m tests.house.walk`.

A fresh process, a thread writer, one local tier, four tensors of 16 KiB. Counted are a snapshot until it is durable,
the same with all that follows, where retention, once that is counted, removes an older one, and then a load; of two of
each the one with fewer calls, as threads may overlap. And a save of 200 such tensors of which one has changed, so that
it refers to the others.
Prints JSON; with `--all` the calls too.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT}/{package}/" for package in ("ckpt_engine", "lightning_ckpt", "accelerate_ckpt"))

KEEP = 2
FEW, MANY = 4, 200
"""Of so many tensors bytes are worth sparing only with the second number."""
calls: Counter[tuple[str, str, int]] = Counter()
watching, retention_may_begin = threading.Event(), threading.Event()


def note(frame: FrameType, event: str, _: object) -> None:
    """The profile function of every thread."""
    code = frame.f_code
    if event == "call" and watching.is_set() and code.co_filename.startswith(OURS):
        if code.co_qualname == "PrimaryTier.prune":
            retention_may_begin.wait(60)
        calls[code.co_filename, code.co_qualname, code.co_firstlineno] += 1


def taken(*, ends: bool = True) -> dict[str, Any]:
    """What was counted since the last time that it ended."""
    if ends:
        watching.clear()
    found: dict[str, Any] = {
        "files": len({file for file, _, _ in calls}),
        "functions": len(calls),
        "calls": sum(calls.values()),
    }
    if "--all" in sys.argv:
        found["each"] = [f"{n} {Path(file).relative_to(ROOT)} {name}" for (file, name, _), n in calls.most_common()]
    if ends:
        calls.clear()
    return found


def settle(run: Path, snapshots: int, files: int) -> None:
    """Return when retention has left so many snapshots and data files."""
    deadline = time.monotonic() + 60
    while [len(list((run / part).iterdir())) for part in ("snapshots", "data")] != [snapshots, files]:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    while any(thread.name.startswith("ckpt-tier") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def counts(tensors: int) -> list[dict[str, Any]]:
    """Train nothing, and save and load twice; what a save until it is durable, a whole save, and a load take."""
    import torch

    from ckpt_engine import Checkpointer

    durable: list[dict[str, Any]] = []
    saves: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    state: dict[str, Any] = {"model": {f"w{n}": torch.randn(64, 64) for n in range(tensors)}, "step": 0}
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, writer="thread", keep={"last": KEEP}) as ckpt:
        for step in range(5):
            state["model"]["w0"] += 1
            if step > KEEP:
                retention_may_begin.clear()
                watching.set()
            ckpt.save(state, step=step).wait(60)
            durable += [taken(ends=False)] if step > KEEP else []
            retention_may_begin.set()
            kept = min(step + 1, KEEP)
            settle(Path(folder), kept, kept + (tensors == MANY and step >= KEEP))
            saves += [taken()] if step > KEEP else []
        for _ in range(2):
            watching.set()
            ckpt.load()
            loads.append(taken())
    return [min(found, key=lambda one: one["calls"]) for found in (durable, saves, loads)]


def main() -> None:
    """Count and print."""
    threading.setprofile(note)
    sys.setprofile(note)
    durable, save, load = counts(FEW)
    print(json.dumps({"durable": durable, "save": save, "load": load, "share": counts(MANY)[1]}, indent=1))


if __name__ == "__main__":
    main()
