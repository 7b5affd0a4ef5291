"""Makes the share of a lost machine from the shares and the parity of the other members of its group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ckpt_engine.errors import CorruptError
from ckpt_engine.persist.mapping import map_shared
from ckpt_engine.persist.parity import restore_chunk
from ckpt_engine.persist.peer import Share, verify
from ckpt_engine.persist.wire import Received
from ckpt_engine.restore.memory import own_memory


def rebuild(
    lost: int,
    group: Sequence[int],
    shares: Mapping[int, Received],
    parity_of: Callable[[int], Received],
    beside: int,
) -> Received:
    """The lost share, as its writer would have given it; every byte has been compared with its digest.

    Args:
        lost: whose share it is.
        group: the members as they follow each other.
        shares: those of all other members.
        parity_of: what a member keeps; its descriptors are closed here, one member after the other.
        beside: see `own_memory`.

    Raises:
        OSError, CkptError, LookupError, TypeError, ValueError: it cannot be made.
    """
    images = {rank: _image(shares[rank]) for rank in group if rank != lost}
    share: Share | None = None
    out = memoryview(b"")
    try:
        for keeper in images:
            parity = parity_of(keeper)
            try:
                if share is None:
                    said = next(one for one in parity.body["shares"] if one["rank"] == lost)
                    fd, out = own_memory(int(said["nbytes"]), beside)
                    share = Share.told(said, fd)
                restore_chunk(out, lost, keeper, group, _image(parity), images)
            finally:
                for one in parity.fds:
                    os.close(one)
        if share is None:
            raise LookupError(f"nobody has parity of rank {lost}")
        verify(share, out)
    except BaseException:
        if share is not None:
            os.close(share.fd)
        raise
    return Received({**share.described(), "manifest": share.part, "beat": None, "durable": False}, (share.fd,))


def _image(reply: Received) -> memoryview:
    fd, nbytes = reply.fds[0], int(reply.body["nbytes"])
    # Reading beyond the end of a shared file kills the process (SIGBUS), so trust the file, not the message.
    if os.fstat(fd).st_size < nbytes:
        raise CorruptError(f"the memory of a share has {os.fstat(fd).st_size} bytes instead of {nbytes}")
    return memoryview(map_shared(fd, max(1, nbytes), writable=False)).cast("B")[:nbytes]
