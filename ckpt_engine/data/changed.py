"""What a saved position means for a loader that is not the one that was saved: the policies of the option `data`.

A pure function of the state, the differences and the two recipes. Between two epochs a changed loader is the user's
business and is reported. Within an epoch nothing is right by itself, so the user chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data.dealing import Dealing
from ckpt_engine.data.exactness import Difference, Effect, Exactness, Level, OnChange
from ckpt_engine.data.iteration import Mode, no_order, nothing_recorded
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.recipe import Recipe, dealing_of
from ckpt_engine.errors import MismatchError
from ckpt_engine.ranks.elastic import Tail

__all__ = ["Fitted", "fit_to", "require_same_split"]

State = dict[str, Any]
_RESTART = "data: restart_epoch starts the interrupted epoch again with this loader"
_CHOOSE = (
    f"use the loader of the saved run, or say what is to become of the interrupted epoch: {_RESTART}, data: continue "
    "goes on with the samples that are left"
)
_SEED = (
    "seed what splits or orders the samples: random_split(..., generator=torch.Generator().manual_seed(0)), "
    "shuffle(seed=0); or accept "
    f"other samples: {_RESTART}"
)
_CONTINUES = ("batch_size", "batches", "drop_last", "dataset_length")
"""Fields whose change leaves a meaning to the samples that are left."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A state that the loader can be given, and what is not exact about it.

    Args:
        phase: "within" or "fresh".
        restarts: the epoch starts again at its first batch.
    """

    state: State
    phase: str
    exactness: Exactness
    restarts: bool = False


def require_same_split(differences: Sequence[Difference]) -> None:
    """Refuse a dataset that is as long as it was and has other samples.

    Raises:
        MismatchError: names where the other values are.
    """
    others = [d.field for d in differences if d.effect is Effect.OTHER_SAMPLES]
    if others:
        raise MismatchError(
            "the dataset's split or order differs: it is as long as in the saved run and has other samples "
            f"({', '.join(others)} has other values)",
            hint=_SEED,
        )


def fit_to(
    state: State, changed: Sequence[Difference], policy: OnChange, recipe: Recipe, loader: DataLoader[Any]
) -> Fitted:
    """The state with which `loader` goes on.

    Args:
        state: that was saved; its phase is "within" or "fresh".
        changed: how the loader differs.
        recipe: of the loader.

    Raises:
        MismatchError: the user has not chosen, or the choice has no meaning here; says what to do.
    """
    what = "; ".join(d.change for d in changed)
    if policy is OnChange.REFUSE:
        require_same_split(changed)
    if state["phase"] == "fresh" or not state["batches"]:
        found = Exactness() if not changed else Exactness(Level.NOT_RESTORED, (f"from this epoch on {what}",))
        if state["phase"] == "within":
            return Fitted(_restarted(state, loader), "within", found)
        # New workers: those of the saved run had another loader.
        begun = {**state, "alive": False}
        if any(d.field == "dataset_kind" for d in changed):
            begun["native"] = None
        return Fitted(begun, "fresh", found)
    if policy is OnChange.RESTART_EPOCH:
        why = f"data: restart_epoch: {what or 'the loader beside it has changed'}; the epoch starts again"
        return Fitted(_restarted(state, loader), "within", Exactness(Level.NOT_RESTORED, (why,)), restarts=True)
    if policy is OnChange.REFUSE:
        raise MismatchError(
            "the data loader is not the one of the snapshot, which is in the middle of an epoch: "
            + "; ".join(map(str, changed)),
            hint=_CHOOSE,
        )
    state, left = _continued(state, changed, recipe, loader)
    return Fitted(state, "within", Exactness(Level.ORDER_ONLY, (f"data: continue: {what}; {left}",)))


def _restarted(state: State, loader: DataLoader[Any]) -> State:
    """The first sample of the interrupted epoch, in the order that it had, if the samplers can repeat that."""
    found = state | {
        "version": 1,
        "batches": 0,
        **nothing_recorded(loader.num_workers),
        # Samplers are as they were when the epoch began: what they did since is to be done again.
        "counters": {},
        "generators": {},
        "samplers": {},
        "attributes": {},
    }
    if "order" in state:
        kept = {name: state["order"][name] for name in ("at_iter", "at_first", "draws")}
        return found | {"order": {**no_order(), **kept, "restarts": True}}
    return found | {"mode": str(Mode.REPLAY)}


def _continued(
    state: State, changed: Sequence[Difference], recipe: Recipe, loader: DataLoader[Any]
) -> tuple[State, str]:
    """The samples that are left, in batches of this loader; and what that means, in words."""
    fields = {d.field for d in changed}
    if meaningless := sorted(fields - set(_CONTINUES)):
        raise _no_meaning(f"{', '.join(meaningless)} is another")
    if isinstance(loader.dataset, IterableDataset):
        if is_stateful(loader.dataset) or state["mode"] == Mode.NATIVE:
            return state, "the dataset goes on at the sample where it was"
        raise _no_meaning("the dataset is iterable and cannot say where it is (state_dict)")
    for one in (state.get("recipe", {"unreadable": "an earlier version has saved it"}), recipe):
        if "unreadable" in one:
            raise _no_meaning(one["unreadable"])
    if state["lost"] or (state["order"]["at_first"] is None and "dealt" not in state["order"]):
        raise _no_meaning("the position does not tell which samples were seen")
    saved = _saved_dealing(state)
    order = saved.origin.order()
    if recipe["length"] < saved.origin.length:
        raise _no_meaning(f"{saved.origin.length - recipe['length']} of its samples are gone")
    if (digest := state["order"]["digest"]) is not None and digest != saved.digest(order, int(state["batches"])):
        raise _no_meaning("the sampler gave other samples than its seed says")
    batch = int(state["batches"])
    dealing = replace(
        saved,
        batch_size=recipe["batch_size"],
        batched=recipe["batched"],
        seen=saved.seen_before(batch),
        first=batch,
        interleaved=True,
        tail=Tail(recipe["tail"]),
        drop_last=recipe["drop_last"],
    )
    rest = len(dealing.rest(order))
    dealt = {"dealing": dealing.to_state(), "total": batch + rest}
    said = f"the other {saved.origin.samples - dealing.seen:,} samples of the epoch come in {rest:,} batches"
    if recipe["length"] > saved.origin.length:
        said += f", the {recipe['length'] - saved.origin.length:,} new ones from the next epoch on"
    return state | {"version": 2, "held": [], "order": {**no_order(), "dealt": dealt}}, said


def _saved_dealing(state: Mapping[str, Any]) -> Dealing:
    dealt = state["order"].get("dealt")
    if dealt is not None:
        return Dealing.of_state(dealt["dealing"])
    return dealing_of(state["recipe"], state["order"]["at_first"])


def _no_meaning(why: str) -> MismatchError:
    return MismatchError(
        f"data: continue: which samples of the interrupted epoch are left is not known: {why}",
        hint=f"{_RESTART}; a snapshot between two epochs goes on with any loader",
    )
