"""As `stop_run`, with what a plain loop imports imported for all runs at once: for `launch`."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - by the first optimizer

import ckpt_engine.checkpointer
import ckpt_engine.ranks.process_group  # noqa: F401
from tests.ranks.stop_run import main as main
