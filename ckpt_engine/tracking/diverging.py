"""What ends a run that has diverged: one error, and of several ranks the same on all of them."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from ckpt_engine.errors import CkptError, DivergedError, RanksError, WaitTimeoutError
from ckpt_engine.persist.job import ErrorRecord
from ckpt_engine.preempt.divergence import Divergence, earliest
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.tracking.engine import Engine
from ckpt_engine.tracking.halt import Halt
from ckpt_engine.tracking.rollback import Rollbacks
from ckpt_engine.tracking.verdict import Verdicts

LAST_SECONDS = 60.0
"""How long the end of a training waits for the ranks that have not judged their last losses."""
_NONE: dict[str, Any] = {"error": None, "remember": None}
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
        if self._verdicts.leads:
            return self._lead(self._verdicts, found)
        try:
            if self._rollbacks is not None and self._engine.memory:
                self._watch.flush()  # rank 0 reaches the writers of its own machine only
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
        except RanksError as err:
            self._log.error("what other ranks have seen is not known: %s", err)
        error, elsewhere = self._rule(found)
        try:
            verdicts.say({"error": asdict(ErrorRecord.of(error)), "remember": elsewhere})
            verdicts.stay()
        except RanksError as err:
            self._log.error("other ranks cannot be told how the run ends: %s", err)
        self._halt.diverged()
        return error

    def _follow(self, verdicts: Verdicts) -> DivergedError | None:
        """What rank 0 has found; None: nobody has diverged. Raises as `Verdicts.hear`."""
        said = verdicts.hear()
        if "ask" in said:
            assert self._rollbacks is not None
            said = verdicts.answer(said, self._rollbacks.holds(self._watch, self._halt.seconds_left))
        if said["remember"] is not None and self._rollbacks is not None:
            self._rollbacks.remember(said["remember"])
        verdicts.heard()
        if said["error"] is None:
            return None
        self._halt.diverged()
        error = ErrorRecord(**said["error"]).exception()
        assert isinstance(error, DivergedError)
        return error

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
