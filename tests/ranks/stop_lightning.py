"""As `stop_run`, with Lightning imported for all runs at once: for `launch`."""

from __future__ import annotations

import lightning.pytorch  # noqa: F401
import torch._dynamo  # noqa: F401 - by the first optimizer

from lightning_ckpt import AdaptiveCheckpoint  # noqa: F401
from tests.ranks.stop_run import main as main
