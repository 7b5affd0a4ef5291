"""Capture and restore of the random streams of this process: python, numpy, torch CPU and initialised accelerators.

The state is a plain tree of dicts, bytes, ints, floats and None, so a snapshot stores it as it is. Capturing draws
nothing, synchronises no device and costs tens of microseconds.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["RngState", "capture", "capture_host", "capture_later", "probe", "restore"]

RngState = dict[str, Any]
"""`{"python": …, "numpy": …, "torch": bytes, "cuda": [bytes, …], …}`; accelerators only where initialised."""

_MT19937 = "MT19937"
_MT19937_STRUCT_BYTES = 624 * 4 + 4
_numpy_memo: tuple[bytes, dict[str, Any]] | None = None


class _PythonStream(Protocol):
    def getstate(self) -> Any: ...

    def setstate(self, state: Any, /) -> None: ...


def capture() -> RngState:
    """Return the state of every global stream of this process, accelerators included.

    Accelerators appear only when they are initialised: asking an idle one would initialise it.
    """
    return capture_host() | _devices()


def _devices() -> RngState:
    state: RngState = {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_tensor_bytes(t) for t in torch.cuda.get_rng_state_all()]
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        state["xpu"] = [_tensor_bytes(t) for t in torch.xpu.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["mps"] = _tensor_bytes(torch.mps.get_rng_state())
    return state


def capture_host() -> RngState:
    """Return the python, numpy and torch CPU streams only (what a loader worker draws from)."""
    return {
        "python": encode_python(random),
        "numpy": _capture_numpy(),
        "torch": _tensor_bytes(torch.get_rng_state()),
    }


def capture_later() -> Callable[[], RngState]:
    """What makes later what `capture` would give now: for streams that are most often not needed."""
    python = random.getstate()
    state = {"python": None, "numpy": _capture_numpy(), "torch": _tensor_bytes(torch.get_rng_state()), **_devices()}
    return lambda: {**state, "python": _encode_words(*python)}


def probe() -> tuple[object, ...]:
    """A value that differs from an earlier one if a host stream was drawn from in between; cheaper than a capture.

    Drawing the second of a pair of legacy numpy normals goes unseen: it moves nothing but a cached number.
    """
    numpy = _numpy_memory()
    return (
        random.getstate(),
        _capture_numpy() if numpy is None else numpy,
        _tensor_bytes(torch.get_rng_state()),
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
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    problems: list[str] = []
    if (cuda := state.get("cuda")) is not None:
        if torch.cuda.is_available():
            # Where CUDA starts later, a seed that was set before this call would be put in after the states.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        problems += _restore_devices("cuda", cuda, torch.cuda if torch.cuda.is_available() else None)
    if (xpu := state.get("xpu")) is not None:
        problems += _restore_devices("xpu", xpu, torch.xpu if torch.xpu.is_available() else None)
    if (mps := state.get("mps")) is not None:
        if torch.backends.mps.is_available():
            torch.mps.set_rng_state(_bytes_tensor(mps))
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
        decoded = _decode_value(state["generic"])
        assert isinstance(decoded, dict)
        return decoded
    return {
        "bit_generator": _MT19937,
        "state": {"key": np.frombuffer(state["key"], dtype=np.uint32).copy(), "pos": state["pos"]},
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }


def encode_python(generator: _PythonStream) -> dict[str, Any]:
    """The state of one `random.Random`, or of the module `random` itself, as a storable tree."""
    return _encode_words(*generator.getstate())


def _encode_words(version: int, words: tuple[int, ...], gauss: float | None) -> dict[str, Any]:
    return {"version": version, "words": struct.pack(f"={len(words)}I", *words), "gauss": gauss}


def decode_python(generator: _PythonStream, state: Mapping[str, Any]) -> None:
    """Put the state of one `random.Random`, or of the module `random` itself, back."""
    data = state["words"]
    generator.setstate((state["version"], struct.unpack(f"={len(data) // 4}I", data), state["gauss"]))


def _capture_numpy() -> dict[str, Any]:
    # `get_state` takes 30 µs, more than all the rest; reading the words through the documented ctypes interface takes
    # half a microsecond and mostly shows that numpy was not used. With a cached normal the words alone would not do:
    # it can be consumed without moving them, so such a state is never remembered.
    global _numpy_memo
    memory, memo = _numpy_memory(), _numpy_memo
    if memo is not None and memory == memo[0]:
        return memo[1]
    encoded = encode_numpy(np.random.get_state(legacy=False))
    _numpy_memo = None if memory is None or encoded.get("has_gauss") else (memory, encoded)
    return encoded


def _numpy_memory() -> bytes | None:
    """The raw state of numpy's global generator, or None if it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_STRUCT_BYTES)


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


def _restore_devices(kind: str, states: Sequence[bytes], module: Any) -> list[str]:
    if module is None:
        return [f"{len(states)} {kind} random stream(s) were recorded but this machine has no {kind} device"]
    count = module.device_count()
    for index, state in enumerate(states[:count]):
        module.set_rng_state(_bytes_tensor(state), index)
    if count < len(states):
        return [f"{len(states)} {kind} random streams were recorded but this machine has {count} device(s)"]
    return []


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
