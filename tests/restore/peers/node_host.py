"""One machine of a run, with some of its ranks as threads, that is to be killed: `JOB`, JSON.

`root`, `memory` (that tier), `node`, `ranks` (those of this machine), `size`, `port` and `life` (of the store where the
ranks meet), `durable_every`, and `pace`, the seconds of a step. Every rank saves a state that tells its step in every
byte. Prints the steps that its first rank began.
"""

from __future__ import annotations

import json
import sys
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
        rank = job["ranks"][number]
        store = TCPStore("127.0.0.1", job["port"], is_master=False, timeout=PATIENCE)
        shared: Any = GroupStore(store, f"engine{job['life']}")
        ranks = ThreadRanks(rank, size, shared, node=job["node"])
        ckpt = Checkpointer(tiers=[job["memory"], job["root"]], ranks=ranks, linger=60, seal=job.get("seal"))
        state = ckpt.load()
        step = check(state, rank) if state is not None else 0
        if rank == first:
            loaded = ckpt.loaded
            place = loaded.place if loaded is not None else "nowhere"
            print("resumed", step, place, flush=True)
        while True:
            step += 1
            for other in range(size):  # as the all-reduce of a step
                key = f"step{job['life']}/{step}/"
                if other == 0:
                    store.set(f"{key}{rank}", "1")
                store.wait([f"{key}{other}"], PATIENCE)
            time.sleep(job["pace"])
            if rank == 0:
                durable = step % job["durable_every"] == 0
                taken = ckpt.engine.ready(durable=durable)
                store.set(f"take{job['life']}/{step}", ("durable" if durable else "memory") if taken else "no")
            store.wait([f"take{job['life']}/{step}"], PATIENCE)
            what = store.get(f"take{job['life']}/{step}").decode()
            if rank == first:
                print("begin", step, what, flush=True)
            if what != "no":
                ckpt.save(state_of(step, rank), step=step, durable=what == "durable")

    on_all(one, len(job["ranks"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
