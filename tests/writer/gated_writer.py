"""A writer process whose storage hangs until a file named by TEST_GATE exists: a dead disk, or a slow one."""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine.store.storage.local import LocalStorage
from ckpt_engine.writer.server import main

real_put = LocalStorage.put


def put(self: LocalStorage, name: str, *rest: Any, **options: Any) -> None:
    gate = Path(os.environ["TEST_GATE"])
    while name.startswith("data/") and not gate.exists():
        gate.with_suffix(".reached").touch()
        time.sleep(0.01)
    real_put(self, name, *rest, **options)


LocalStorage.put = put  # type: ignore[method-assign]
os._exit(main(sys.argv[1:]))
