"""The messages of the writer protocol: their kinds, what each carries, and who sends them when.

To the writer, in this order:

| kind       | carries                                   | meaning |
|---|---|---|
| `start`    | `config`, `path`                          | first message; answered by `started` or `refused` |
| `slot`     | `slot`, `nbytes`, one file descriptor     | an arena slot; the same number again replaces it |
| `layout`   | `layout`                                  | see `job.Layout` |
| `skeleton` | `id`, `tree`                              | see `skeleton.Skeleton` |
| `persist`  | `job`                                     | a job whose slot, layout and skeletons were sent before |
| `hold`     | `job`                                     | the same, to be kept in memory until a newer job comes |
| `pulse`    | one file descriptor                       | where the trainer says how far it is, see `pulse` |
| `cancel`   | `snapshot`, `why`                         | this rank has no part in that snapshot of all ranks |
| `partner`  | `addresses`, `keepers`, `senders`, `moved` | the writers of other machines, see `peers.Peers.meet` |
| `forget`   | `slots`, `layouts`, `skeletons`           | no later job names these |
| `close`    |                                           | finish everything, then exit |
| `leave`    |                                           | the same, but for ranks that failed: see `process` |

To the trainer: perhaps events (whom it waits for, what the tier has), then `started` with `first_seq` and `history`
(see `job.History`), or `refused` with `error` (the writer then exits); per job `event`s, one `done`, perhaps
events of the retention that follows, one `settled`. Jobs are done in the order they were sent. A `done` may say that
its slot is held by a call that hangs: then a `freed` with the `slot` follows, perhaps never. Nothing is sent after
`refused`. A `request` with `what` and `who` may come at any time: what somebody asked the trainer for from outside.
Else nothing but answers to jobs is sent after `started` with one tier that does not hang. Otherwise events come at any
time, and after `close` perhaps `copying`, as soon as only further tiers want something, and again, with the tiers that
`lack` something as texts and how many `seconds` they are waited for, if that takes long; then one `closed` with the
`unfinished` tiers, each a text, as soon as nothing is left to wait for: the writer then goes on by itself. It is `said`
where they are no others than those of `copying`, and nothing is wrong with them.

With replication or parity `started` has a `port`, and rank 0 is told by `mirrored` which `snapshot` all keepers have.

What a job names is settled when the writer receives it, not when it does it. A `hold` is never answered.
"""

from __future__ import annotations

from ckpt_engine.observe import events
from ckpt_engine.persist.wire import Body

START = "start"
SLOT = "slot"
LAYOUT = "layout"
SKELETON = "skeleton"
PERSIST = "persist"
HOLD = "hold"
CANCEL = "cancel"
PULSE = "pulse"
PARTNER = "partner"
FORGET = "forget"
CLOSE = "close"
LEAVE = "leave"

STARTED = "started"
REFUSED = "refused"
EVENT = "event"
DONE = "done"
SETTLED = "settled"
FREED = "freed"
MIRRORED = "mirrored"
COPYING = "copying"
CLOSED = "closed"
REQUEST = "request"


def event(found: events.Event) -> Body:
    """The message that carries an event."""
    return {"kind": EVENT, "event": events.to_json(found)}
