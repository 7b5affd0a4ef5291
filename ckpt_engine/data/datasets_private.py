"""Every class of the package `datasets` that is not public, each behind one function; nothing else here names them.

The package is not imported: what is not there has no streams. A test fails where an installed one lacks a name.
"""

from __future__ import annotations

__all__ = ["PRIVATE_NAMES", "forgets_its_buffer", "is_of_package", "refuses_states_of_workers"]

_PACKAGE = "datasets."
_SHUFFLES = "BufferShuffledExamplesIterable"
_CONCATENATES = (
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable",
)

PRIVATE_NAMES = (_SHUFFLES, *_CONCATENATES)
"""Classes of `datasets.iterable_dataset`; `tests/data/test_datasets_private.py` has a test for them."""


def is_of_package(part: object) -> bool:
    """Whether its class is one of the package `datasets`."""
    return type(part).__module__.startswith(_PACKAGE)


def forgets_its_buffer(part: object) -> bool:
    """Whether its state leaves out the samples that its shuffle buffer holds."""
    return is_of_package(part) and type(part).__name__ == _SHUFFLES


def refuses_states_of_workers(part: object) -> bool:
    """Whether it raises where it loads a state that a worker has saved."""
    return is_of_package(part) and type(part).__name__ in _CONCATENATES
