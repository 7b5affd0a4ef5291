"""Settings shared by the tests of loader positions."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Three workers on two cores are meant here: they make roles and positions differ. torchdata calls `set_vital`."""
    here = __name__.rpartition(".")[0]
    for item in items:
        if item.module.__name__.startswith(here):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"))
