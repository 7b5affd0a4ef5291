"""A writer process for which a tier hangs after a second instead of half a minute."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine.persist import stall
from ckpt_engine.persist.process import main

stall.STALL_SECONDS = 1.0
os._exit(main(sys.argv[1:]))
