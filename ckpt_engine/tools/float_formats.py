"""Numbers in a smaller floating-point format, for exported files only: what that loses is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FLOAT_FORMATS = ("float32", "bfloat16", "float16")
_WIDE_BYTES = {"float64": 8, "float32": 4}


def is_wider(dtype: str, target: str) -> bool:
    """Whether numbers of `dtype` lose something in `target`: only those are converted."""
    return _WIDE_BYTES.get(dtype, 0) > (4 if target == "float32" else 2)


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
        data: numbers of `dtype`, in the byte order of this machine, which is little endian, for which `is_wider` holds.
        loss: takes in what is lost.
    """
    import torch  # only a conversion needs it

    wide = torch.from_numpy(np.frombuffer(bytearray(data), dtype))
    small = wide.to(getattr(torch, target))
    finite = wide.isfinite()
    stays = finite & small.isfinite()
    errors = (small[stays].double() - wide[stays].double()).abs()
    loss.largest_error = max(loss.largest_error, float(errors.max()) if len(errors) else 0.0)
    loss.overflowed += int(finite.sum() - stays.sum())
    return small.view(torch.uint8).numpy().tobytes()
