"""What ends a run that has diverged: one error, and of several ranks the same on all of them."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from ckpt_engine.errors import CkptError, ConfigError, DivergedError, RanksError, WaitTimeoutError
from ckpt_engine.persist.job import ErrorRecord
from ckpt_engine.preempt.divergence import Divergence, earliest
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.halt import Halt
from ckpt_engine.tracking.rollback import Rollbacks
from ckpt_engine.tracking.verdict import FLUSHED, HEARD_SECONDS, Verdicts, stop_of_json, stop_to_json

LAST_SECONDS = 60.0
"""How long the end of a training waits for the ranks that have not judged their last losses."""
_NONE: dict[str, Any] = {"error": None, "remember": None, "stop": None}
"""The verdict where no rank has diverged."""


class Diverging:
    """Of one process, or of one of several ranks. Training thread only.

    Args:
        engine: of the run.
        watch: knows what is durable.
        halt: ends the process after rank 0's.
        rollbacks: where the next start is to go back.
        log: of the adapter.
    """

    def __init__(
        self, engine: Engine, watch: PreemptionWatch, halt: Halt, rollbacks: Rollbacks | None, log: logging.Logger
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._halt = halt
        self._rollbacks = rollbacks
        self._log = log
        self._verdicts: Verdicts | None = halt.shared.verdicts if halt.shared is not None else None

    def error(self, found: Divergence) -> DivergedError:
        """This process is alone."""
        return self._rule(found)[0]

    def together(self, decided: Divergence, own: Divergence | None) -> DivergedError:
        """All ranks are at the boundary at which they have agreed to end.

        Args:
            decided: what rank 0 knew by then.
            own: what this rank has seen.

        Raises:
            KeyboardInterrupt: another Ctrl-C.
        """
        assert self._verdicts is not None
        found = earliest((decided, own))
        assert found is not None
        try:
            if self._verdicts.leads:
                self._verdicts.wait_for_all(HEARD_SECONDS)  # they may know of a stop
        except RanksError as err:
            self._log.error("other ranks cannot be waited for: %s", err)
        if self._verdicts.leads:
            return self._lead(self._verdicts, found)
        try:
            self._verdicts.come()
            error = self._follow(self._verdicts)
        except (WaitTimeoutError, RanksError) as err:
            return self._silent(found, err)
        return error or self._silent(found, None)

    def at_the_end(self, own: Divergence | None, step: int) -> DivergedError | None:
        """Training has come to its end by itself: no boundary is left at which ranks could end together.

        They meet here for once, for a minute at most. A rank that others did not wait for ends alone, and its share of
        the final snapshot is missing.

        Args:
            own: what this rank has seen.
            step: of the final snapshot.

        Returns:
            None: no rank has diverged.
        """
        verdicts = self._verdicts
        if verdicts is None:
            return None if own is None else self.error(own)
        try:
            if verdicts.leads:
                verdicts.wait_for_all(LAST_SECONDS)
                found = earliest((own, *verdicts.seen()))
                if found is not None:
                    return self._lead(verdicts, found)
                verdicts.say(_NONE)
                verdicts.stay()  # whoever still looks for it finds no store where this process is gone
                return None
            verdicts.come()
            error = self._follow(verdicts)
        except (WaitTimeoutError, RanksError) as err:
            if own is None:
                self._log.warning("whether other ranks have diverged is not known: %s", err)
                return None
            error = self._silent(own, err)
        else:
            if error is None and own is not None:
                error = self._silent(own, None)
        if own is not None and not self._halt.done:
            self._engine.miss(step, "its loss has diverged")  # others may take it
        return error

    def cut_off(self, own: Divergence, error: Exception) -> DivergedError:
        """This rank has seen a divergence, and before all could end together something else has ended the step."""
        text = f"{own.text()}; before all ranks could end for it, this one failed: {error}"
        return DivergedError(text, hint=self._on())

    # ---- one of several ranks

    def _lead(self, verdicts: Verdicts, found: Divergence) -> DivergedError:
        try:
            found = earliest((found, *verdicts.seen())) or found
            self._take_over(verdicts)
            if self._rollbacks is not None and self._engine.memory:
                verdicts.ask_to_flush()
        except RanksError as err:
            self._log.error("what other ranks have seen is not known: %s", err)
        error, elsewhere = self._rule(found)
        try:
            self._take_over(verdicts)
            stop = self._halt.stop
            said = None if stop is None else stop_to_json(stop, time.monotonic())
            verdicts.say({"error": asdict(ErrorRecord.of(error)), "remember": elsewhere, "stop": said})
            verdicts.stay()
        except RanksError as err:
            self._log.error("other ranks cannot be told how the run ends: %s", err)
        self._halt.diverged()
        return error

    def _take_over(self, verdicts: Verdicts) -> None:
        """A stop that is known on any rank is one of all: that which leaves the least time."""
        own = self._halt.stop
        stops = [*verdicts.stops(), *([] if own is None else [own])]
        if stops:
            self._halt.stop_too(min(stops, key=lambda one: one.deadline))

    def _follow(self, verdicts: Verdicts) -> DivergedError | None:
        """What rank 0 has found; None: nobody has diverged. Raises as `Verdicts.hear`."""
        said = verdicts.hear()
        while "ask" in said:
            said = verdicts.answer(said, self._answer(said))
        if said["remember"] is not None and self._rollbacks is not None:
            self._rollbacks.remember(said["remember"])
        verdicts.heard()
        if said["error"] is None:
            return None
        if said["stop"] is not None:
            self._halt.stop_too(stop_of_json(said["stop"], time.monotonic()))
        self._halt.diverged()
        error = ErrorRecord(**said["error"]).exception()
        assert isinstance(error, DivergedError)
        return error

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._rollbacks is not None
        if question["ask"] == FLUSHED:
            if self._engine.memory:
                self._watch.flush()
            return {}
        return self._rollbacks.holds(self._watch, self._halt.seconds_left)

    def _silent(self, found: Divergence, why: CkptError | None) -> DivergedError:
        said = "rank 0 did not wait for this one" if why is None else f"rank 0 has not said how to go on: {why.message}"
        return DivergedError(f"{found.text()}; {said}", hint=self._on())

    def _on(self) -> str:
        return f"{self._watch.durable()}; ckpt_path='auto' goes on there"

    def _rule(self, found: Divergence) -> tuple[DivergedError, dict[str, Any] | None]:
        if self._rollbacks is not None:
            return self._rollbacks.error(found, self._watch, self._halt.seconds_left, self._verdicts)
        hint = f"{self._watch.durable()}, from before; ckpt_path='auto' goes on there, with the same batches"
        return DivergedError(found.text(), hint=hint), None


def require_alike(engine: Engine) -> None:
    """Of several ranks: all have the same `guard` and `rollback`. Asked of all at once, before anything else is.

    A rank that judges no losses would not come to the meetings of the others.

    Raises:
        ConfigError: on all ranks.
    """
    config = engine.config

    def options() -> dict[str, Any]:
        rollback = None if config.rollback is None else config.rollback.model_dump(mode="json")
        return {"guard": config.guard, "rollback": rollback}

    def compare(said: list[dict[str, Any] | None]) -> None:
        for rank, one in enumerate(said):
            if one is None or said[0] is None:
                continue  # a rank that is late is missed by what comes next
            for name, value in said[0].items():
                if one[name] != value:
                    raise ConfigError(
                        f"{name} differs between ranks: {_shown(value)} on rank 0, {_shown(one[name])} on rank {rank}",
                        hint="give all ranks the same options",
                    )

    engine.meet(options, compare)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
