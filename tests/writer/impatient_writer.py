"""A writer process that waits a second for what it usually waits long for: a tier that hangs, a trainer that ends."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine.store.storage import watchdog
from ckpt_engine.writer import server
from ckpt_engine.writer.server import main

watchdog.STALL_SECONDS = server._END_SECONDS = 1.0
os._exit(main(sys.argv[1:]))
