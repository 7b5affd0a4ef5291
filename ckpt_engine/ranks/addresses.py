"""By which address of this machine others reach it: that of the interface through which it reaches them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

_ANY_PORT = 9
_LOOPBACK = "127.0.0.1"


def towards(host: str) -> str | None:
    """The address of this machine in what it would send to `host`; None: it cannot send there. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, _ANY_PORT))
            return str(sock.getsockname()[0])
        except OSError:
            return None


def towards_others(mine: str, others: Sequence[str]) -> str:
    """Where this machine listens for the others.

    Args:
        mine: its address, or its name where that is all that it knows; a name may mean the loopback interface here.
        others: addresses or names of other machines.
    """
    if _is_address(mine):
        return mine
    for other in sorted(others, key=_is_address, reverse=True):
        found = towards(other)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return found
    return _LOOPBACK if towards(mine) is None else mine


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
