"""Resumes a loop: the objects at once, the position and what the script sets up again right before the first batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.audit.audit import Audit
from ckpt_engine.data import rng
from ckpt_engine.data.changed_loader import require_between_epochs
from ckpt_engine.data.exactness import OnChange
from ckpt_engine.data.rng import Teams
from ckpt_engine.data.streams import unsaved_orders
from ckpt_engine.engine import Engine
from ckpt_engine.errors import MismatchError, ResumeError
from ckpt_engine.loop import components
from ckpt_engine.loop.capture import (
    Elastic,
    any_sharded,
    live_of,
    require_whole_gradients,
)
from ckpt_engine.loop.components import (
    NamedParts,
    Surroundings,
    put_back_waiting,
    saved_shapes,
    with_tied,
)
from ckpt_engine.loop.distributed_models import wrappers_of
from ckpt_engine.loop.failing_loop import buffers_of
from ckpt_engine.loop.feed import Feed
from ckpt_engine.loop.phases import OPEN
from ckpt_engine.loop.taking_over import Resume, inexact
from ckpt_engine.observe.resume_report import (
    NotRestored,
    Restored,
)
from ckpt_engine.observe.units import count
from ckpt_engine.restore.load import Loaded
from ckpt_engine.restore.match import require_match
from ckpt_engine.store.manifest import OWN_KEY, Manifest

_OVER = "where nothing more is trained, the random streams are the uninterrupted run's from close() on, and not before"
_DRAWN = (
    "this sampler draws its order at the start of a pass, and no snapshot has that order: use one with set_epoch(), "
    "such as DistributedSampler(data, num_replicas=1, rank=0), or with a state_dict()"
)
_NOT_OF_OBJECTS = ("loaders", "rng")
_NOT_FROM_OTHERS = {
    "random streams": "streams without a data position repeat nothing: they go on as this process has seeded them",
    "data position": "other programs do not store it: epochs count from 0, and loaders start at their beginning",
}


class LoopResume(Resume):
    """Of a tracked loop.

    Args:
        engine: opens the run's folder.
        parts: the components.
        feeds: the loaders, all of them.
        surroundings: of the loop.
        folder: where the report is written if the run's own place is not a local folder.
        log: of the adapter.
        audit: of the run.
    """

    def __init__(
        self,
        engine: Engine,
        parts: NamedParts,
        feeds: Sequence[Feed],
        surroundings: Surroundings,
        folder: Path,
        log: logging.Logger,
        audit: Audit,
    ) -> None:
        super().__init__(engine, log, lambda: folder)
        self._parts = parts
        self._feeds = feeds
        self._surroundings = surroundings
        self._audit = audit
        self._flags: dict[str, dict[str, list[str]]] = {}
        self._options: dict[str, float] = {}
        self._buffers: dict[tuple[str, str], torch.Tensor] | None = None
        """As they were put back, where the order of gradients waits for models that are wrapped later."""
        self._late: tuple[list[Restored], list[NotRestored]] = ([], [])
        """What belongs to the report once the loop trains."""
        self.waiting: dict[str, Any] = {}
        """Positions of loaders that this process has not made yet; they belong to its snapshots as they are."""

    def load(self, begins_at: int | None) -> Mapping[str, Any] | None:
        """Choose a snapshot and put it back; what the loop saved about itself, or None for a fresh start.

        Of a snapshot that was imported only the step is known: its `cadence` is None.

        Args:
            begins_at: none of our snapshots is resumed, the user knows, and training begins at this step.

        Raises:
            NoUsableSnapshotError: there are snapshots, and none is usable.
            MismatchError: the snapshot is of another model; names the keys, before any data is read.
            ResumeError: the snapshot is not of such a loop.
        """
        if begins_at is not None or self._engine.config.resume_word == "off":
            self.start_fresh("leave out resume='off'" if begins_at is None else "")
            return None
        self._flags = self._flags_now()
        self._audit.begin("start")
        state = self._engine.load(live=live_of(self._parts), check=self._fits)
        loaded = self._engine.loaded
        if loaded is None:
            self.report.announce(f"no snapshot in {self._engine.root_url} yet, starting fresh; {self._engine.rhythm}")
            return None
        assert state is not None
        own = self._open(state, loaded)
        if own is None:
            return self._load_imported(state, loaded)
        elastic, missing = self._elastic, list[NotRestored]()
        if elastic is not None:
            own, missing = self._resplit(own, elastic)  # first of all: this may be impossible
        self._own = own
        self._load_parts(state)
        self._options = components.options_of(self._parts.optimizers)
        self.report.missing += missing if self.report.rank == 0 else []
        self.report.notes = [*([_OVER] if own["finished"] else []), *self.report.notes]
        self._note_place(own, own["epoch"] - 1 if own["finished"] else None)
        self._load_feeds()
        self.report.missing += self._restore_order(last=own["training"] is None or own["finished"])
        self.report.missing += self._restore_streams()  # a loop that asks no loader has no later moment
        if elastic is None:
            self.report.restored += [Restored("random streams", ", ".join(own["rng"]))] * (
                not self._engine.changes.new_streams
            )
        else:
            self.report.notes += elastic.notes(feed.position.dealt for feed in self._feeds)
            metrics = "metric objects" if own.get("metric_states") else ""
            self.report.missing += elastic.not_restored(metrics) if self.report.rank == 0 else []
        self._surroundings.restore(own["surroundings"])
        if elastic is None:
            self._audit.resumes(own.get("audit", {}), own["hidden"])
        if (own["training"] is None and not self._begins_later) or own["finished"]:
            self.report.add(*self._audit.restore("start"))
        if own["training"] is None:
            self.report.missing += put_back_waiting(self._parts, self._own)
        if own["training"] is None or own["finished"]:
            self._put_back_flags()  # the script's code at the start of an epoch is still to come
            self.publish()
        return own

    def _load_imported(self, state: dict[str, Any], loaded: Loaded) -> Mapping[str, Any]:
        """A checkpoint of another program: what has a component of its name is put back, and the loop starts there."""
        adopted, missing = self._surroundings.adopt(state)
        for name in _NOT_OF_OBJECTS:
            state.pop(name, None)
        for name, module in self._parts.modules.items():
            if name in state:
                state[name] = with_tied(module, state[name])
        self._load_parts(state)
        self.report.restored += adopted
        if self._engine.changes.restarts:
            self.publish()
            return {"step": 0, "metrics": {}, "cadence": None, "training": None}
        found = {one.name for one in adopted}
        self.report.missing += [NotRestored(name, why) for name, why in _NOT_FROM_OTHERS.items() if name not in found]
        self.report.missing += missing
        as_there = found >= _NOT_FROM_OTHERS.keys()
        worth = "goes on as its own program would" if as_there else "from its step on the run is not an exact repeat"
        self.report.notes.append(f"imported from {loaded.manifest.notes[Surroundings.IMPORTED]['from']}: {worth}")
        self.publish()
        return {"step": loaded.info.step, "metrics": {}, "cadence": None, "training": None}

    def at_first_fetch(self) -> None:
        """The script has set itself up again, and asks for its first batch."""
        for feed in self._feeds:
            if feed.phase not in OPEN:
                self.again(feed)  # an evaluation before training has moved it
        missing = self._surroundings.restore(self._own["surroundings"])
        if self._buffers is not None and self.report.is_open:
            missing += self._restore_order(last=True)  # clears gradients
        missing += put_back_waiting(self._parts, self._own)
        if not self._own["finished"]:
            self._restore_metrics()  # a script that resets them when an epoch starts has just done so
            missing += self._put_back_flags() + components.options_set(self._options, self._parts.optimizers)
            self.report.add(*self._audit.restore("batch"))
        self.report.add([], missing)

    def trains(self) -> None:
        """The loop trains, also one that was complete before: what it lacks for that is named. Cheap."""
        late, self._late = self._late, ([], [])
        self.report.add(*late)

    def end(self, step: int) -> None:
        """The run ends at this step. If it had ended there before, what is drawn from now on is what was drawn then."""
        self.publish()
        if self._own.get("finished") and self._own["step"] == step:
            rng.restore(self._own["rng"])

    @property
    def is_unfinished(self) -> bool:
        """Whether the saved run had more to train."""
        return not self._own.get("finished", True)

    @property
    def _begins_later(self) -> bool:
        """Of a loop without a loader: it shows where it begins."""
        return bool(self._own.get("training") is None and self._own.get("loop", {}).get("start")) and not self._elastic

    def begins(self) -> None:
        """A loop without a loader is about to begin: what it uses is known, and put back; may come more than once."""
        if self._begins_later:
            self._audit.resumes(self._own["audit"], self._own["hidden"])
            restored, missing = self._audit.restore("batch")
            self._late = ([*self._late[0], *restored], missing)

    def say(self, *problems: str | None) -> None:
        """How the loop does not go on as it would have; None: it does."""
        self.report.add([], [NotRestored("the loop", problem) for problem in problems if problem])

    def late(self, feed: Feed) -> None:
        """`feed` is followed from now on only: what the snapshot has of it has not changed since."""
        if (state := self.waiting.pop(feed.name, None)) is not None:
            feed.load(state, None, OnChange(self._engine.config.data))
        self.report.warn(_inexact_of(feed))

    def again(self, feed: Feed) -> None:
        """A pass over `feed` ended before anything was trained: the next one starts where this one did."""
        if (state := self._own["feeds"].get(feed.name)) is not None:
            on_change = OnChange(self._engine.config.data)
            feed.load(state, self._own["rng"] if feed.name == self._own["training"] else None, on_change)

    def _conclude(self) -> None:
        self.report.missing += [problem for feed in self._feeds for problem in _inexact_of(feed)]
        others = {name: one for name, one in self._parts.objects.items() if name not in self._parts.modules}
        self.report.missing += [NotRestored(path, _DRAWN) for path in unsaved_orders(**others)]
        if self._own.get("finished"):
            self._late = ([], [one for one in self.report.missing if one.name not in self._parts.objects])
            self.report.missing = [one for one in self.report.missing if one.name in self._parts.objects]

    def _restore_order(self, *, last: bool) -> list[NotRestored]:
        """Of the sums of gradients, and whose buffers come next.

        A loop may wrap its models after they are tracked, and a new DDP object gives all ranks the buffers of rank 0.
        """
        live = {(key, one.key): one.tensor for key, m in self._parts.modules.items() for one in buffers_of(m)}
        with torch.no_grad():
            before = self._buffers or {}
            for at in live.keys() & before.keys():
                live[at].copy_(before[at])
        wrappers = wrappers_of(self._parts.modules.values())
        missing, is_later = self._restore_gradient_order(wrappers, last=last)
        self._buffers = {at: one.clone() for at, one in live.items()} if is_later else None
        return missing

    def _resplit(self, own: Mapping[str, Any], elastic: Elastic) -> tuple[dict[str, Any], list[NotRestored]]:
        """What the loop saved about itself, for another number of ranks."""
        elastic = replace(elastic, teams=self._teams(own, elastic))
        streams, feeds = elastic.streams, dict(own["feeds"])
        for feed in self._feeds:
            positions = [one["feeds"][feed.name]["position"] for one in elastic.own if feed.name in one["feeds"]]
            if feed.loader.source.dispatched:
                require_between_epochs(positions)
            if len(positions) == elastic.saved_size:
                position = elastic.position(feed.position, positions)
                # Loops often accumulate gradients over other numbers of batches then.
                feeds[feed.name] = {**feeds[feed.name], "position": position, "longest": None}
        if own["gradients"]:
            require_whole_gradients(self._parts.modules.values(), elastic.saved_size)
        gradients, missing = {}, []
        for name, module in self._parts.modules.items():
            if name in own["gradients"]:
                saved = [one["gradients"].get(name, {}) for one in elastic.own]
                gradients[name], left_out = elastic.gradients(saved, module)
                missing += left_out
        return {**own, "rng": streams, "feeds": feeds, "gradients": gradients}, missing

    def _teams(self, own: Mapping[str, Any], elastic: Elastic) -> Teams | None:
        """Ranks that share a model have the same samples: the training loader tells. Not asked where none does."""
        name = own["training"]
        if not any_sharded(self._parts.modules.values()):
            return None
        feed = next((one for one in self._feeds if one.name == name), None)
        saved = [one["feeds"].get(name, {}).get("position", {}).get("recipe", {}).get("rank") for one in elastic.own]
        mine = None if feed is None else feed.position.place
        return None if mine is None or None in saved else Teams(tuple(saved), mine)

    def _load_feeds(self) -> None:
        saved, training = self._own["feeds"], self._own["training"]
        names = [feed.name for feed in self._feeds]
        if training is not None and training not in names:
            raise MismatchError(
                f"the saved run trained on the loader {training!r}, and this run has {', '.join(names) or 'none'}",
                hint="use the loaders of the saved run, or start in another folder",
            )
        for feed in self._feeds:
            self.again(feed)
            if (found := feed.restoration) is not None and found.again:
                self.report.notes.append(f"{feed.name}: {found.again}")
                self.report.announce(self.report.notes[-1])  # now, as that may take long
            if feed.name not in saved:
                why = "the snapshot has no loader of that name: it starts at its beginning"
                self.report.missing.append(NotRestored(f"position of {feed.name!r}", why))
        if not self._elastic:
            self.waiting = {name: state for name, state in saved.items() if name not in names}
        if saved:
            self.report.restored.append(Restored("data position", count(len(saved), "loader")))

    def _change(self, state: dict[str, Any]) -> None:
        """Make the changes that the option `resume` asks for.

        Raises:
            MismatchError: the models do not have what is left then.
        """
        changes, parts = self._engine.changes, self._parts
        if not changes:
            return
        live = {name: components.state_of(one, parts.flat) for name, one in parts.objects.items()}
        changes.change(state, live)
        changes.require_used()
        self._require_whole(*parts.modules, divided=any_sharded(parts.modules.values()))
        for name, expected in parts.shapes().items():
            if name in state:
                found = components.without_metrics(parts.modules[name], components.shapes_in(state[name]))
                assert self._engine.loaded is not None
                require_match(expected, found, what=f"model ({name!r})", snapshot=self._engine.loaded.info.id)
        gradients = self._own.get("gradients", {}).items()
        self._own = {
            **self._own,
            "gradients": {
                name: {key: one for key, one in saved.items() if not changes.leaves(f"{name}.{key}")}
                for name, saved in gradients
            },
        }

    def _load_parts(self, state: dict[str, Any]) -> None:
        self._change(state)
        for name, module in components.those_with(self._parts.objects):
            components.grow(module, self._own.get("metric_states", {}).get(name, {}))
        names, divided = self._own.get("parameters", {}), any_sharded(self._parts.modules.values())
        self._fit_optimizers(self._parts, state, names)
        changed = self._match_optimizers(self._parts, names, self._parts.objects, divided=divided)
        restored, missing = self._parts.load(state)
        without = self._restore_metrics()
        self.report.restored += [one for one in restored if one.name not in without]
        missing = [one for one in missing if not self._engine.changes.leaves(one.name)]
        self.report.missing += missing + changed + [problem for problems in without.values() for problem in problems]

    def _restore_metrics(self) -> dict[str, list[NotRestored]]:
        """What could not be, by component."""
        saved = self._own.get("metric_states", {})
        found = {
            name: components.restore(module, saved.get(name, {}), name)
            for name, module in components.those_with(self._parts.objects)
        }
        return {name: problems for name, problems in found.items() if problems}

    def _put_back_flags(self) -> list[NotRestored]:
        saved, now = self._own["flags"], self._flags_now()
        if now == self._flags:
            for name, module in self._parts.modules.items():
                if name in saved and not self._engine.changes.touches(name):
                    components.restore_flags(module, saved[name])
        elif {name: one["frozen"] for name, one in now.items()} != {n: one["frozen"] for n, one in saved.items()}:
            return [NotRestored("frozen parameters", "the script sets others now")]
        return []

    def _flags_now(self) -> dict[str, dict[str, list[str]]]:
        return {name: components.dump_flags(module) for name, module in self._parts.modules.items()}

    def _fits(self, written: Manifest) -> None:
        """Raises where the weights of the snapshot are not those of these models."""
        manifest = written.as_rank(self.report.rank)
        self._require_ranks(manifest)
        tracked = OWN_KEY in manifest.tree or Surroundings.IMPORTED in manifest.notes
        if not tracked or "state_dict" in manifest.tree:
            raise ResumeError(
                f"snapshot {manifest.info.id} was not taken by a tracked loop",
                hint="give this run its own folder, or use Checkpointer.load",
            )
        for name, expected in () if self._changes_are_due(manifest) else self._parts.shapes().items():
            found = components.without_metrics(self._parts.modules[name], saved_shapes(manifest, name))
            if Surroundings.IMPORTED in manifest.notes:
                found = with_tied(self._parts.modules[name], found)
            require_match(expected, found, what=f"model ({name!r})", snapshot=manifest.info.id)


def _inexact_of(feed: Feed) -> list[NotRestored]:
    return inexact(f"position of {feed.name!r}, a {type(feed.loader.outer()).__name__}", feed.restoration)
