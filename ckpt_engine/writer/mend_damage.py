"""Keeps the data files of the nearest tier whole while the run trains.

Those that a load has found damaged there are mended, and those that lack parity get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from ckpt_engine.copy.add_parity import add_parity
from ckpt_engine.copy.job import ErrorRecord, WriterConfig
from ckpt_engine.copy.whole_file import whole_file
from ckpt_engine.errors import StorageMissingError
from ckpt_engine.observe import units
from ckpt_engine.observe.events import Event, Notice
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage


def mend_damage(
    places: Iterable[Repository],
    damaged: Iterable[str],
    check_lease: Callable[[], object],
    emit: Callable[[Event], object],
) -> set[str]:
    """Replace damaged data files of the first place by the same bytes, as far as parity or the others have them.

    Args:
        places: the others in the order in which they are asked.
        damaged: the names of the files.
        check_lease: raises `LeaseHeldError` if the first place is not ours any more.
        emit: takes a notice for each file; may be called on any thread.

    Returns:
        The names of those that are mended.
    """
    place, *sources = places
    mended = set[str]()
    for name in damaged:
        what = f"{name} at {units.place(place.storage.url)}"
        try:
            with suppress(StorageMissingError), whole_file(place, sources, name) as (image, source):
                check_lease()
                place.storage.put(name, [image], exclusive=False)
                place.damage.mended(name)
                mended.add(name)
                emit(Notice("INFO", f"{what} was damaged and is mended from {units.place(source)}"))
        except Exception as err:  # noqa: BLE001 - reported, as no caller waits for it
            emit(Notice("WARNING", f"{what} is not mended: {ErrorRecord.of(err).message}"))
    return mended


def complete_parity(config: WriterConfig, check_lease: Callable[[], object], emit: Callable[[Event], object]) -> None:
    """Make the parity that data files of the nearest tier lack. `check_lease` and `emit` are as of `mend_damage`."""
    assert config.parity is not None
    place = Repository(open_storage(config.url, config.storage_options))
    try:
        add_parity(place, config.parity, check_lease)
    except Exception as err:  # noqa: BLE001 - reported, as no caller waits for it
        what = f"some data files at {units.place(place.storage.url)} have no parity yet"
        emit(Notice("WARNING", f"{what}: {ErrorRecord.of(err).message}"))
