"""What one step of Adam does to numbers, in the order of torch's operations: predicts the new state from the old one.

Only additions, multiplications, divisions and square roots are used, which IEEE 754 defines to the last bit: the
prediction is the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckpt_engine.store.codecs.words import Scratch

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdamStep:
    """What the optimizer was told for the one step between base and state.

    Args:
        lr: learning rate of that step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled (AdamW); 0 for Adam, whose decay is part of the gradient.
        step: number of the step, counted from 1, as in the state after it.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def sensible(self) -> bool:
        """Whether the formulas are defined for these numbers."""
        numbers = (self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)
        return all(map(math.isfinite, numbers)) and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.step >= 1


def flushes_subnormals() -> bool:
    """Whether this thread takes tiny numbers for zero, as after `torch.set_flush_denormal(True)`.

    Then its arithmetic is not that of IEEE 754, and nothing may be predicted.
    """
    tiny = np.array([np.finfo(np.float32).tiny], np.float32)
    return not float((tiny * np.float32(0.5)).view(np.uint32)[0])


def predict_second_moment(
    old: Floats, old_first: Floats, new_first: Floats, told: AdamStep, contracted: bool, store: Scratch
) -> Floats:
    """The new second moment, from the gradient that the change of the first moment implies.

    That gradient is known to a few last bits only, so that a few predictions are off by one.

    Args:
        contracted: whether the last multiplication and the addition were rounded once (fused multiply-add).
    """
    size = old.size
    gradient, result = (store.words(4, number, size).view(np.float32) for number in (4, 5))
    weight = np.float32(1 - told.beta1)
    np.subtract(new_first, old_first, out=gradient)
    np.divide(gradient, weight, out=gradient)
    np.add(gradient, old_first, out=gradient)
    np.multiply(old, np.float32(told.beta2), out=result)
    scaled = store.words(4, 6, size).view(np.float32)
    np.multiply(gradient, np.float32(1 - told.beta2), out=scaled)
    if contracted:
        wide = store.words(8, 4, size).view(np.float64)
        np.multiply(scaled, gradient, out=wide, dtype=np.float64)
        np.add(wide, result, out=wide)
        np.copyto(result, wide, casting="same_kind")
    else:
        np.multiply(scaled, gradient, out=scaled)
        np.add(result, scaled, out=result)
    return _without_nan(result)


def predict_weights(old: Floats, new_first: Floats, new_second: Floats, told: AdamStep, store: Scratch) -> Floats:
    """The new weights, exactly as `torch.optim.AdamW` computes them from both new moments."""
    size = old.size
    denominator, result = (store.words(4, number, size).view(np.float32) for number in (4, 5))
    np.sqrt(new_second, out=denominator)
    np.divide(denominator, np.float32((1 - told.beta2**told.step) ** 0.5), out=denominator)
    np.add(denominator, np.float32(told.eps), out=denominator)
    update = store.words(4, 6, size).view(np.float32)
    np.multiply(new_first, np.float32(-(told.lr / (1 - told.beta1**told.step))), out=update)
    np.divide(update, denominator, out=update)
    np.multiply(old, np.float32(1 - told.lr * told.weight_decay), out=result)
    np.add(result, update, out=result)
    return _without_nan(result)


def _without_nan(result: Floats) -> Floats:
    # Which bits an operation gives to NaN differs between processors.
    nan = np.isnan(result)
    if nan.any():
        result[nan] = 0
    return result
