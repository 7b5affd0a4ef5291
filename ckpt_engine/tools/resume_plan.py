"""Says what the section `resume` changes in the snapshot that the next start resumes."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_engine.config import Config
from ckpt_engine.interop.snapshot_trees import outline
from ckpt_engine.observe.resume_report import ChangedPart
from ckpt_engine.restore.ask_tiers import Sources
from ckpt_engine.restore.changes import planned
from ckpt_engine.restore.choose import choose
from ckpt_engine.restore.origin import look_elsewhere
from ckpt_engine.store.manifest import OWN_KEY
from ckpt_engine.store.storage.base import Storage
from ckpt_engine.tools.stored_run import repository_of
from ckpt_engine.tools.try_storage import Finding, Mark, tried


def resume_plan(config: Config) -> Iterator[Finding]:
    """What is restored of the newest snapshot, and each change; objects of the program are not known here."""
    places, rows = [repository_of(tier) for tier in config.tiers], list[ChangedPart]()

    def plan(_storage: Storage) -> tuple[Mark, str]:
        found, origin = choose(places), getattr(config.resume, "from", None)
        if found is None and origin is None:
            return Mark.OK, "no snapshot yet: training begins at step 0"
        found = (found or look_elsewhere(str(origin), lambda where, step: choose(where(), step))).unpacked()
        manifest = found.manifest.as_rank(0)
        state = outline(Sources([one.storage for one in found.sources]), manifest, manifest.tree)
        changes, *_ = planned(config.resume, manifest, state)
        changes.change(state)
        changes.require_used()
        rows.extend(changes.rows)
        return Mark.OK, (
            f"{'as step 0, of ' * changes.restarts}step {found.info.step:,} ({found.info.id}): "
            f"{', '.join(one for one in state if one != OWN_KEY)}"
        )

    yield tried("resumes", plan, places[0].storage)
    yield from (Finding(f"  {row.how}", Mark.NOTE, f"{row.name}: {row.detail}") for row in rows)
