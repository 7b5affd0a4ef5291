"""How the shares of a parity group are cut and combined, so that any one of them can be made from the others.

As RAID 5 does it: with g members a share is cut into g - 1 chunks, one for each other member, and a member keeps the
XOR of the chunks that it got. Members are counted as they follow each other in the group, in a ring: chunk j of a
member is for the one j + 1 places behind it. Shorter chunks count as if zeros followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def chunk(nbytes: int, members: int, number: int) -> slice:
    """The bytes of a share of `nbytes` bytes that are its chunk `number`, from 0 to `members` - 2; perhaps none."""
    each = -(-nbytes // (members - 1))
    return slice(min(nbytes, number * each), min(nbytes, (number + 1) * each))


def number_of(group: Sequence[int], sender: int, keeper: int) -> int:
    """Which chunk of `sender` is for `keeper`."""
    return (group.index(keeper) - group.index(sender) - 1) % len(group)


def xor_into(out: memoryview, data: memoryview) -> None:
    """`out ^= data`, over the bytes that both have. Lets go of the GIL."""
    import numpy as np  # most writers never need it

    nbytes = min(out.nbytes, data.nbytes)
    if not nbytes:
        return
    target = np.frombuffer(out, np.uint8, nbytes)
    np.bitwise_xor(target, np.frombuffer(data, np.uint8, nbytes), out=target)


def restore_chunk(
    out: memoryview, lost: int, keeper: int, group: Sequence[int], parity: memoryview, shares: Mapping[int, memoryview]
) -> None:
    """Make the chunk of a lost share that `keeper` got.

    Args:
        out: the share's bytes; only those of the chunk are written.
        lost: whose share it is.
        group: all members, as they follow each other.
        parity: what `keeper` keeps.
        shares: those of all other members.
    """
    target = out[chunk(out.nbytes, len(group), number_of(group, lost, keeper))]
    target[:] = parity[: target.nbytes]
    for member in group:
        if member not in (lost, keeper):
            share = shares[member]
            xor_into(target, share[chunk(share.nbytes, len(group), number_of(group, member, keeper))])
