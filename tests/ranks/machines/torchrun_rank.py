"""One rank that torchrun starts: `JOB`, JSON, whose `module` has a `main(job)`."""

from __future__ import annotations

import importlib
import json
import logging
import sys

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    order = json.loads(sys.argv[1])
    importlib.import_module(order["module"]).main(order)
