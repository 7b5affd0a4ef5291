"""How several ranks whose run has diverged end with one error: each tells what it has seen, and rank 0 says the rest.

Everything is said through the ranks' store. Nothing here is said or asked before some rank has seen a divergence, but
once at the end of a training with a guard. Every wait has an end, and signals are handled while it lasts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ckpt_engine.errors import WaitTimeoutError
from ckpt_engine.preempt.divergence import Divergence
from ckpt_engine.preempt.notice import Stop, StopNotice
from ckpt_engine.ranks.world import Ranks, Store

TURN_SECONDS = 0.1
"""Between two looks for what another rank says: handlers of signals run there, and none while the store waits."""
HEAR_SECONDS = 180.0
"""Longer than rank 0 takes to find where to go on: see `rollback`."""
HEARD_SECONDS = 10.0
"""How long rank 0 stays for those that have not heard yet."""
FLUSH_SECONDS = 20.0
"""How long it waits for those that ask the writers of their machine."""
_SEEN = "diverged"
_THERE = "there"
_VERDICT = "verdict"
_HOLDS = "holds"
_HEARD = "heard"
FLUSHED = "flushed"

Patience = Callable[[float], float]
"""Asked again and again: how much of so many seconds may be waited. A stop, or a second Ctrl-C, leaves less."""


def hear(
    store: Store, key: str, seconds: float, patience: Patience = lambda seconds: seconds, other_than: str | None = None
) -> str:
    """What another rank says; a Ctrl-C ends the wait, unlike one in the store.

    Args:
        patience: see `Patience`.
        other_than: what was heard already.

    Raises:
        WaitTimeoutError: nobody has said it in time. It is looked for once at least.
        RanksError: the store is gone.
    """
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while (text := store.get(key)) is None or text == other_than:
        left = patience(deadline - time.monotonic())
        if left <= 0.0:
            raise WaitTimeoutError(f"no rank has said {key!r} within {seconds:.0f} s")
        pause.wait(min(TURN_SECONDS, left))
    return text


def stop_to_json(stop: Stop, at: float) -> dict[str, Any]:
    """A stop as other ranks understand it, whose clocks are others.

    Args:
        at: monotonic seconds from which the time left is counted.
    """
    return {
        "stop": stop.notice.who,
        "left_seconds": max(0.0, stop.deadline - at),
        "exit_code": stop.notice.exit_code,
        "interrupts": stop.notice.interrupts,
    }


def stop_of_json(row: dict[str, Any], since: float) -> Stop:
    """What another rank has said with `stop_to_json`, its time left counted from `since` on."""
    notice = StopNotice(row["stop"], since, float(row["left_seconds"]), row["exit_code"], row["interrupts"])
    return Stop(notice, since + float(row["left_seconds"]))


class Verdicts:
    """One rank's side. Training thread only. Everything raises `RanksError` if the store is gone.

    Args:
        ranks: all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._store = ranks, ranks.store
        self.leads = ranks.rank == 0
        self.patience: Patience = lambda seconds: seconds
        """Set by whoever knows of stops."""
        self.stop: Callable[[], Stop | None] = lambda: None
        """What this rank knows of a stop; set as well."""
        self._told_stop = False

    def tell(self, found: Divergence) -> None:
        """This rank has seen a divergence."""
        self._store.set(f"{_SEEN}/{self._ranks.rank}", json.dumps(asdict(found)))

    def come(self) -> None:
        """This rank, not rank 0, has told what it has seen, and waits for the verdict; also tells of a stop."""
        self._tell_stop()
        if not self._told_stop:
            self._store.set(f"{_THERE}/{self._ranks.rank}", "")

    def _tell_stop(self) -> None:
        """Also one that comes while this rank waits already."""
        if not self._told_stop and (stop := self.stop()) is not None:
            self._told_stop = True
            text = json.dumps(stop_to_json(stop, time.monotonic()))
            self._store.set(f"{_THERE}/{self._ranks.rank}", text)

    def hear(self, other_than: str | None = None) -> dict[str, Any]:
        """The verdict, or a question of rank 0 before it: one entry, `ask`.

        Args:
            other_than: the question that was heard already.

        Raises:
            WaitTimeoutError: rank 0 is silent.
        """

        def patience(seconds: float) -> float:
            self._tell_stop()
            return self.patience(seconds)

        found: dict[str, Any] = json.loads(hear(self._store, _VERDICT, HEAR_SECONDS, patience, other_than))
        return found

    def answer(self, question: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Tell rank 0 what it has asked for; the verdict, or its next question. Raises as `hear`."""
        self._store.set(f"{question['ask']}/{self._ranks.rank}", json.dumps(answer))
        return self.hear(json.dumps(question))

    def heard(self) -> None:
        """This rank knows the verdict."""
        self._store.set(f"{_HEARD}/{self._ranks.rank}", "")

    # ---- rank 0

    def seen(self) -> list[Divergence]:
        """What other ranks have told by now."""
        found = [self._store.get(f"{_SEEN}/{rank}") for rank in range(1, self._ranks.size)]
        return [Divergence(**json.loads(text)) for text in found if text is not None]

    def wait_for_all(self, seconds: float) -> None:
        """Until all others have come; no longer than that."""
        self._said_by_others(_THERE, seconds)

    def stops(self) -> list[Stop]:
        """What those that have come know of stops, of which this rank may know nothing."""
        found = [self._store.get(f"{_THERE}/{rank}") for rank in range(1, self._ranks.size)]
        return [stop_of_json(json.loads(text), time.monotonic()) for text in found if text]

    def ask_to_flush(self) -> None:
        """All others ask the writers of their machines: rank 0 reaches those of its own only."""
        self.say({"ask": FLUSHED})
        self._said_by_others(FLUSHED, FLUSH_SECONDS)

    def ask(self, seconds: float) -> list[dict[str, Any]]:
        """What other ranks hold, of those that answer in time."""
        self.say({"ask": _HOLDS})
        return [json.loads(text) for text in self._said_by_others(_HOLDS, seconds)]

    def say(self, verdict: dict[str, Any]) -> None:
        """All others may hear it now."""
        self._store.set(_VERDICT, json.dumps(verdict))

    def stay(self) -> None:
        """Until all others have heard it; not long."""
        self._said_by_others(_HEARD, HEARD_SECONDS)

    def _said_by_others(self, key: str, seconds: float) -> list[str]:
        deadline, said = time.monotonic() + seconds, []
        for rank in range(1, self._ranks.size):
            try:
                said.append(hear(self._store, f"{key}/{rank}", deadline - time.monotonic(), self.patience))
            except WaitTimeoutError:
                continue  # those that come after it are looked for once more
        return said
