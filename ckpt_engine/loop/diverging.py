"""Ends a run that has diverged with one error, the same on all ranks, and tells the next start where to go back to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from ckpt_engine.copy.job import ErrorRecord
from ckpt_engine.engine import Engine
from ckpt_engine.errors import (
    CkptError,
    ConfigError,
    CorruptError,
    DivergedError,
    RanksError,
    RollbackRequestedError,
    WaitTimeoutError,
)
from ckpt_engine.loop.halt import Halt
from ckpt_engine.loop.rank_decisions import (
    FLUSH_SECONDS,
    FLUSHED,
    HEARD_SECONDS,
    HOLDS,
    Patience,
    Verdicts,
    stop_of_json,
    stop_to_json,
)
from ckpt_engine.preempt.divergence import (
    Divergence,
    RollbackRecord,
    earliest,
    plan_rollback,
    read_rollback,
    write_rollback,
)
from ckpt_engine.preempt.watch import PreemptionWatch
from ckpt_engine.store.manifest import SnapshotInfo
from ckpt_engine.store.storage import open_storage

LAST_SECONDS = 60.0
"""How long the end of a training waits for the ranks that have not judged their last losses."""
_NONE: dict[str, Any] = {"error": None, "remember": None, "stop": None}
"""The verdict where no rank has diverged."""
DURABLE_SECONDS = 60.0
_PLACES_SECONDS = DURABLE_SECONDS + 15.0
"""How long rank 0 waits for what other nodes have on disks of their own."""


class Diverging:
    """Of one process, or of one of several ranks. Training thread only.

    Args:
        engine: of the run.
        halt: ends the process after rank 0's; its watch knows what is durable.
        rollbacks: where the next start is to go back.
        log: of the adapter.
    """

    def __init__(self, engine: Engine, halt: Halt, rollbacks: Rollbacks | None, log: logging.Logger) -> None:
        self._engine = engine
        self._halt = halt
        self._rollbacks = rollbacks
        self._log = log
        self._verdicts: Verdicts | None = halt.shared.together.verdicts if halt.shared is not None else None

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
        found = earliest((decided, own)) or decided
        if self._verdicts.leads:
            try:
                self._verdicts.wait_for_all(HEARD_SECONDS)  # they may know of a stop
            except RanksError as err:
                self._log.error("other ranks cannot be waited for: %s", err)
            return self._lead(self._verdicts, found)
        try:
            return self._follow(self._verdicts) or self._silent(found, None)
        except (WaitTimeoutError, RanksError) as err:
            return self._silent(found, err)

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
                verdicts.stay()  # a rank that still looks for it finds no store where this process is gone
                return None
            error = self._follow(verdicts) or (None if own is None else self._silent(own, None))
        except (WaitTimeoutError, RanksError) as err:
            if own is None:
                self._log.warning("whether other ranks have diverged is not known: %s", err)
                return None
            error = self._silent(own, err)
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
                verdicts.ask(FLUSHED, FLUSH_SECONDS)
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
            self._log.error("the other ranks do not learn how the run ends: %s", err)
        self._halt.diverged()
        return error

    def _take_over(self, verdicts: Verdicts) -> None:
        """A stop that is known on any rank is one of all: that which leaves the least time."""
        own = self._halt.stop
        stops = [*verdicts.stops(), *([] if own is None else [own])]
        if stops:
            self._halt.stop_too(min(stops, key=lambda one: one.deadline))

    def _follow(self, verdicts: Verdicts) -> DivergedError | None:
        """What rank 0 has found; None: no rank has diverged. Raises as `Verdicts.hear`."""
        verdicts.come()
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
                self._halt.watch.run.flush.begin()
            return {}
        return self._rollbacks.holds(self._halt.watch, self._halt.seconds_left)

    def _silent(self, found: Divergence, why: CkptError | None) -> DivergedError:
        said = (
            "rank 0 did not wait for this one"
            if why is None
            else f"rank 0 has not reported how to continue: {why.message}"
        )
        return DivergedError(f"{found.text()}; {said}", hint=self._on())

    def _on(self) -> str:
        return f"{self._halt.watch.run.durable()}; ckpt_path='auto' resumes there"

    def _rule(self, found: Divergence) -> tuple[DivergedError, dict[str, Any] | None]:
        if self._rollbacks is not None:
            return self._rollbacks.error(found, self._halt.watch, self._halt.seconds_left, self._verdicts)
        hint = f"{self._halt.watch.run.durable()}, from before; ckpt_path='auto' resumes there, with the same batches"
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


class Rollbacks:
    """Those of one run. Training thread only.

    Args:
        engine: of the run, whose options have `rollback`.
        log: of the adapter.
        replicas: ranks that have samples of their own.
        in_whole_steps: so many batches, or a few more, that no optimizer step is cut in two.

    Raises:
        StorageError: a place that no storage serves.
    """

    def __init__(
        self,
        engine: Engine,
        log: logging.Logger,
        replicas: int = 1,
        in_whole_steps: Callable[[int], int] = lambda batches: batches,
    ) -> None:
        assert engine.config.rollback is not None
        self._engine = engine
        self._options = engine.config.rollback
        self.replicas = replicas
        self._in_whole_steps = in_whole_steps
        nearest = engine.config.tiers[0]
        self._storage = open_storage(nearest.url, nearest.for_storage())
        self._may_differ = engine.ranks is not None and nearest.is_folder
        """Other ranks may have another folder there."""
        self._log = log
        self.back: RollbackRecord | None = None
        """What `pending` has found, as this start does it."""

    # ---- at a start

    def pending(self, newest: str) -> RollbackRecord | None:
        """The rollback that a start has to do whose newest snapshot is `newest`; the same on all ranks.

        Rank 0 reads it for all. Where nodes have disks of their own each has it, and rank 0 may be on another one now.

        Raises:
            CorruptError, StorageError: it is not known.
        """

        def read() -> dict[str, Any] | None:
            found = self._read()
            return None if found is None else asdict(found)

        def known(rows: list[dict[str, Any] | None]) -> dict[str, Any] | None:
            return _last([row for row in rows if row is not None and row["newest"] == newest]) or _last(rows)

        row = self._engine.meet(read, known) if self._may_differ else self._engine.agree(read)
        found = None if row is None else msgspec.convert(row, RollbackRecord)
        # Only if nothing was saved since that was decided.
        pending = found if found is not None and found.newest == newest else None
        self.back = pending and pending.on(self.replicas, self._in_whole_steps)
        return pending

    # ---- at the end

    def error(
        self, found: Divergence, watch: PreemptionWatch, patience: Patience, verdicts: Verdicts | None = None
    ) -> tuple[DivergedError, dict[str, Any] | None]:
        """What ends training: a `RollbackRequestedError` if the next start goes back, else a `DivergedError`.

        Args:
            patience: of a run that somebody may want to end at once.
            verdicts: of rank 0, where there are several.

        Returns:
            The error, and what other nodes have to `remember`, if they have disks of their own.
        """
        try:
            made, elsewhere = self._decide(found, watch, patience, verdicts)
        except CkptError as err:
            made, elsewhere = f"a rollback failed: {err}", None
        if isinstance(made, str):
            hint = f"{watch.run.durable()}; change the learning rate, the clipping or the data before you resume there"
            return DivergedError(f"{found.text()}; {made}", hint=hint), None
        error = RollbackRequestedError(
            f"{found.text()}; rollback {made.count} of {self._options.at_most}",
            hint=f"start it again, or call fit again, with ckpt_path='auto': it resumes at step {made.step} and skips "
            f"{made.skipped()}",
        )
        return error, elsewhere

    def holds(self, watch: PreemptionWatch, patience: Patience) -> dict[str, Any]:
        """What this rank's node has on its own disk, for rank 0."""
        self._settle(watch, patience)
        try:
            found = self._read()
            rows = [_row(info) for info in self._engine.snapshots()]
        except CkptError as err:
            self._log.error("the disk of this node cannot be read: %s", err)
            return {"snapshots": [], "before": None}
        return {"snapshots": rows, "before": None if found is None else asdict(found)}

    def remember(self, row: dict[str, Any]) -> None:
        """Rank 0, on another node, has decided that."""
        try:
            write_rollback(self._storage, msgspec.convert(row, RollbackRecord))
        except CkptError as err:
            self._log.warning("the rollback is not remembered on this node, but on that of rank 0: %s", err)

    def _decide(
        self, found: Divergence, watch: PreemptionWatch, patience: Patience, verdicts: Verdicts | None
    ) -> tuple[RollbackRecord | str, dict[str, Any] | None]:
        self._settle(watch, patience)
        before, infos = self._read(), self._engine.snapshots()
        snapshots = [(info.id, info.step) for info in infos]
        divided = self._engine.divided
        if divided and verdicts is not None:
            said = verdicts.ask(HOLDS, _PLACES_SECONDS)
            snapshots = whole(map(_row, infos), *(one["snapshots"] for one in said))
            rows = [None if before is None else asdict(before), *(one["before"] for one in said)]
            before = None if (last := _last(rows)) is None else msgspec.convert(last, RollbackRecord)
        made = plan_rollback(
            snapshots,
            found,
            before,
            skip_batches=self._in_whole_steps(self._options.skip_batches),
            at_most=self._options.at_most,
            ranks=self.replicas,
        )
        if isinstance(made, str):
            return made, None
        write_rollback(self._storage, made)
        self._log.warning("%s; the next start goes back to step %d", made.text(), made.step)
        return made, asdict(made) if divided else None

    def _read(self) -> RollbackRecord | None:
        try:
            return read_rollback(self._storage)
        except CorruptError as err:
            if not self._engine.divided or self._engine.ranks is None:
                raise
            node = self._engine.ranks.node
            hint = f"remove it there, on {node}: others may have it; or on all nodes, to go on at the newest snapshot"
            raise CorruptError(err.message, hint=hint) from err

    def _settle(self, watch: PreemptionWatch, patience: Patience) -> None:
        """What was taken before the divergence counts, also if it is still on its way or only in memory."""
        deadline = time.monotonic() + DURABLE_SECONDS
        self._engine.wait(max(0.0, patience(DURABLE_SECONDS)))
        if self._engine.memory:
            watch.run.flush.begin()
        watch.run.flush.wait(self._engine.poll, lambda: patience(deadline - time.monotonic()))


def whole(*places: Iterable[list[Any]]) -> list[tuple[str, int]]:
    """Id and step of what some place has whole, or all of them together; oldest first.

    Args:
        places: rows of `holds`: id, step, and of a part the ranks whose shares it has, and how many there are.
    """
    held: dict[tuple[str, int], set[int]] = {}
    found = set()
    for name, step, part in (row for rows in places for row in rows):
        ranks = held.setdefault((name, step), set())
        if part is not None:
            ranks |= {*part[0]}
        if part is None or len(ranks) == part[1]:
            found.add((name, step))
    return sorted(found)


def _row(info: SnapshotInfo) -> list[Any]:
    part = info.partial
    return [info.id, info.step, None if part is None else [[*part.ranks], part.size]]


def _last(rows: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Of what several nodes remember; one that was away may know less."""
    return max((row for row in rows if row is not None), key=lambda row: int(row["count"]), default=None)
