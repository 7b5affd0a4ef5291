"""The demo, run by `make demo`: a training is killed twice with `kill -9` and ends as if it had not been."""

from __future__ import annotations

import sys

from demo.main import main

if __name__ == "__main__":
    sys.exit(main())
