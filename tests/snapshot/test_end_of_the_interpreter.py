"""A script that ends without `close()`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import interpreters

SCRIPT = """
import sys, threading, torch
from ckpt_engine import Checkpointer
from ckpt_engine.errors import StorageError

def fails():
    close()
    raise StorageError("the disk is gone")

for name in ("first", "second"):
    ckpt = Checkpointer({"tiers": f"{sys.argv[1]}/{name}", "writer": "thread"})
    ckpt.save({"w": torch.zeros(9)}, step=1)
close, ckpt.engine.tenure._close = ckpt.engine.tenure._close, fails
main, go_on = threading.main_thread(), threading.Event()
threading.Thread(target=lambda: (main.join(60), go_on.wait(0.5), print("the thread has ended"))).start()
"""


def test_an_engine_that_fails_at_the_end_stops_no_other_and_no_thread(tmp_path: Path) -> None:
    """Its error is logged; Python joins the threads of the script all the same."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = interpreters.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "as it ended: " in ended.stderr
    assert "the disk is gone" in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert ended.stdout == "the thread has ended\n"
