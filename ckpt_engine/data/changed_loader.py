"""What a saved position means for another loader: one that the user has changed, or one of another number of ranks.

Pure functions. Between two epochs a changed loader is the user's decision and is reported. Within an epoch nothing is
right by itself, so the user chooses (`fit_to`). Another number of ranks gets the samples that no rank has seen dealt
again (`resplit`); where an epoch begins there is nothing to divide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.data.exactness import Difference, Effect, Exactness, Level, OnChange
from ckpt_engine.data.iteration import Mode, no_order, nothing_recorded
from ckpt_engine.data.native import is_stateful
from ckpt_engine.data.rng import RngState
from ckpt_engine.data.sample_assignment import Dealing, DealtEpoch, Recipe, Tail, dealing_of
from ckpt_engine.errors import CkptError, MismatchError, ResumeError

_OTHERS = "its sampler gave other samples than its seed says"
State = dict[str, Any]
_RESTART = "data: restart_epoch starts the interrupted epoch again with this loader"
_CHOOSE = (
    f"use the loader of the saved run, or choose for the interrupted epoch: {_RESTART}, data: continue "
    "uses the samples that are left"
)
_GROWS = (
    "; a data set that the script itself changes from epoch to epoch must be what it was in that epoch before it is "
    "tracked: Checkpointer.snapshots()[-1].epoch tells which"
)
_SEED = (
    "seed what splits or orders the samples: random_split(..., generator=torch.Generator().manual_seed(0)), "
    "shuffle(seed=0); or accept "
    f"other samples: {_RESTART}"
)
_CONTINUES = ("batch_size", "batches", "drop_last", "dataset_length")
"""Fields whose change leaves a meaning to the samples that are left."""


def resplit(
    loader: DataLoader[Any],
    fresh: State,
    states: Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    rng: RngState,
    common: RngState,
) -> State:
    """The state with which `rank` of `size` goes on; the rest of an epoch is dealt so that each sample comes once.

    What decides the order of the following epochs (generators, counters of samplers) is that of the first saved rank;
    a sampler of another kind than the saved one gets a seed that follows from `common`.

    Args:
        loader: of this rank.
        fresh: the state of this loader before its first epoch.
        states: of the loader on each of the saved ranks, in order.
        rng: streams of this rank, from which those of its workers are made.
        common: streams that are the same for all ranks.

    Raises:
        ResumeError: the epoch is not one that can be divided; says why.
    """
    first, recipe = states[0], fresh["recipe"]
    paths = {first.get("recipe", {}).get("path"): recipe.get("path")}
    begin = {
        **fresh,
        "exactness": first["exactness"],
        "generators": _moved(first["generators"], paths),
        "counters": _moved(first["counters"], paths),
        "samplers": first.get("samplers", {}),
        "attributes": first.get("attributes", {}),
        "made_at_start": first.get("made_at_start", []),
    }
    _seed_new(recipe, begin, common)
    if all(state["phase"] != "within" or not state["batches"] for state in states):
        return begin
    saved = _dealings(states)
    order = saved[0].origin.order()
    if any(_gave_others(state, one, order) for state, one in zip(states[rank::size], saved[rank::size], strict=True)):
        raise _refused(len(states), _OTHERS)
    dealing = _dealing(recipe, saved[0], int(first["batches"]), len(states))
    return begin | {
        "phase": "within",
        "batches": dealing.first,
        **nothing_recorded(loader.num_workers),
        "native": first["native"],
        "made": {"rng": rng, "generators": begin["generators"], "counters": {}},
        "order": {**no_order(), "dealt": DealtEpoch(dealing, dealing.first + len(dealing.rest(order))).to_state()},
    }


def require_between_epochs(states: Sequence[Mapping[str, Any]]) -> None:
    """For a loader of which one process fetches the batches of all: no rank has samples of its own to divide.

    Raises:
        ResumeError: the states are in the middle of an epoch.
    """
    if any(state["phase"] == "within" and state["batches"] for state in states):
        raise _refused(len(states), "one process fetches the batches of all (dispatch_batches)")


def _dealings(states: Sequence[Mapping[str, Any]]) -> list[Dealing]:
    """How the epoch was dealt to each of the saved ranks."""
    size = len(states)
    if len({(state["phase"], state["batches"]) for state in states}) > 1 or any(state["lost"] for state in states):
        raise _refused(size, "the ranks were not at the same place in their epoch, or could not fetch a batch of it")
    dealings = [_dealing_in(state, partial(_refused, size)) for state in states]
    if any(one.origin != dealings[0].origin for one in dealings):
        raise _refused(size, "the ranks have shuffled it in different ways: the seed of their samplers must be one")
    if {(one.rank, one.size) for one in dealings} != {(rank, dealings[0].size) for rank in range(dealings[0].size)}:
        raise _refused(size, "the ranks did not divide its samples in one way")
    return dealings


def _dealing_in(state: Mapping[str, Any], refused: Callable[[str], CkptError]) -> Dealing:
    """How its epoch was dealt; raises `refused(why)` where that is not known."""
    recipe, order = state.get("recipe", {"unreadable": "an earlier version has saved it"}), state.get("order", {})
    if not state["lost"] and (dealt := DealtEpoch.of_order(order)) is not None:
        return dealt.dealing
    if "unreadable" in recipe:
        raise refused(str(recipe["unreadable"]))
    if state["lost"] or order.get("at_first") is None:
        raise refused("the position does not tell which samples were seen")
    return dealing_of(recipe, order["at_first"])


def _dealing(recipe: Mapping[str, Any], saved: Dealing, batch: int, saved_size: int) -> Dealing:
    """How the rest goes to this rank: divided and in batches as its loader does it.

    Where several ranks share a model (tensor parallelism) they have the same samples, and the loader divides by less
    than the number of ranks.
    """
    if "unreadable" in recipe:
        raise _refused(saved_size, f"in this run {recipe['unreadable']}")
    if recipe["length"] != saved.origin.length:
        raise _refused(saved_size, f"its dataset had {saved.origin.length} samples, and has {recipe['length']} now")
    return _in_batches_of(recipe, replace(saved, rank=recipe["rank"], size=recipe["size"]), batch, saved)


def _in_batches_of(recipe: Mapping[str, Any], dealing: Dealing, batch: int, saved: Dealing) -> Dealing:
    """What is left of `saved` after so many batches, in those of this loader."""
    return replace(
        dealing,
        batch_size=recipe["batch_size"],
        batched=recipe["batched"],
        seen=saved.seen_before(batch),
        first=batch,
        interleaved=True,
        tail=Tail(recipe["tail"]),
        drop_last=recipe["drop_last"],
    )


def _gave_others(state: Mapping[str, Any], dealing: Dealing, order: Sequence[int]) -> bool:
    """Whether a rank was not given what the order says: samples would be left out or come twice."""
    digest = state["order"]["digest"]
    return digest is not None and digest != dealing.digest(order, int(state["batches"]))


def _seed_new(recipe: Mapping[str, Any], state: State, common: RngState) -> None:
    """Seed a sampler that takes the place of one without a seed: that of the script may differ from start to start."""
    seed = int.from_bytes(hashlib.sha256(common["torch"]).digest()[:4], "little")
    if recipe.get("order") == "distributed":
        state["counters"].setdefault(f"{recipe['path']}.seed", seed)
    if recipe.get("order") == "random" and recipe["generator"] is not None:
        stream = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
        state["generators"].setdefault(recipe["generator"], {"kind": "torch", "state": stream})


def _refused(size: int, why: str) -> ResumeError:
    return ResumeError(
        f"the rest of the epoch cannot be divided among another number of ranks: {why}",
        hint=f"resume with {size} rank{'s' if size > 1 else ''} to the end of the epoch; a snapshot between two epochs "
        "resumes with any number",
    )


def _moved(found: Mapping[str, Any], paths: Mapping[str | None, str | None]) -> dict[str, Any]:
    """Values of samplers under the paths that these have now."""
    parts = {path: path.rpartition(".") for path in found}
    return {f"{paths.get(owner) or owner}.{name}": found[path] for path, (owner, _, name) in parts.items()}


class FittedState(NamedTuple):
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
) -> FittedState:
    """The state with which `loader` goes on.

    Args:
        state: that was saved; its phase is "within" or "fresh".
        changed: how the loader differs.
        recipe: of the loader.

    Raises:
        MismatchError: the user has not chosen, or the choice has no meaning here; says what to do.
    """
    longer = any(d.field == "dataset_length" for d in changed)  # its other number of batches follows from that
    what = "; ".join(d.change for d in changed if not (longer and d.field == "batches"))
    if policy is OnChange.REFUSE:
        require_same_split(changed)
    if state["phase"] == "fresh" or not state["batches"]:
        why = f"data: {what}: the new loader counts from this epoch on"
        found = Exactness() if not changed else Exactness(Level.NOT_RESTORED, (why,))
        if state["phase"] == "within":
            return FittedState(_restarted(state, loader), "within", found)
        # New workers: those of the saved run had another loader.
        begun = {**state, "alive": False}
        if any(d.field == "dataset_kind" for d in changed):
            begun["native"] = None
        return FittedState(begun, "fresh", found)
    if policy is OnChange.RESTART_EPOCH:
        why = f"data: restart_epoch: {what or 'the loader beside it has changed'}; the epoch starts again"
        return FittedState(_restarted(state, loader), "within", Exactness(Level.NOT_RESTORED, (why,)), restarts=True)
    if policy is OnChange.REFUSE:
        raise MismatchError(
            "the data loader is not the one of the snapshot, which is in the middle of an epoch: "
            + "; ".join(map(str, changed)),
            hint=_CHOOSE + (_GROWS if any(d.field == "dataset_length" and d.current for d in changed) else ""),
        )
    state, left = _continued(state, changed, recipe, loader)
    return FittedState(state, "within", Exactness(Level.ORDER_ONLY, (f"data: continue: {what}; {left}",)))


def _restarted(state: State, loader: DataLoader[Any]) -> State:
    """The first sample of the interrupted epoch, in the order that it had, if the samplers can repeat that."""
    found = state | {
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
            return state, "the dataset continues at the sample where it was"
        raise _no_meaning("the dataset is iterable and cannot say where it is (state_dict)")
    saved = _dealing_in(state, _no_meaning)
    if "unreadable" in recipe:
        raise _no_meaning(recipe["unreadable"])
    order = saved.origin.order()
    if recipe["length"] < saved.origin.length:
        raise _no_meaning(f"{saved.origin.length - recipe['length']} of its samples are gone")
    if _gave_others(state, saved, order):
        raise _no_meaning(_OTHERS)
    batch = int(state["batches"])
    dealing = _in_batches_of(recipe, saved, batch, saved)
    rest = len(dealing.rest(order))
    said = f"the other {saved.origin.samples - dealing.seen:,} samples of the epoch come in {rest:,} batches"
    if recipe["length"] > saved.origin.length:
        said += f", the {recipe['length'] - saved.origin.length:,} new ones from the next epoch on"
    return state | {
        "held": [],
        "order": {**no_order(), "dealt": DealtEpoch(dealing, batch + rest).to_state()},
    }, said


def _no_meaning(why: str) -> MismatchError:
    return MismatchError(
        f"data: continue: which samples of the interrupted epoch are left is not known: {why}",
        hint=f"{_RESTART}; a snapshot between two epochs resumes with any loader",
    )
