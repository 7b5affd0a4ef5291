"""The messages of the writer protocol: their kinds, what each carries, and who sends them when.

To the writer, in this order:

| kind       | carries                                   | meaning |
|---|---|---|
| `start`    | `config`, `path`                          | first message; answered by `started` or `refused` |
| `slot`     | `slot`, `nbytes`, one file descriptor     | an arena slot; the same number again replaces it |
| `layout`   | `layout`                                  | see `job.Layout` |
| `skeleton` | `id`, `tree`                              | see `skeleton.Skeleton` |
| `persist`  | `job`                                     | a job whose slot, layout and skeletons were sent before |
| `forget`   | `slots`, `layouts`, `skeletons`           | no later job names these |
| `close`    |                                           | finish everything, then exit |

To the trainer: `started`, or `refused` with `error` (the writer then exits); per job `event`s, one `done`, perhaps
events of the retention that follows, one `settled`. Jobs are done in the order they were sent. Nothing is sent after
`refused`. With one tier nothing but answers to jobs is sent after `started`. With several, events of further tiers come
at any time, and after `close` one `closed` with the `unfinished` ones, as soon as nothing is left to wait for: the
writer then goes on by itself.
"""

from __future__ import annotations

from ckpt_engine.observe import events
from ckpt_engine.persist.wire import Body

START = "start"
SLOT = "slot"
LAYOUT = "layout"
SKELETON = "skeleton"
PERSIST = "persist"
FORGET = "forget"
CLOSE = "close"

STARTED = "started"
REFUSED = "refused"
EVENT = "event"
DONE = "done"
SETTLED = "settled"
CLOSED = "closed"


def event(found: events.Event) -> Body:
    """The message that carries an event."""
    return {"kind": EVENT, "event": events.to_json(found)}
