"""What a writer's death costs the step under way; fails if a bar is missed.

`python -m tests.restore.far_tiers.steps --runs 50`

Each run trains with snapshots every few steps on a local folder and a far tier over a line; at a random step its writer
is killed, or the line gets into trouble. Beside it runs the same without either: both tell their slowest step as a
multiple of their median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt_engine import Checkpointer
from tests.restore.far_tiers.line import STATES, WORKS, Line
from tests.servers.s3 import S3Server, free_port, serving

NOTHING, KILLED, TROUBLE = "nothing", "the writer is killed", "the tier"
BAR_RATIO = 3.0
_STEPS = 50
_EVERY = 4
_STEP_SECONDS = 0.05
PARTS = ("forward", "fence", "update", "save", "poll")


def train(near: Path, far: dict[str, Any], trouble: Any) -> dict[str, Any]:
    """The slowest step as a multiple of the median, and the seconds of its parts; snapshots that were skipped, and
    whether the last one is lost."""
    net = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(net.parameters())
    at = random.randint(_STEPS // 4, _STEPS // 2)
    steps: list[dict[str, float]] = []
    skipped = 0
    with Checkpointer(tiers=[str(near), far], keep={"last": 3}, lazy="off", wait_at_end=0) as ckpt:
        ckpt.engine.start()
        for step in range(1, _STEPS + 1):
            instants = [time.perf_counter()]
            time.sleep(_STEP_SECONDS)
            net(torch.randn(4, 512)).square().mean().backward()
            instants.append(time.perf_counter())
            ckpt.before_update()
            instants.append(time.perf_counter())
            optimizer.step()
            instants.append(time.perf_counter())
            if step % _EVERY == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                skipped += ckpt.save(state, step=step).skipped is not None
            instants.append(time.perf_counter())
            ckpt.engine.poll()
            instants.append(time.perf_counter())
            steps.append(dict(zip(PARTS, (b - a for a, b in pairwise(instants)), strict=True)))
            if step == at and trouble is not None:
                threading.Thread(target=trouble).start()
        ckpt.wait(60.0)
        ckpt.save(state, step=_STEPS + 1).wait(60.0)
        newest = ckpt.engine.snapshots(nearest=True)[-1].step
    median = statistics.median(sum(one.values()) for one in steps)
    slowest = max(steps[_EVERY:], key=lambda one: sum(one.values()))
    ratio = sum(slowest.values()) / median
    return {"ratio": ratio, "slowest": slowest, "skipped": skipped, "lost": newest != _STEPS + 1}


def kill_writers() -> list[psutil.Process]:
    writers = [
        one for one in psutil.Process().children() if "ckpt_engine/writer/__main__.py" in " ".join(one.cmdline())
    ]
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
    return writers


def play(kind: str, server: S3Server, folder: Path) -> dict[str, Any]:
    """One training under its trouble, or under none."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with Line((host, int(port)), free_port()) as line:
        bucket = server.make_bucket(f"b{os.urandom(6).hex()}")
        far = {"url": f"s3://{bucket}/run", "storage_options": server.options(line.url)}
        state = kind.rpartition(" ")[2]
        trouble = {NOTHING: None, KILLED: kill_writers}.get(kind, lambda: line.become(state))
        line.become(WORKS)
        row = train(folder / bucket, far, trouble)
        psutil.wait_procs(kill_writers(), timeout=60.0)  # one that goes on by itself still writes there
        shutil.rmtree(folder / bucket)
    return {"kind": kind, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, Any]]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serving("moto", Path(folder)) as server:
        for number in range(options.runs):
            kinds = [NOTHING, KILLED, f"{TROUBLE} {STATES[number % len(STATES)]}"]
            random.shuffle(kinds)
            for kind in kinds:
                row = play(kind, server, Path(folder))
                rows.setdefault(TROUBLE if kind.startswith(TROUBLE) else kind, []).append(row)
                lost = ", LOST" if row["lost"] else ""
                parts = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in row["slowest"].items())
                print(f"{number}: {kind}: slowest step {row['ratio']:.2f} of the median ({parts}){lost}", flush=True)
                if options.json:
                    with options.json.open("a") as out:
                        out.write(json.dumps(row) + "\n")
    print(f"{'':24} runs  median   most  above {BAR_RATIO:.0f}  skipped  lost")
    missed = 0
    for kind, found in sorted(rows.items()):
        ratios = [row["ratio"] for row in found]
        above, lost = sum(ratio > BAR_RATIO for ratio in ratios), sum(row["lost"] for row in found)
        skipped = sum(row["skipped"] for row in found)
        middle = statistics.median(ratios)
        print(f"{kind:24} {len(found):4} {middle:7.2f} {max(ratios):6.2f} {above:8} {skipped:8} {lost:5}")
        missed += lost + (above if kind != NOTHING else 0)
    print(f"{(time.monotonic() - began) / 60:.0f} min, {missed} miss the bar")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
