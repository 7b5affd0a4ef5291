"""How examples of laws are drawn: always the same ones by default, new ones in `make test-slow`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, max_examples=400, print_blob=True, deadline=None)
settings.load_profile("same")
