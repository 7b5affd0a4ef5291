"""Plays a reader with a notebook, in a real kernel: `python kernel_driver.py CELL ROOT [install command]`.

Runs the cell, kills the kernel once a snapshot is durable, runs the cell in a new one, and presses its stop button.
Prints what each cell shows. Needs jupyter_client and ipykernel, and nothing of ours.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from jupyter_client import BlockingKernelClient, KernelManager

PATIENCE_SECONDS = 400.0


def start() -> tuple[KernelManager, BlockingKernelClient]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=PATIENCE_SECONDS)
    return manager, client


def show(client: BlockingKernelClient, cell: str, until: str) -> str:
    """Run a cell up to this text, or its end; what it has shown, errors included."""
    sent = client.execute(cell)
    return follow(client, sent, until)


def follow(client: BlockingKernelClient, sent: str, until: str | None) -> str:
    shown, deadline = "", time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=PATIENCE_SECONDS)
        if message["parent_header"].get("msg_id") != sent:
            continue
        content = message["content"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return shown
        shown += content.get("text", "") + "".join(f"\n{line}" for line in content.get("traceback", ()))
        if until is not None and until in shown:
            return shown
    raise AssertionError(f"the cell does not end: {shown}")


def main(cell: str, root: Path, install: str) -> None:
    manager, client = start()
    if install:
        print(show(client, install, "\0"))
    sent = client.execute(cell)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any((root / "snapshots").glob("*.json")):
        assert time.monotonic() < deadline, "no snapshot"
        time.sleep(0.02)
    manager.shutdown_kernel(now=True)
    manager, client = start()
    sent = client.execute(cell)
    print(follow(client, sent, "resumed at step"))
    manager.interrupt_kernel()
    print("--- interrupted")
    print(follow(client, sent, None))
    manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(), Path(sys.argv[2]), (sys.argv[3:] or [""])[0])
