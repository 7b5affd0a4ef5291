"""Ranks that one torchrun restarts: its static rendezvous keeps one store, with the keys of the start before."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from tests.support import interpreters

_RANK = """
import sys
import torch.distributed as dist
from ckpt_engine.ranks.process_group import ProcessGroupRanks
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
ranks = ProcessGroupRanks()
print(ranks.store.get("agreed/1"))
ranks.store.set("agreed/1", "of this start")
dist.destroy_process_group()
"""


def test_a_restarted_rank_does_not_read_what_the_ones_before_agreed_on() -> None:
    """It took their session, so that its parts had other ids than those of rank 0, and no snapshot was committed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for start in "01":
        env = {**os.environ, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": start}
        command = [sys.executable, "-c", _RANK, str(store.port)]
        said = interpreters.run(command, env=env, capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["None"], said.stderr
