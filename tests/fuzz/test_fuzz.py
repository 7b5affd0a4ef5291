"""Whatever bytes are in a store, reading it ends soon, with the value, an older snapshot, or a coded error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz import stores
from tests.fuzz.__main__ import campaign
from tests.fuzz.mutants import CORPUS, Mutant, apply, corpus, draw
from tests.fuzz.reading import READINGS, load, read

QUICK = 50
SLOW = 2400


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs that mutants are made of."""
    return stores.build(tmp_path_factory.mktemp("runs"))


def named() -> list[tuple[str, Mutant]]:
    names = [row["name"] for row in json.loads(CORPUS.read_text())]
    return list(zip(names, corpus(), strict=True))


@pytest.mark.long
def test_what_is_not_changed_is_read(runs: dict[str, Path], tmp_path: Path) -> None:
    """The runs themselves are whole: what is found in mutants comes from their edits."""
    for name in ("plain", "encoded", "ranks"):
        found = read(Mutant(name, []), runs[name], tmp_path / name, [load])
        assert found == []


@pytest.mark.cells(16)
@pytest.mark.parametrize(("name", "mutant"), named(), ids=lambda one: one if isinstance(one, str) else "")
def test_what_was_found_once_is_not_found_again(
    runs: dict[str, Path], tmp_path: Path, name: str, mutant: Mutant
) -> None:
    """Every case of the corpus changes its run, and ends as it should where it is loaded."""
    apply(mutant, runs[mutant.store], tmp_path / "changed")
    before = {file.relative_to(runs[mutant.store]): file.read_bytes() for file in _files(runs[mutant.store])}
    after = {file.relative_to(tmp_path / "changed"): file.read_bytes() for file in _files(tmp_path / "changed")}
    assert before != after
    assert read(mutant, runs[mutant.store], tmp_path, [load]) == []


@pytest.mark.long
def test_fifty_mutants_are_read(runs: dict[str, Path], tmp_path: Path) -> None:
    """Each is loaded, and read in one of the other ways."""
    found = []
    for seed in range(QUICK):
        mutant = draw(seed, runs)
        some = [load, READINGS[1 + seed % (len(READINGS) - 1)]]
        found += [(seed, one) for one in read(mutant, runs[mutant.store], tmp_path / str(seed), some)]
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousands_of_mutants_are_read_in_every_way() -> None:
    """Loaded, listed, shown, verified, compared, exported, copied: no traceback, no hang, and bounded memory."""
    assert campaign(SLOW, seed=10_000) == []


def _files(root: Path) -> list[Path]:
    return [file for file in sorted(root.rglob("*")) if file.is_file()]
