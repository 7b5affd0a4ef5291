"""Why a `fit` ends before its time, looked for at every boundary: somebody stops it, or its losses diverge."""

from __future__ import annotations

import logging

from ckpt_engine.data.torch_private import is_dead_worker
from ckpt_engine.errors import RanksError
from ckpt_engine.tracking.diverging import Diverging
from ckpt_engine.tracking.halt import Halt
from ckpt_engine.tracking.shared import SharedCadence
from ckpt_engine.tracking.together import Take
from lightning_ckpt.watches import Watches

_log = logging.getLogger("lightning_ckpt")


class Endings:
    """Training thread only.

    One process that has diverged ends at once. One of several ranks takes part in no snapshot from then on, tells the
    others, and ends with all of them: alone it would leave them in a collective.

    Args:
        watches: hear of stops, and judge losses.
        halt: stops the run.
        diverging: makes the error of a run that has diverged.
        take: takes a last snapshot.
    """

    def __init__(self, watches: Watches, halt: Halt, diverging: Diverging, take: Take) -> None:
        self._watches = watches
        self._halt = halt
        self._shared = halt.shared
        self._diverging = diverging
        self._take = take
        self._judged_the_end = False

    def boundary(self, step: int, *, asked: bool) -> None:
        """Step `step` is complete, and nothing was decided yet of what comes after it.

        Args:
            asked: somebody wants a snapshot.

        Raises:
            SIGTERMException, KeyboardInterrupt: a stop.
            DivergedError: all ranks end here. Where they are stopped as well they end for that: see `Halt.end_of`.
        """
        stop = self._watches.boundary(step)
        if self._shared is None:
            if stop is not None:
                raise self._halt.now(stop, self._take)
            return
        try:
            stop = self._shared.stop(step, stop, asked=asked, fits=self._halt.fits)
            if stop is None and self._shared.diverged is None:
                self._judge(self._shared, due=self._shared.due)
        except RanksError as err:
            if (own := self._watches.divergence) is not None:
                raise self._diverging.cut_off(own, err) from err
            raise
        if self._shared.diverged is not None:
            raise self._halt.end_of(self._diverging.together(self._shared.diverged, self._watches.divergence))
        if stop is not None:
            raise self._halt.together(stop, self._take)

    def vetoed(self, *, due: bool) -> bool:
        """Whether the losses speak against a snapshot now; `due`: one would be taken.

        Raises:
            DivergedError: this process, which is alone, has diverged.
        """
        vetoed = self._watches.vetoed(due=due)
        if self._shared is None and (found := self._watches.divergence) is not None:
            raise self._diverging.error(found)
        return vetoed

    def no_batch(self, error: Exception, where: str | None) -> None:
        """A step has failed.

        Args:
            where: it had not begun, as no batch came: see `Together.all_stuck`. None: it may have.

        Raises:
            SIGTERMException, KeyboardInterrupt: a stop has ended the loader's workers too, and takes effect here.
            DivergedError: this rank has diverged, and waits for others that may be gone.
        """
        stop = self._watches.preemption.stop
        if self._halt.done:
            return
        if stop is not None and where is not None and is_dead_worker(error):
            if self._shared is not None and not self._shared.stop_stuck(stop, where):
                return
            _log.warning("%s: no batch came: %s", stop.notice.who, error)
            end = self._halt.now if self._shared is None else self._halt.together
            raise end(stop, self._take) from error
        if self._shared is not None and (own := self._watches.divergence) is not None:
            raise self._diverging.cut_off(own, error) from error

    def training_over(self, step: int) -> None:
        """Training has come to its end by itself, before its final snapshot. Of all ranks at once; idempotent.

        Raises:
            DivergedError: the last losses say so, of several ranks those of any of them.
            SIGTERMException, KeyboardInterrupt: and somebody stops the run.
        """
        if self._judged_the_end or not self._watches.guards:
            return
        self._judged_the_end = True
        if self._shared is None:
            self._watches.vetoed(due=True)
        else:
            try:
                self._judge(self._shared, due=True)
            except RanksError as err:
                _log.error("other ranks cannot be told that this one has diverged: %s", err)
        error = self._diverging.at_the_end(self._watches.divergence, step)
        if error is not None:
            raise self._halt.end_of(error)

    def _judge(self, shared: SharedCadence, *, due: bool) -> None:
        self._watches.vetoed(due=due)
        if (found := self._watches.divergence) is not None:
            shared.tell(found)
