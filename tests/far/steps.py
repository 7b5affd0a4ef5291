"""What a writer's death costs the step under way: `python -m tests.far.steps --runs 50`.

Each run trains with snapshots every few steps on a near folder and a far tier over a line; at a random step its writer
is killed, or the line gets into trouble. Beside it runs the same without either: both tell their slowest step as a
multiple of their median.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt_engine import Checkpointer
from tests.far.line import STATES, WORKS, Line
from tests.servers.s3 import free_port, serving

BAR_RATIO = 3.0
_STEPS = 80
_EVERY = 4
_STEP_SECONDS = 0.05


def train(near: Path, far: dict[str, Any], trouble: Any) -> tuple[float, int, int]:
    """The slowest step as a multiple of the median, snapshots that were skipped, and the newest durable step."""
    net = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(net.parameters())
    at = random.randint(_STEPS // 4, _STEPS // 2)
    times, skipped = [], 0
    with Checkpointer(tiers=[str(near), far], keep={"last": 3}, lazy="off") as ckpt:
        ckpt.start()
        for step in range(1, _STEPS + 1):
            began = time.perf_counter()
            time.sleep(_STEP_SECONDS)
            net(torch.randn(4, 512)).square().mean().backward()
            ckpt.before_update()
            optimizer.step()
            if step % _EVERY == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                skipped += ckpt.save(state, step=step).skipped is not None
            ckpt.poll()
            times.append(time.perf_counter() - began)
            if step == at and trouble is not None:
                threading.Thread(target=trouble).start()
        ckpt.wait(60.0)
        ckpt.save(state, step=_STEPS + 1).wait(60.0)
        newest = ckpt.snapshots(nearest=True)[-1].step
    return max(times[_EVERY:]) / statistics.median(times), skipped, newest


def kill_writers() -> None:
    for child in psutil.Process().children():
        if "ckpt_engine/persist/__main__.py" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, serving("moto", Path(folder)) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        for number in range(runs):
            kinds = ("nothing", "the writer is killed", f"the tier {random.choice(STATES)}")
            for kind in kinds:
                with Line((host, int(port)), free_port()) as line:
                    bucket = server.make_bucket(f"b{os.urandom(6).hex()}")
                    far = {"url": f"s3://{bucket}/run", "storage_options": server.options(line.url)}
                    state = kind.rpartition(" ")[2]
                    trouble = {"nothing": None, "killed": kill_writers}.get(state, lambda: line.become(state))  # noqa: B023
                    line.become(WORKS)
                    near = Path(folder) / bucket
                    ratio, skipped, newest = train(near, far, trouble)
                    shutil.rmtree(near)
                rows.setdefault("a tier in trouble" if state in STATES else kind, []).append(ratio)
                print(f"{number}: {kind}: slowest step {ratio:.2f} of the median, {skipped} skipped, {newest} durable")
                assert newest == _STEPS + 1
                kill_writers()
    for kind, ratios in rows.items():
        above = sum(ratio > BAR_RATIO for ratio in ratios)
        print(
            f"{kind}: {len(ratios)} runs, median {statistics.median(ratios):.2f}, most {max(ratios):.2f}, {above} above"
        )


if __name__ == "__main__":
    main()
