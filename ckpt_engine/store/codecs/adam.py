"""The adam codec: float32 weights and moments that are one step of AdamW after their base.

The first moment is stored as a difference, or raw. From it and the base follow the second moment, nearly, and from both
moments the weights, exactly; what is stored of these two is the difference to the prediction.

```
header   as in planes.py
more     role (u32: 0 first moment, 1 second, 2 weights), kind (u32: 0 as it is, 1 difference to the base, 2 to the
         prediction, 3 to the prediction with contracted arithmetic), xxh3-64 of the decoded bytes (u64), lr, beta1,
         beta2, eps, weight decay (f64 each), step (u64)
rest     the bytes, or blocks of planes
```

What one step of Adam does to numbers, in the order of torch's operations: predicts the new state from the old one.

Only additions, multiplications, divisions and square roots are used, which IEEE 754 defines to the last bit: the
prediction is the same on every machine.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from ckpt_engine.errors import CorruptError
from ckpt_engine.store.codecs.codec import Stored, damaged
from ckpt_engine.store.codecs.numbers import fold_difference, unfold_difference
from ckpt_engine.store.codecs.planes import (
    HEADER_BYTES,
    SCRATCH,
    PlaneDecoder,
    PlaneEncoder,
    PlanesHeader,
    Words,
    base_digest,
    words_in,
)
from ckpt_engine.store.codecs.zstd_frames import PAYS

FIRST, SECOND, WEIGHTS = "m", "v", "p"
NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
"""The numbers that `encode` needs: those of the one step between base and state."""

_MAGIC = b"CKA1"
_MORE = struct.Struct("<IIQdddddQ")
_ROLES = (FIRST, SECOND, WEIGHTS)
_AS_IS, _DIFFERENCE, _PREDICTED, _CONTRACTED = range(4)
_SAMPLE_WORDS = 1 << 14
_MOST_WRONG = 0.5
"""A prediction that fails for more than this share of a sample is not that of this optimizer."""

_first = itemgetter(0)
_Prediction = Callable[[int, int], Words]
Floats = NDArray[np.float32]


class AdamCodec:
    """Encodes the arrays of a group against the same arrays of an older snapshot.

    It predicts, verifies while it encodes, and stores what it predicted wrong. Each member (a *role*) gets stored bytes
    of its own, so that each is a piece with a digest like any other; decoding one needs all of them. Guarantees are
    those of `Codec`.
    """

    name = "adam"
    roles = _ROLES

    def encode(
        self,
        arrays: Mapping[str, memoryview],
        bases: Mapping[str, memoryview],
        numbers: Sequence[Mapping[str, float]],
    ) -> Mapping[str, Stored] | None:
        """Stored bytes of `m`, `v` and `p`, or None if the state is not one step of AdamW after the base: then each
        array is encoded alone.

        Args:
            numbers: those named by `NUMBERS`; several where it is not sure which were used: those that fit are taken.
        """
        sizes = {data.nbytes for group in (arrays, bases) for data in group.values()}
        if set(arrays) != set(_ROLES) or set(bases) != set(_ROLES) or len(sizes) != 1:
            return None
        steps = [AdamStep(**{**one, "step": int(one["step"])}) for one in numbers if set(one) == set(NUMBERS)]  # type: ignore[arg-type]
        steps = [one for one in steps if one.sensible()]
        [nbytes] = sizes
        if not steps or not nbytes or nbytes % 4 or flushes_subnormals():
            return None
        new = {role: words_in(arrays[role], 4) for role in _ROLES}
        old = {role: words_in(bases[role], 4) for role in _ROLES}
        with np.errstate(all="ignore"):
            wrong, step = min(((self._wrong(WEIGHTS, _PREDICTED, new, old, one), one) for one in steps), key=_first)
            kinds = {
                SECOND: self._kind_of_second(new, old, step),
                WEIGHTS: _PREDICTED if wrong <= _MOST_WRONG else _DIFFERENCE,
            }
            if kinds[SECOND] == kinds[WEIGHTS] == _DIFFERENCE:
                return None
            return {
                role: self._encode(role, kinds.get(role, _DIFFERENCE), arrays[role], bases[role], new, old, step)
                for role in _ROLES
            }

    def decode(
        self, stored: Mapping[str, memoryview], outs: Mapping[str, memoryview], bases: Mapping[str, memoryview]
    ) -> None:
        """Fill all `outs`: the first moment, from it the second, and from both the weights.

        Raises:
            CorruptError: the stored bytes or the bases are not those of `encode`.
            NewerFormatError: a later version wrote them.
        """
        if not set(_ROLES) <= set(stored) & set(outs) & set(bases):
            raise damaged(self.name, f"one of {', '.join(_ROLES)} is missing")
        if len({data.nbytes for group in (outs, bases) for data in group.values()}) != 1:
            raise damaged(self.name, "its arrays are of different sizes")
        if flushes_subnormals():
            raise CorruptError(
                "a piece encoded with 'adam' cannot be decoded by a thread that flushes subnormal numbers to zero",
                hint="call torch.set_flush_denormal(False) before loading",
            )
        new = {role: words_in(outs[role], 4) for role in _ROLES}
        old = {role: words_in(bases[role], 4) for role in _ROLES}
        with np.errstate(all="ignore"):
            for role in _ROLES:
                self._decode(role, stored[role], outs[role], bases[role], new, old)

    def _kind_of_second(self, new: Mapping[str, Words], old: Mapping[str, Words], step: AdamStep) -> int:
        """The kind of prediction with the fewest errors in a sample, or `_DIFFERENCE` if all are wrong."""
        wrong = {kind: self._wrong(SECOND, kind, new, old, step) for kind in (_PREDICTED, _CONTRACTED)}
        best = min(wrong, key=lambda kind: wrong[kind])
        return best if wrong[best] <= _MOST_WRONG else _DIFFERENCE

    def _wrong(self, role: str, kind: int, new: Mapping[str, Words], old: Mapping[str, Words], step: AdamStep) -> float:
        """The share of errors of a prediction in a sample."""
        size = new[role].size
        start = max(0, (size - _SAMPLE_WORDS) // 2)
        stop = min(size, start + _SAMPLE_WORDS)
        predicted = _prediction(role, kind, new, old, step)(start, stop)
        return int(np.count_nonzero(predicted != new[role][start:stop])) / (stop - start)

    def _encode(
        self,
        role: str,
        kind: int,
        data: memoryview,
        base: memoryview,
        new: Mapping[str, Words],
        old: Mapping[str, Words],
        step: AdamStep,
    ) -> Stored:
        header = PlanesHeader(_MAGIC, 4, False, data.nbytes, base_digest(base))
        check = base_digest(data)
        predict, words = _prediction(role, kind, new, old, step), new[role]

        def differences(start: int, stop: int) -> Words:
            return fold_difference(words[start:stop], predict(start, stop))

        more = _MORE.pack(_ROLES.index(role), kind, check, *astuple(step))
        stored = PlaneEncoder(header, more).encode(differences, data[data.nbytes :])
        if stored.nbytes <= PAYS * data.nbytes:
            return stored
        return b"".join((header.pack(), _MORE.pack(_ROLES.index(role), _AS_IS, check, *astuple(step)), data))

    def _decode(
        self,
        role: str,
        stored: memoryview,
        out: memoryview,
        base: memoryview,
        new: Mapping[str, Words],
        old: Mapping[str, Words],
    ) -> None:
        header = PlanesHeader.read(self.name, _MAGIC, stored, out.nbytes, base, _MORE)
        number, kind, check, *numbers = header.more
        step = AdamStep(*numbers)
        is_of_role = header.width == 4 and out.nbytes % 4 == 0 and number == _ROLES.index(role)
        if not is_of_role or kind > _CONTRACTED or not step.sensible():
            raise damaged(self.name, "its header makes no sense")
        position = HEADER_BYTES + _MORE.size
        if kind == _AS_IS:
            if stored.nbytes - position != out.nbytes:
                raise damaged(self.name, f"{stored.nbytes - position} bytes where {out.nbytes} belong")
            out[:] = stored[position:]
        else:
            predict, words = _prediction(role, kind, new, old, step), new[role]

            def put(start: int, stop: int, folded: Words) -> None:
                unfold_difference(folded, predict(start, stop), words[start:stop])

            PlaneDecoder(self.name, header, stored, position).decode(out[out.nbytes :], put)
        if base_digest(out) != check:
            raise damaged(self.name, f"{role!r} does not come out as it was")


def _prediction(
    role: str, kind: int, new: Mapping[str, Words], old: Mapping[str, Words], step: AdamStep
) -> _Prediction:
    """What to subtract: the base, or what the step must have made of it."""
    if kind not in (_PREDICTED, _CONTRACTED) or role == FIRST:
        return lambda start, stop: old[role][start:stop]

    def predict(start: int, stop: int) -> Words:
        before, now = (
            {name: words[start:stop].view(np.float32) for name, words in arrays.items()} for arrays in (old, new)
        )
        if role == WEIGHTS:
            return predict_weights(before[role], now[FIRST], now[SECOND], step).view(np.uint32)
        second = predict_second_moment(before[role], before[FIRST], now[FIRST], step, kind == _CONTRACTED)
        return second.view(np.uint32)

    return predict


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The optimizer's numbers for the one step between base and state.

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
    old: Floats, old_first: Floats, new_first: Floats, step: AdamStep, contracted: bool
) -> Floats:
    """The new second moment, from the gradient that the change of the first moment implies.

    That gradient is known to a few last bits only, so that a few predictions are off by one.

    Args:
        contracted: whether the last multiplication and the addition were rounded once (fused multiply-add).
    """
    size = old.size
    gradient, result = (SCRATCH.words(4, number, size).view(np.float32) for number in (4, 5))
    weight = np.float32(1 - step.beta1)
    np.subtract(new_first, old_first, out=gradient)
    np.divide(gradient, weight, out=gradient)
    np.add(gradient, old_first, out=gradient)
    np.multiply(old, np.float32(step.beta2), out=result)
    scaled = SCRATCH.words(4, 6, size).view(np.float32)
    np.multiply(gradient, np.float32(1 - step.beta2), out=scaled)
    if contracted:
        wide = SCRATCH.words(8, 4, size).view(np.float64)
        np.multiply(scaled, gradient, out=wide, dtype=np.float64)
        np.add(wide, result, out=wide)
        np.copyto(result, wide, casting="same_kind")
    else:
        np.multiply(scaled, gradient, out=scaled)
        np.add(result, scaled, out=result)
    return _without_nan(result)


def predict_weights(old: Floats, new_first: Floats, new_second: Floats, step: AdamStep) -> Floats:
    """The new weights, exactly as `torch.optim.AdamW` computes them from both new moments."""
    size = old.size
    denominator, result = (SCRATCH.words(4, number, size).view(np.float32) for number in (4, 5))
    np.sqrt(new_second, out=denominator)
    np.divide(denominator, np.float32((1 - step.beta2**step.step) ** 0.5), out=denominator)
    np.add(denominator, np.float32(step.eps), out=denominator)
    update = SCRATCH.words(4, 6, size).view(np.float32)
    np.multiply(new_first, np.float32(-(step.lr / (1 - step.beta1**step.step))), out=update)
    np.divide(update, denominator, out=update)
    np.multiply(old, np.float32(1 - step.lr * step.weight_decay), out=result)
    np.add(result, update, out=result)
    return _without_nan(result)


def _without_nan(result: Floats) -> Floats:
    # Which bits an operation gives to NaN differs between processors.
    if np.isnan(result.min()):  # one pass, and no memory
        result[np.isnan(result)] = 0
    return result
