"""Whether a lock on a file keeps out the other machines that mount its file system."""

from __future__ import annotations

from pathlib import Path

from ckpt_engine.store.storage.base import Folder, Storage

_UNSHARED = frozenset(
    {"9p", "cifs", "smb3", "virtiofs", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys"}
)
"""Types on which a lock holds on this machine only, or may."""
_UNSHARED_OPTIONS = frozenset({"local_lock=all", "local_lock=flock", "nolock", "localflock", "nobrl"})


def locks_are_shared(path: str, mounts: str | None = None) -> bool:
    """Whether a lock (`flock`) keeps out other machines that mount the file system of `path`.

    True on local disks, NFS with its normal options and cluster file systems; also where the system does not tell.

    Args:
        mounts: the text of `/proc/self/mountinfo`.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return True
    best, shared = "", True
    resolved = str(Path(path).resolve())
    for line in mounts.splitlines():
        mounted, _, source = line.partition(" - ")
        fields, tail = mounted.split(), source.split()
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            options = {*fields[5].split(","), *tail[2].split(",")}
            best, shared = point, tail[0] not in _UNSHARED and not options & _UNSHARED_OPTIONS
    return shared


def lockable(storage: Storage) -> Folder | None:
    """The folder of `storage`, if a lock there keeps out everybody."""
    folder = storage.capabilities.locks
    return folder if folder is not None and locks_are_shared(folder.root) else None
