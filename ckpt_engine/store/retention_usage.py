"""Where the bytes of a run are: the one reading that limits need."""

from __future__ import annotations

from ckpt_engine.errors import FormatError, StorageMissingError
from ckpt_engine.store import layout
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.retention_plan import Usage


def measure(repository: Repository) -> Usage:
    """The bytes of every snapshot and of all the rest of ours. What a put has not finished yet is not counted.

    A damaged snapshot counts as `other_bytes`: nothing is known to become free with it.
    """
    data: dict[str, int] = {}
    manifests: dict[str, int] = {}
    other_bytes = 0
    listed = list(repository.storage.list(""))
    repository.learn(listed)
    for item in listed:
        if layout.data_owner(item.name):
            data[item.name] = item.nbytes
        elif parsed := layout.manifest_id(item.name):
            manifests[parsed.id] = item.nbytes
        elif layout.is_ours(item.name):
            other_bytes += item.nbytes
    files: dict[str, dict[str, int]] = {}
    for snapshot, nbytes in manifests.items():
        try:
            needed = repository.files_of(snapshot)
        except StorageMissingError:
            continue  # forgotten meanwhile
        except FormatError:
            other_bytes += nbytes
            continue
        files[snapshot] = {layout.manifest_name(snapshot): nbytes, **{name: data.get(name, 0) for name in needed}}
    needed_by_any = {name for one in files.values() for name in one}
    other_bytes += sum(nbytes for name, nbytes in data.items() if name not in needed_by_any)
    return Usage(files, other_bytes)
