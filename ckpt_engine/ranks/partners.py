"""Which ranks keep what of each other's shares in memory, so that a lost machine's shares are on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks that one rank's writer has to do with.

    Args:
        keepers: who keeps its shares: its partner; or the other members of its parity group, as they follow it there.
        senders: whose shares it keeps.
    """

    keepers: tuple[int, ...]
    senders: tuple[int, ...]


def neighbours(rank: int, nodes: Sequence[str], parity: int = 0) -> Neighbours:
    """Who keeps what.

    Args:
        nodes: name of each rank's machine.
        parity: machines of a parity group; 0: each rank has one partner.

    Raises:
        ConfigError: the ranks are not on such machines; says how many are where.
    """
    if parity:
        group = group_of(rank, nodes, parity)
        if group is None:
            raise ConfigError(
                f"parity: {parity} needs as many ranks on each machine, and machines in groups of {parity}; "
                f"{_census(nodes)}",
                hint="give a number of machines that divides theirs, or remove it",
            )
        at = group.index(rank)
        others = group[at + 1 :] + group[:at]
        return Neighbours(others, others)
    partner = partner_of(rank, nodes)
    if partner is None:
        raise ConfigError(
            f"replicate needs ranks on several machines in equal numbers; {_census(nodes)}",
            hint="remove it, or start the job on more machines",
        )
    senders = tuple(one for one in range(len(nodes)) if partner_of(one, nodes) == rank)
    return Neighbours((partner,), senders)


def partner_of(rank: int, nodes: Sequence[str]) -> int | None:
    """Who keeps the shares of a rank, so that a lost machine's shares are on another one; None: that cannot be.

    Args:
        nodes: name of each rank's machine; ranks of one machine follow each other, as many on each.
    """
    each = nodes.count(nodes[rank])
    partner = (rank + each) % len(nodes)
    equal = all(nodes.count(node) == each for node in nodes)
    return partner if equal and nodes[partner] != nodes[rank] else None


def group_of(rank: int, nodes: Sequence[str], members: int) -> tuple[int, ...] | None:
    """The parity group of a rank: one rank on each of `members` machines; None: the machines cannot be divided so.

    Machines are taken in the order of their first ranks. The first ranks of `members` machines are a group, their
    second ranks are another one, and so on.

    Args:
        nodes: name of each rank's machine.
    """
    machines: dict[str, list[int]] = {}
    for one, node in enumerate(nodes):
        machines.setdefault(node, []).append(one)
    listed = list(machines.values())
    if len(listed) % members or len({len(ranks) for ranks in listed}) != 1:
        return None
    machine = list(machines).index(nodes[rank])
    place = machines[nodes[rank]].index(rank)
    first = machine // members * members
    return tuple(ranks[place] for ranks in listed[first : first + members])


def _census(nodes: Sequence[str]) -> str:
    counted = Counter(nodes)
    return f"there are {len(counted)}, with {', '.join(map(str, counted.values()))} ranks ({', '.join(counted)})"
