"""Numbers in a smaller floating-point format, for exported files only: what that loses is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FLOAT_FORMATS = ("float32", "bfloat16", "float16")
_WIDE: dict[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4")}


def is_wider(dtype: str, target: str) -> bool:
    """Whether numbers of `dtype` lose something in `target`: only those are converted."""
    return dtype in _WIDE and _WIDE[dtype].itemsize > (4 if target == "float32" else 2)


@dataclass(slots=True)
class Loss:
    """What was lost until now.

    Args:
        largest_error: the largest absolute difference of a number that stays finite.
        overflowed: finite numbers that became infinite.
    """

    largest_error: float = 0.0
    overflowed: int = 0

    def text(self, target: str) -> str:
        """For people."""
        more = f"; {self.overflowed:,} numbers are too large for it and became infinite" * (self.overflowed > 0)
        return f"converted to {target}: numbers differ by at most {self.largest_error:.3g}{more}"


def narrow(data: bytes | bytearray, dtype: str, target: str, loss: Loss) -> bytes:
    """The same numbers in `target`, rounded to nearest, ties to even, as torch does.

    Args:
        data: numbers of `dtype`, little endian, for which `is_wider` holds.
        loss: takes in what is lost.
    """
    wide = np.frombuffer(data, _WIDE[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "bfloat16":
            bits = _bfloat16(wide.astype("<f4"))
            found, back = bits.tobytes(), (bits.astype("<u4") << 16).view("<f4")
        else:
            small = wide.astype("<f2" if target == "float16" else "<f4")
            found, back = small.tobytes(), small
        finite = np.isfinite(wide)
        stays = finite & np.isfinite(back)
        error = np.abs(back[stays].astype("<f8") - wide[stays].astype("<f8"))
    loss.largest_error = max(loss.largest_error, float(error.max(initial=0.0)))
    loss.overflowed += int(finite.sum() - stays.sum())
    return found


def _bfloat16(numbers: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    bits = numbers.view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # never overflows but for NaN
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype("<u2")
