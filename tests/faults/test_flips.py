"""Flipped bits of every kind of file are found, and no wrong byte is restored."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.store import sealed_json
from tests.faults.flips import CODECS, KINDS, TIERS, Site, campaign, verified

BAR_FLIPS = 2400


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The run, with each kind of file and each way to store bytes."""
    site = Site.build(tmp_path_factory.mktemp("flips"))
    assert all(verified(site.root / name)["ok"] for name in TIERS)
    assert all(site.spans[kind] for kind in KINDS)
    assert site.codecs == CODECS
    return site


@pytest.mark.long
def test_a_few_flips_are_found_and_restore_nothing_wrong(site: Site) -> None:
    """Two flips of each kind are found, and no restore returns wrong bytes."""
    assert campaign(site, 2 * len(KINDS), seed=0).bad == []


def test_the_campaign_notices_what_is_not_protected(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the digests of small files flips in numbers and in texts are missed."""

    def unchecked(text: bytes, where: str) -> dict[str, Any]:
        row: dict[str, Any] = sealed_json.json.loads(text)
        row.pop("digest", None)
        return row

    monkeypatch.setattr(sealed_json, "unseal", unchecked)
    bad = campaign(site, 12, seed=0, kinds=("lease", "status")).bad
    assert {line.partition(":")[0] for line in bad} == {"lease", "status"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_flips_are_found_and_restore_nothing_wrong(site: Site) -> None:
    """The campaign of the bar: `python -m tests.faults.flips`."""
    assert campaign(site, BAR_FLIPS, seed=1).bad == []
