"""The writer process of a run of the campaign: the real one, on a disk that fails, and quick to try again."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine.store.storage.retries import GrowingPauses
from ckpt_engine.writer import replicate
from ckpt_engine.writer.server import main
from tests.faults.disk import install

install(Path(os.environ["TEST_FAULTS"]), victims=[os.getppid()])
replicate.PAUSES = GrowingPauses(0.05, 0.4)
os._exit(main(sys.argv[1:]))
