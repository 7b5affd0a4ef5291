"""What another number of ranks goes on with: random streams by the user's policy, and what each rank had of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.data.dealing import Dealing
from ckpt_engine.data.derived import Teams, derive, repeat
from ckpt_engine.data.position import LoaderPosition
from ckpt_engine.data.rng import RngState
from ckpt_engine.observe.resume_report import NotRestored, resumed_by_others
from ckpt_engine.ranks import elastic
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.restore.as_rank import require_size, size_of
from ckpt_engine.restore.load import Loaded
from ckpt_engine.snapshot.sharding import here
from ckpt_engine.store.manifest import Manifest
from ckpt_engine.tracking.packed import unpack

DERIVE = "derive"
STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Elastic:
    """A snapshot of other ranks than those of this run.

    Args:
        rank, size: of this run.
        own: what each of the saved ranks had of its own, in order.
        policy: the option `rng`.
        teams: which ranks share a model.
    """

    rank: int
    size: int
    own: Sequence[Mapping[str, Any]]
    policy: str
    teams: Teams | None = None

    @property
    def saved_size(self) -> int:
        """How many ranks took it."""
        return len(self.own)

    @property
    def streams(self) -> RngState:
        """The random streams of this rank."""
        saved = [own["rng"] for own in self.own]
        return (derive if self.policy == DERIVE else repeat)(saved, self.rank, self.teams)

    def position(self, position: LoaderPosition, saved: Sequence[Any]) -> dict[str, Any]:
        """The state of a loader's position for this rank.

        Args:
            position: of the loader of this rank.
            saved: the states of the saved ranks, in order.

        Raises:
            ResumeError: the rest of its epoch cannot be divided anew.
        """
        return position.for_another_number(saved, self.rank, self.size, self.streams, self.own[0]["rng"])

    def gradients(
        self, saved: Sequence[Mapping[str, torch.Tensor]], module: torch.nn.Module
    ) -> tuple[dict[str, torch.Tensor], list[NotRestored]]:
        """Gradients that wait for a step, those of all saved ranks together: their mean, as DDP would make it.

        Args:
            saved: by name of the parameter, of each saved rank in order.
            module: whose they are.
        """
        whole = {name: p.shape for name, p in module.named_parameters() if here(p) is p}
        found = {name: [one[name] for one in saved] for name in saved[0] if all(name in one for one in saved)}
        divided = [
            name
            for name, parts in found.items()
            if any(not isinstance(part, torch.Tensor) or part.shape != whole.get(name) for part in parts)
        ]
        gone = [name for name in saved[0] if name not in found]
        why = "it is sparse, divided among the ranks, or not all have it: it is left out of the next step"
        missing = [NotRestored(f"gradient of {name!r}", why) for name in (*divided, *gone)]
        return {name: _mean(parts) for name, parts in found.items() if name not in divided}, missing

    def notes(self, dealings: Iterable[tuple[Dealing, int] | None]) -> list[str]:
        """What was done, as sentences for the report.

        Args:
            dealings: `LoaderPosition.dealt` of the loaders.
        """
        said = []
        for dealing, total in filter(None, dealings):
            said.append(_dealt(dealing, total))
            if dealing.size != self.size:
                said.append(
                    f"the loader divides its samples by {dealing.size}: that many of the ranks have different ones"
                )
        if self.policy == DERIVE:
            said.append("rng: derive: rank 0 has its random streams, those of other ranks are made from them")
        return [resumed_by_others(self.saved_size, self.size), *said]

    def not_restored(self) -> list[NotRestored]:
        """What is not as it was, apart from what `notes` says."""
        if self.policy == DERIVE:
            return []
        twins = f"; with more than {self.saved_size} several draw the same" if self.size > self.saved_size else ""
        why = f"rng: {self.policy}: each rank has those of saved rank r mod {self.saved_size}{twins}"
        return [NotRestored("random streams", why)]


def elastic_of(loaded: Loaded, own: Mapping[str, Any], key: str, ranks: tuple[int, int], policy: str) -> Elastic | None:
    """How these ranks go on; None: they are as many as took the snapshot.

    Args:
        own: of this rank, as it was loaded.
        key: component that each rank has of its own.
        ranks: number of this rank, and how many there are.
        policy: the option `rng`.

    Raises:
        CorruptError, FormatError: as `packed.unpack`.
    """
    rank, size = ranks
    if size_of(loaded.manifest) == size:
        return None
    found = [loaded.own[number][key] for number in sorted(loaded.own)] if loaded.own else [own]
    return Elastic(rank, size, [{**one, **unpack(one["packed"])[0]} for one in found], policy)


def require_ranks(manifest: Manifest, size: int, policy: str) -> None:
    """Refuse another number of ranks where the user wants that.

    Raises:
        ResumeError: says both numbers.
    """
    if policy == STRICT:
        require_size(manifest, size)


def numbers_of(ranks: Ranks | None) -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    return (0, 1) if ranks is None else (ranks.rank, ranks.size)


def _dealt(dealing: Dealing, total: int) -> str:
    left = dealing.origin.samples - dealing.seen
    more = elastic.given(left, dealing.size, dealing.batch_size, dealing.tail, drop_last=dealing.drop_last) - left
    said = f"{dealing.seen:,} samples of the epoch were seen, the other {left:,} come once"
    said += f"; batches for each rank: {total - dealing.first:,}"
    if more > 0:
        return f"{said}; {more:,} come twice, to fill the last batches"
    return f"{said}; the last {-more:,} are left out, as they fill no batch" if more else said


def _mean(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    first = gradients[0]
    if all(torch.equal(one, first) for one in gradients[1:]):
        return first
    wide = torch.promote_types(first.dtype, torch.float64)
    return torch.stack([one.to(wide) for one in gradients]).mean(0).to(first.dtype)
