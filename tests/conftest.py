"""How examples of laws are drawn: always the same ones by default, new ones in `make test-slow`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no failure: how long an example takes to draw or to run says nothing about a law.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_PATIENT)
settings.register_profile("explore", derandomize=False, max_examples=400, print_blob=True, **_PATIENT)
settings.load_profile("same")
