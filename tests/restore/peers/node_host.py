"""One machine of a run, with some of its ranks as threads, that is to be killed: `JOB`, JSON.

`root`, `memory` (that tier), `node`, `ranks` (those of this machine), `size`, `port` and `life` (of the store where the
ranks meet), `durable_every`, `pace`, the seconds of a step, `last`, the step after which nothing is saved any more, and
the options `seal` and `keep`.
Every rank saves a state that tells its step in every byte. Prints the steps that its first rank began, and `idle` when
all machines have the last one in memory.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.ranks.process_group import GroupStore
from tests.ranks.runs import ThreadRanks, on_all
from tests.ranks.train_plain import check, state_of

PATIENCE = timedelta(seconds=100)


def main(job: dict[str, Any]) -> None:
    """Save until it is killed."""
    size, first = job["size"], job["ranks"][0]

    def one(number: int) -> None:
        pause = threading.Event()
        rank = job["ranks"][number]
        store = TCPStore("127.0.0.1", job["port"], is_master=False, timeout=PATIENCE)
        shared: Any = GroupStore(store, f"engine{job['life']}")
        ranks = ThreadRanks(rank, size, shared, node=job["node"])
        more = {name: job[name] for name in ("seal", "keep") if name in job}
        ckpt = Checkpointer(tiers=[job["memory"], job["root"]], ranks=ranks, linger=60, **more)
        state = ckpt.load()
        step = check(state, rank) if state is not None else 0
        if rank == first:
            loaded = ckpt.loaded
            place = loaded.place if loaded is not None else "nowhere"
            print("resumed", step, place, flush=True)
        while step < job.get("last", math.inf):
            step += 1
            for other in range(size):  # as the all-reduce of a step
                key = f"step{job['life']}/{step}/"
                if other == 0:
                    store.set(f"{key}{rank}", "1")
                store.wait([f"{key}{other}"], PATIENCE)
            time.sleep(job["pace"])
            if rank == 0:
                durable = step % job["durable_every"] == 0
                while not (taken := ckpt.engine.ready(durable=durable)) and step == job.get("last"):
                    pause.wait(0.01)
                store.set(f"take{job['life']}/{step}", ("durable" if durable else "memory") if taken else "no")
            store.wait([f"take{job['life']}/{step}"], PATIENCE)
            what = store.get(f"take{job['life']}/{step}").decode()
            if rank == first:
                print("begin", step, what, flush=True)
            if what != "no":
                ckpt.save(state_of(step, rank), step=step, durable=what == "durable")
        while rank == 0 and not ckpt.engine.ready(durable=False):
            pause.wait(0.01)
        print("idle", flush=True)
        pause.wait()

    on_all(one, len(job["ranks"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
