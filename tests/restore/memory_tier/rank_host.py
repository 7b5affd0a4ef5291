"""Several ranks of a run without a trainer, as threads of one process that is to be killed.

Arguments: `ROOT SIZE DURABLE_EVERY`; of nodes with a folder each, `NODES REPLICATE`; and a codec.

Every rank saves a state that tells its step in every byte, into memory or for good. Prints the steps that all began.
"""

from __future__ import annotations

import sys
import threading

from ckpt_engine.checkpointer import Checkpointer
from tests.ranks.runs import SharedStore, ThreadRanks, on_all
from tests.ranks.train_plain import check, state_of


def open_rank(
    root: str, number: int, size: int, store: SharedStore, nodes: int, replicate: int, codec: str = "raw"
) -> Checkpointer:
    """One of the ranks; `nodes`: on so many nodes with a folder each below `root`, or 1: all see `root`."""
    name = f"n{number * nodes // size}"
    memory = {"url": "memory", "replicate": 1} if replicate else "memory"
    ranks = ThreadRanks(number, size, store, node=name)
    nearest = {"url": root if nodes == 1 else f"{root}/{name}", "codec": codec}
    return Checkpointer(tiers=[memory, nearest], ranks=ranks, linger=60)


def main(root: str, size: int, durable_every: int, nodes: int, replicate: int, codec: str) -> None:
    """Save until it is killed."""
    store = SharedStore()
    meeting = threading.Barrier(size)

    def rank(number: int) -> None:
        ckpt = open_rank(root, number, size, store, nodes, replicate, codec)
        state = ckpt.load()
        step = check(state, number) if state is not None else 0
        if not number:
            place = ckpt.loaded.place if ckpt.loaded is not None else "nowhere"
            print("resumed", step, place, flush=True)
        while True:
            step += 1
            meeting.wait(60)  # as the all-reduce of a step
            if not number:
                print("begin", step, flush=True)
            ckpt.save(state_of(step, number), step=step, durable=step % durable_every == 0).wait(60)

    on_all(rank, size)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6])
