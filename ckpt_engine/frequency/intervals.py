"""The optimal checkpoint interval for failures at a constant rate.

Symbols of the literature, in seconds: `cost` (δ) blocks training at each checkpoint, `mtbf` (M) is the mean time
between failures, R is detection, restart and load.

Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006.
"""

from __future__ import annotations

import math

_BRANCH_POINT = -1.0 / math.e


def optimal(cost: float, mtbf: float) -> float:
    """The exact optimum of the exponential model, M (1 + W0(-exp(-1 - δ/M))); it does not depend on R.

    Defined for every cost ≥ 0 and mtbf ≥ 0, infinite ones included: 0 where checkpoints are free or failures
    permanent, at most `mtbf`, and infinite where failures never happen and checkpoints cost something.
    """
    if cost <= 0.0 or mtbf <= 0.0:
        return 0.0
    if math.isinf(mtbf):
        return math.inf
    ratio = cost / mtbf
    if ratio < 1e-6:
        # 1 + W0 cancels next to the branch point; its series does not.
        p = math.sqrt(-2.0 * math.expm1(-ratio))
        return mtbf * (p - p * p / 3.0 + 11.0 / 72.0 * p**3)
    return mtbf * (1.0 + lambert_w0(-math.exp(-1.0 - ratio)))


def lambert_w0(z: float) -> float:
    """The principal branch of Lambert's W (w e^w = z) for real z ≥ -1/e, by Halley's iteration.

    Source: Corless et al., "On the Lambert W function", 1996, equation 5.9 and the branch point series 4.22.

    Raises:
        ValueError: z below -1/e.
    """
    if z < _BRANCH_POINT:
        if z < _BRANCH_POINT * (1.0 + 1e-15):
            raise ValueError(f"lambert_w0 is real from -1/e on, not at {z!r}")
        return -1.0
    if math.isinf(z):
        return math.inf
    if z < -0.25:
        p = math.sqrt(max(0.0, 2.0 * (1.0 + math.e * z)))
        w = -1.0 + p - p * p / 3.0 + 11.0 / 72.0 * p**3
    elif z < 3.0:
        w = math.log1p(z) * 0.75
    else:
        w = math.log(z) - math.log(math.log(z))
    for _ in range(50):
        exp_w = math.exp(w)
        error = w * exp_w - z
        slope = exp_w * (w + 1.0)
        if error == 0.0 or slope == 0.0:
            break
        change = error / (slope - (w + 2.0) * error / (2.0 * w + 2.0))
        w -= change
        if abs(change) <= 1e-15 * (1.0 + abs(w)):
            break
    return w
