"""The messages of the writer protocol.

To the writer, in this order:

| kind       | carries                                   | meaning |
|---|---|---|
| `start`    | `config`, `path`                          | first message; answered by `started` or `refused` |
| `arena`    | `slot`, `gone`, `layout`, `keys`, `trees`, perhaps one file descriptor | what later jobs refer to |
| `persist`  | `job`                                     | a job in a slot that was sent before |
| `hold`     | `job`                                     | the same, to be kept in memory until a newer job comes |
| `pulse`    | one file descriptor                       | where the trainer says how far it is, see `pulse` |
| `rows`     | `name`, `about`, one file descriptor      | where the trainer records its steps, see `rows.Ring` |
| `cancel`   | `snapshot`, `why`                         | this rank has no part in that snapshot of all ranks |
| `partner`  | `addresses`, `keepers`, `senders`, `moved` | the writers of other machines, see `peers.Peers.meet` |
| `close`    | `failed`, `why`                           | finish everything, then exit |
| `leave`    | `failed`, `why`                           | the same, but for ranks that failed: see `process` |

To the trainer: perhaps events (whom it waits for, what the tier has), then `started` with `first_seq` and `history`
(see `job.History`), or `refused` with `error` (the writer then exits); per job `event`s, one `done`, perhaps
events of the retention that follows. Jobs are done in the order they were sent. A `done` may say that
a call that hangs keeps its slot: then a `freed` with the `slot` follows, perhaps never. Nothing is sent after
`refused`. A `request` with `what` and `who` may come at any time: what somebody asked the trainer for from outside.
Else nothing but answers to jobs is sent after `started` with one tier that does not hang. Otherwise events come at any
time, and after `close` perhaps `copying`, as soon as only further tiers or hooks want something, and again, with the
text of what it `waits` for and how many `seconds`, if that takes long; then one `closed` with the text of what is
`left`, as soon as nothing is left to wait for: the writer then continues alone. It is `said` where that is no more than
what `copying` says, and nothing is wrong with it; `copies` are for the next run as well.

With replication or parity `started` has a `port`, and rank 0 learns by `mirrored` which `snapshot` all keepers have.

An `arena` has a new `slot`, its number and bytes, which takes the place of one with this number; None: all are known.
No later job names slots that are `gone`. `layout` is of the bytes in all slots, `keys` are the top-level keys in the
state's order, `trees` the skeletons of some of them; what is None, empty or left out is as before.

What a job names is settled when the writer receives it, not when it does it. A `hold` is never answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Body = dict[str, Any]

Kind = StrEnum(
    "Kind",
    "START ARENA PERSIST HOLD CANCEL PULSE ROWS PARTNER CLOSE LEAVE "
    "STARTED REFUSED EVENT DONE FREED MIRRORED COPYING CLOSED REQUEST",
)
"""The kinds of messages: first those to the writer, then those to the trainer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a request of `control`, and the descriptors that go with it, which are closed when it is sent."""

    body: Body
    fds: Sequence[int] = ()


def nothing(why: str) -> Reply:
    """The reply to who asks for a snapshot that is not to be had here."""
    return Reply({"snapshot": None, "why": why})


Answer = Callable[[Body], Reply | None]
"""What to reply to a request; None: not known yet, to be asked again. Must return at once."""
