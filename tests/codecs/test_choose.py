"""The choice of codecs: simulated tiers, in which the right answer is known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.store.codecs.codec import (
    LEAST_GAIN,
    MOST_RESTORE,
    RETRY_SNAPSHOTS,
    CodecMeasurements,
    EncodingLimits,
    Knowledge,
    Speed,
    choose,
    class_of,
    due,
    learn,
)

GB = 10**9
PLANES = Speed(1.2, 1 / (0.8 * GB), 1 / (1.2 * GB))
DELTA = Speed(1.5, 1 / (0.5 * GB), 1 / (0.9 * GB))
ADAM = Speed(3.4, 1 / (0.3 * GB), 1 / (0.4 * GB))


class Kind(NamedTuple):
    """A class of tensors, its bytes, and what is known of each codec."""

    name: str
    nbytes: int
    speeds: Mapping[str, Speed]


def _choose(kinds: Sequence[Kind], limits: EncodingLimits) -> tuple[dict[str, str], str]:
    known = {(one.name, codec): CodecMeasurements((had,), 0) for one in kinds for codec, had in one.speeds.items()}
    return choose(known, {one.name: one.nbytes for one in kinds}, limits)


STATE = Kind("values/float32", GB, {"byteplane-zstd": PLANES, "delta-byteplane-zstd": DELTA, "adam": ADAM})


@pytest.mark.parametrize(
    ("link", "codec"), [(0.01, "adam"), (0.05, "adam"), (5.0, "raw"), (2.5, "raw")], ids=lambda v: str(v)
)
def test_slow_links_get_small_streams_and_fast_disks_raw_ones(link: float, codec: str) -> None:
    """Below 100 MB/s the best ratio wins; a disk faster than the codec gets raw bytes."""
    codecs, _ = _choose([STATE], EncodingLimits(link * GB, 1, 60))
    assert codecs == {"values/float32": codec}
    assert _cost([STATE], codecs)[0] <= GB


def test_the_processor_budget_is_kept() -> None:
    """With two seconds to spend on a gigabyte the cheaper codec is chosen, and the line says why."""
    codecs, why = _choose([STATE], EncodingLimits(0.02 * GB, 1, 2.1))
    assert codecs["values/float32"] == "delta-byteplane-zstd" and _cost([STATE], codecs)[1] <= 2.1
    assert "budget" in why and "\n" not in why and "delta-byteplane-zstd" in why
    assert "50 s → 33 s at" in why


def test_cheap_savings_come_first() -> None:
    """If time suffices for one class only, it is the one where a second saves most."""
    weights = Kind("values/bfloat16", GB, {"delta-byteplane-zstd": Speed(4, 1 / GB, 1 / GB)})
    noise = Kind("exp_avg/float32", GB, {"byteplane-zstd": Speed(1.1, 1 / GB, 1 / GB)})
    codecs, _ = _choose([noise, weights], EncodingLimits(0.1 * GB, 1, 1.0))
    assert codecs == {"values/bfloat16": "delta-byteplane-zstd", "exp_avg/float32": "raw"}


def test_codecs_that_restore_too_slowly_are_left_out() -> None:
    """Reading back takes at most one and a half times as long as raw."""
    slow = Kind("values/float32", GB, {"zstd": Speed(3, 1 / GB, 1 / (0.05 * GB))})
    assert _choose([slow], EncodingLimits(0.1 * GB, 1, 60))[0]["values/float32"] == "raw"
    assert _choose([slow], EncodingLimits(0.1 * GB, 4, 60))[0]["values/float32"] == "zstd"


def _cost(kinds: Sequence[Kind], codecs: Mapping[str, str]) -> tuple[float, float]:
    """The bytes that are stored of these classes, and the processor time of encoding them."""
    raw = Speed(1, 0, 0)
    each = [(kind.nbytes, kind.speeds[codecs[kind.name]] if codecs[kind.name] != "raw" else raw) for kind in kinds]
    return sum(n / speed.ratio for n, speed in each), sum(n * speed.encode_seconds_per_byte for n, speed in each)


speeds = st.builds(Speed, st.floats(0.9, 20), st.floats(1e-11, 1e-7), st.floats(1e-11, 1e-8))
classes = st.lists(
    st.builds(
        Kind,
        st.sampled_from("abcd"),
        st.integers(0, 10**10),
        st.dictionaries(st.sampled_from(["zstd", "byteplane-zstd", "rows"]), speeds),
    ),
    max_size=3,
    unique_by=lambda kind: kind.name,
)


@given(kinds=classes, link=st.floats(1e6, 1e10), cores=st.sampled_from([0.5, 1, 8]), cpu=st.floats(0, 100))
def test_a_choice_is_never_worse_than_raw_nor_over_budget(
    kinds: list[Kind], link: float, cores: float, cpu: float
) -> None:
    """Whatever was measured: within the budget, no slower than raw, and every class has a codec that it knows."""
    codecs, _ = _choose(kinds, EncodingLimits(link, cores, cpu))
    nbytes, seconds = _cost(kinds, codecs)
    assert max(nbytes / link, seconds / cores) <= sum(kind.nbytes for kind in kinds) / link * (1 + 1e-9)
    assert seconds <= cpu * (1 + 1e-9)
    assert set(codecs) == {kind.name for kind in kinds}
    assert all(codec == "raw" or codec in kind.speeds for kind in kinds for codec in [codecs[kind.name]])


def _allowed(kind: Kind, link: float) -> list[str]:
    """Codecs that gain enough and are read back on one core in at most one and a half times what raw takes."""
    return [
        codec
        for codec, speed in kind.speeds.items()
        if speed.ratio >= LEAST_GAIN and speed.decode_seconds_per_byte <= MOST_RESTORE / link
    ]


@given(kinds=classes, link=st.floats(1e7, 1e9))
def test_a_choice_is_close_to_the_best_one(kinds: list[Kind], link: float) -> None:
    """Against all combinations allowed: savings in order of worth lose at most the last step, which is one class's."""
    limits = EncodingLimits(link, 1, 1e9)
    chosen, _ = _choose(kinds, limits)

    def seconds(codecs: Mapping[str, str]) -> float:
        nbytes, cpu = _cost(kinds, codecs)
        return max(nbytes / link, cpu)

    names = [kind.name for kind in kinds]
    every = itertools.product(*[["raw", *_allowed(kind, link)] for kind in kinds])
    best = min(seconds(dict(zip(names, codecs, strict=True))) for codecs in every)
    largest = max((kind.nbytes for kind in kinds), default=0)
    assert seconds(chosen) <= best + largest / link + 1e-9


def _simulate(rounds: list[tuple[float, Speed]]) -> list[str]:
    """The codec of each snapshot of a run with one class, measured at each snapshot at which it is in use or due."""
    known: Knowledge = {}
    used = "raw"
    chosen = []
    for number, (link, truth) in enumerate(rounds):
        tried = set(due(known, ["w"], ["delta"], number)) | ({("w", used)} - {("w", "raw")})
        known = learn(known, dict.fromkeys(tried, truth), number)
        used = choose(known, {"w": GB}, EncodingLimits(link, 1, 60))[0]["w"]
        chosen.append(used)
    return chosen


def test_a_codec_that_loses_is_switched_off_within_two_snapshots() -> None:
    """It stops saving, becomes slow, or the link becomes fast: the second snapshot after that is raw at the latest."""
    good, useless, slow = Speed(3, 2e-9, 2e-9), Speed(1.01, 2e-9, 2e-9), Speed(3, 5e-8, 2e-9)
    for after in ((0.1 * GB, useless), (0.1 * GB, slow), (5 * GB, good)):
        chosen = _simulate([(0.1 * GB, good)] * 5 + [after] * 5)
        assert chosen[:5] == ["delta"] * 5
        assert set(chosen[6:]) == {"raw"}


def test_one_slow_measurement_changes_nothing() -> None:
    """Another process on the machine makes one encoding slow: the codec stays."""
    good, slow = Speed(3, 2e-9, 2e-9), Speed(3, 5e-8, 2e-9)
    assert set(_simulate([(0.1 * GB, good)] * 5 + [(0.1 * GB, slow)] + [(0.1 * GB, good)] * 3)) == {"delta"}


def test_a_codec_that_was_switched_off_gets_another_chance() -> None:
    """It is measured again after some snapshots and comes back once it pays."""
    good, useless = Speed(3, 2e-9, 2e-9), Speed(1.0, 2e-9, 2e-9)
    chosen = _simulate([(0.1 * GB, useless)] * 5 + [(0.1 * GB, good)] * (RETRY_SNAPSHOTS + 1))
    assert chosen[:5] == ["raw"] * 5 and chosen[-1] == "delta"


def test_classes_tell_moments_from_weights() -> None:
    """A class is a role and a dtype."""
    assert class_of("optimizer/state/0/exp_avg_sq", "float32") == "exp_avg_sq/float32"
    assert class_of("optimizer/state/0/exp_avg", "float32") == "exp_avg/float32"
    assert class_of("model/layer/weight", "bfloat16") == "values/bfloat16"
