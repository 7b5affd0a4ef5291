"""Captures and restores the random streams of this process: python, numpy, torch CPU and initialised accelerators.

The state is a plain tree of dicts, bytes, ints, floats and None, so a snapshot stores it as it is. Capturing draws
nothing, synchronises no device and costs tens of microseconds.

The random streams of a rank that did not exist, made from those that were saved.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from ckpt_engine.probe.raw_memory import numpy_stream
from ckpt_engine.state.flatten import bytes_tensor

RngState = dict[str, Any]
"""`{"python": …, "numpy": …, "torch": bytes, "cuda": [bytes, …], …}`; accelerators only where initialised."""
_ACCELERATORS = ("cuda", "xpu")
_MT19937 = "MT19937"
_numpy_memo: tuple[bytes, dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Teams:
    """Which ranks share a model (tensor parallelism), and so have the same samples and should draw alike.

    Args:
        saved: the team of each saved rank, in order; teams are numbered from 0.
        mine: of this rank.
    """

    saved: tuple[int, ...]
    mine: int

    @classmethod
    def of_sizes(cls, saved_size: int, saved_team: int, rank: int, team: int) -> Self:
        """Teams of neighbouring ranks.

        Args:
            saved_size: number of saved ranks; their teams were of `saved_team` ranks.
            rank, team: this rank, and the ranks of a team now.
        """
        return cls(tuple(one // saved_team for one in range(saved_size)), rank // team)


def derive(saved: Sequence[RngState], rank: int, teams: Teams | None = None) -> RngState:
    """The streams of `rank` in a run of another number of ranks; the same at every resume.

    A stream that was the same on all saved ranks stays the same on all: what the ranks decide by it must not differ.
    Of any other one rank 0 goes on with that of rank 0, and another rank begins one whose seed is the SHA-256 of the
    stream of rank 0, its name and the number of the rank. Where the ranks of each team had the same stream it is the
    teams that are counted, and all ranks of one get the same.

    Args:
        saved: `rng.capture()` of every saved rank, in order.
        rank: for which.
        teams: of the ranks; None: each is alone.
    """
    found = {}
    for name, stream in saved[0].items():
        streams, number = _of_teams([one.get(name) for one in saved], rank, teams)
        if number == 0 or (len(streams) > 1 and all(one == stream for one in streams)):
            found[name] = stream
        else:
            found[name] = _begin(name, stream, hashlib.sha256(repr((name, stream, number)).encode()).digest())
    return found


def repeat(saved: Sequence[RngState], rank: int, teams: Teams | None = None) -> RngState:
    """The streams of saved rank (or team) r modulo their number: with more of them several draw the same."""
    found = {}
    for name in saved[0]:
        streams, number = _of_teams([one.get(name) for one in saved], rank, teams)
        stream = streams[number % len(streams)]
        if stream is not None:
            found[name] = stream
    return found


def _of_teams(streams: Sequence[Any], rank: int, teams: Teams | None) -> tuple[Sequence[Any], int]:
    """One stream of each team, and the number of this rank's; of each rank, where those of a team differ."""
    if teams is None:
        return streams, rank
    first: dict[int, Any] = {}
    for team, stream in zip(teams.saved, streams, strict=True):
        if first.setdefault(team, stream) != stream:
            return streams, rank
    return [first[team] for team in sorted(first)], teams.mine


def _begin(name: str, like: Any, digest: bytes) -> Any:
    """A new stream of the kind that `like` is of."""
    seed = int.from_bytes(digest, "little")
    if name == "python":
        return encode_python(random.Random(seed))
    if name == "numpy":
        state = dict(getattr(np.random, like["bit_generator"])(seed).state)
        return encode_numpy(state | ({"has_gauss": 0, "gauss": 0.0} if "key" in like else {}))
    if name == "torch":
        return _torch(torch.Generator(), seed)
    if isinstance(like, bytes):
        return _of_device(name, None, like, seed)
    return [_of_device(name, index, state, seed + index) for index, state in enumerate(like)]


def _of_device(kind: str, index: int | None, like: bytes, seed: int) -> bytes:
    module: Any = getattr(torch, kind)
    if not module.is_available() or (index or 0) >= module.device_count():
        return like  # it cannot be put back here anyway, which `rng.restore` says
    return _torch(torch.Generator(kind if index is None else f"{kind}:{index}"), seed)


def _torch(generator: torch.Generator, seed: int) -> bytes:
    generator.manual_seed(seed % 2**63)
    return generator.get_state().numpy().tobytes()


def capture() -> RngState:
    """Return the state of every global stream of this process, accelerators included.

    Accelerators appear only when they are initialised: asking an idle one would initialise it.
    """
    return capture_host() | _devices()


@contextmanager
def untouched() -> Iterator[None]:
    """Behind the `with` block every stream is what it was before."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def _devices() -> RngState:
    state: RngState = {}
    for kind in _ACCELERATORS:
        module: Any = getattr(torch, kind)
        if module.is_initialized():
            state[kind] = [one.numpy().tobytes() for one in module.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state().numpy().tobytes()
    return state


def capture_host() -> RngState:
    """Return the python, numpy and torch CPU streams only (what a loader worker draws from)."""
    return {
        "python": encode_python(random),
        "numpy": _capture_numpy(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def capture_later() -> Callable[[], RngState]:
    """What makes later what `capture` would give now: for streams that are most often not needed."""
    python = random.getstate()
    state = {"python": None, "numpy": _capture_numpy(), "torch": torch.get_rng_state().numpy().tobytes(), **_devices()}
    return lambda: {**state, "python": _encode_words(*python)}


def probe() -> tuple[object, ...]:
    """A value that differs from an earlier one if a host stream was drawn from in between; cheaper than a capture.

    Drawing the second of a pair of legacy numpy normals goes unseen: it moves nothing but a cached number.
    """
    numpy = numpy_stream()
    return (
        random.getstate(),
        _capture_numpy() if numpy is None else numpy,
        torch.get_rng_state().numpy().tobytes(),
    )


def restore(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Put every stream found in `state` back.

    Returns:
        One sentence per stream that could not be put back here, e.g. because this machine has fewer devices.
        Empty means that the next draw of every recorded stream is the one that followed `capture`.
    """
    global _numpy_memo
    decode_python(random, state["python"])
    _numpy_memo = None
    np.random.set_state(decode_numpy(state["numpy"]))
    torch.set_rng_state(bytes_tensor(state["torch"]))
    known = [kind for kind in _ACCELERATORS if kind in state]
    problems = [one for kind in known for one in _restore_devices(kind, getattr(torch, kind), state[kind])]
    if (mps := state.get("mps")) is not None:
        if torch.backends.mps.is_available():
            torch.mps.set_rng_state(bytes_tensor(mps))
        else:
            problems.append("the mps random stream was recorded but this machine has no mps device")
    return tuple(problems)


def encode_numpy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a numpy bit generator state (`legacy=False`) into a storable tree; wide integers become hex."""
    if state["bit_generator"] == _MT19937 and "has_gauss" in state:
        inner = state["state"]
        return {
            "bit_generator": _MT19937,
            "key": inner["key"].tobytes(),
            "pos": int(inner["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    return {"bit_generator": str(state["bit_generator"]), "generic": _encode_value(state)}


def decode_numpy(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `encode_numpy`."""
    if "generic" in state:
        return dict(_decode_value(state["generic"]))
    return {
        "bit_generator": _MT19937,
        "state": {"key": np.frombuffer(state["key"], dtype=np.uint32).copy(), "pos": state["pos"]},
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }


def encode_python(generator: Any) -> dict[str, Any]:
    """The state of one `random.Random`, or of the module `random` itself, as a storable tree."""
    return _encode_words(*generator.getstate())


def _encode_words(version: int, words: tuple[int, ...], gauss: float | None) -> dict[str, Any]:
    return {"version": version, "words": struct.pack(f"={len(words)}I", *words), "gauss": gauss}


def decode_python(generator: Any, state: Mapping[str, Any]) -> None:
    """Put the state of one `random.Random`, or of the module `random` itself, back."""
    data = state["words"]
    generator.setstate((state["version"], struct.unpack(f"={len(data) // 4}I", data), state["gauss"]))


def _capture_numpy() -> dict[str, Any]:
    # `get_state` takes 30 µs, more than all the rest; reading the words through the documented ctypes interface takes
    # half a microsecond and mostly shows that numpy was not used. With a cached normal the words alone would not do:
    # it can be consumed without moving them, so such a state is never remembered.
    global _numpy_memo
    memory, memo = numpy_stream(), _numpy_memo
    if memo is not None and memory == memo[0]:
        return memo[1]
    encoded = encode_numpy(np.random.get_state(legacy=False))
    _numpy_memo = None if memory is None or encoded.get("has_gauss") else (memory, encoded)
    return encoded


def _encode_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _encode_value(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return {"$array": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return {"$int": hex(int(value))}
    return value


def _decode_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$array" in value:
        return np.frombuffer(value["$array"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return {k: _decode_value(v) for k, v in value.items()}


def _restore_devices(kind: str, module: Any, states: Sequence[bytes]) -> list[str]:
    if not module.is_available():
        return [f"{len(states)} {kind} random stream(s) were recorded but this machine has no {kind} device"]
    module.init()  # where CUDA starts later, a seed that was set before this call would be put in after the states
    count = module.device_count()
    for index, state in enumerate(states[:count]):
        module.set_rng_state(bytes_tensor(state), index)
    if count < len(states):
        return [f"{len(states)} {kind} random streams were recorded but this machine has {count} device(s)"]
    return []
