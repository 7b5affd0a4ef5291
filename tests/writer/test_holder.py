"""What a lease tells about its holder."""

from __future__ import annotations

import os
import sys

import pytest

from ckpt_engine.copy.job import WriterConfig
from ckpt_engine.writer.launch import completed


def test_the_lease_names_the_script_but_none_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """All who may read the folder may read the lease, and arguments can be passwords."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "s3cr3t"])
    holder = completed(WriterConfig("/x")).holder
    assert holder is not None and holder.pid == os.getpid()
    assert holder.command.endswith("train.py")
    assert "s3cr3t" not in str(holder)
