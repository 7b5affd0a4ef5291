"""Manifests survive encoding exactly, and no damage to them goes unnoticed."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_engine.errors import CorruptError, ForeignError, FormatError, NewerFormatError, SealError
from ckpt_engine.store import manifest_codec, names
from ckpt_engine.store.container import digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.manifest_codec import decode, decode_info, encode
from tests.store.samples import info, manifest

_names = st.text(max_size=12).filter(lambda name: name not in ("$", "slimmed"))
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=8,
)
_ids = st.builds(
    lambda seq, step, tail: (seq, step, f"{seq:08d}-s{step:010d}-{tail:08x}"),
    st.integers(0, 10**9),
    st.integers(0, 10**11),
    st.integers(0, 2**32 - 1),
)


@st.composite
def _manifests(draw: st.DrawFn) -> Manifest:
    seq, step, snapshot = draw(_ids)
    files = tuple(
        DataFile(f"data/{snapshot}-r{rank:05d}.safetensors", 10_000) for rank in range(draw(st.integers(1, 3)))
    )
    places, starts, sizes = (
        st.integers(0, len(files) - 1),
        st.integers(0, 5000),
        st.integers(1, 50).map(lambda n: 16 * n),
    )
    pieces = st.builds(
        Piece,
        file=places,
        offset=starts,
        nbytes=st.integers(1, 800),
        digest=st.just(digest(b"x")),
        raw_nbytes=sizes,
        codec=st.sampled_from(["zstd", "delta"]),
        base=st.none() | st.just(snapshot),
        raw_digest=st.none() | st.just(digest(b"y")),
    )
    pieces |= st.builds(lambda file, offset, n: Piece(file, offset, n, digest(b"x"), n), places, starts, sizes)
    entries = st.builds(
        lambda dtype, found: Entry(
            dtype[0], (sum(piece.raw_nbytes for piece in found) // dtype[1],), tuple(found), dtype[2]
        ),
        dtype=st.sampled_from([("float32", 4, "F32"), ("complex128", 16, "U8")]),
        found=st.lists(pieces, max_size=3),
    )
    about = SnapshotInfo(
        snapshot,
        seq,
        step,
        draw(st.none() | st.integers(0, 99)),
        draw(_names),
        draw(st.floats(0, 2e9)),
        draw(st.integers(0, 2**50)),
        draw(st.dictionaries(_names, st.floats(), max_size=3)),
        draw(st.none() | st.just(snapshot)),
        draw(st.dictionaries(_names, st.integers(0, 2**40), max_size=3)),
    )
    table = draw(st.dictionaries(_names, entries, max_size=3))
    notes = draw(st.dictionaries(_names, _json, max_size=2))
    kept = st.dictionaries(_names, st.dictionaries(sizes, pieces, max_size=2), max_size=2)
    bases = draw(st.dictionaries(_names, kept, max_size=2))
    tree = draw(st.dictionaries(_names, _json, max_size=3))
    return Manifest(about, "ab" * 16, {"size": len(files)}, {"torch": "2"}, files, table, tree, notes, bases)


def _comparable(value: SnapshotInfo) -> SnapshotInfo:
    metrics = {name: "nan" if math.isnan(number) else number for name, number in value.metrics.items()}
    return dataclasses.replace(value, metrics=metrics)


@given(_manifests())
def test_decoding_an_encoded_manifest_gives_the_same_values(original: Manifest) -> None:
    """Every field comes back, floats bit for bit, NaN metrics included."""
    decoded = decode(encode(original))
    assert _comparable(decoded.info) == _comparable(original.info)
    assert dataclasses.replace(decoded, info=original.info) == original


@given(_manifests())
def test_the_head_alone_gives_the_same_info(original: Manifest) -> None:
    """A listing reads only the head; where that is too short it says so instead of guessing."""
    head = encode(original)[: manifest_codec.HEAD_BYTES]
    found = decode_info(head)
    assert found is not None
    assert _comparable(found) == _comparable(original.info)
    assert decode_info(encode(original)[:130]) is None or len(encode(original)) < 130


def test_a_manifest_is_strict_json_that_anyone_can_read() -> None:
    """NaN and infinities, which JSON has not, appear as strings; everything else is plain."""
    data = encode(manifest(info(metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(data, parse_constant=refuse)
    assert document["manifest"]["info"]["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1}
    body = data[data.index(b'"manifest":') + len(b'"manifest":') : -2]
    assert document["digest"] == digest(body)
    assert decode(data).info.metrics["c"] == -math.inf


def test_what_is_not_json_is_refused_at_encoding() -> None:
    """NaN in the tree would make a file that other languages cannot parse."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(dataclasses.replace(manifest(info()), tree={"lr": math.nan}))


def test_every_single_flipped_bit_is_noticed() -> None:
    """No bit of a manifest can change without an error."""
    good = encode(manifest(info()))
    for position in range(len(good)):
        for bit in range(8):
            data = bytearray(good)
            data[position] ^= 1 << bit
            with pytest.raises(FormatError):
                decode(bytes(data))


def test_every_truncation_is_noticed() -> None:
    """A manifest cut anywhere is damaged, and its head alone never crashes a listing."""
    good = encode(manifest(info()))
    for length in range(len(good)):
        with pytest.raises(CorruptError):
            decode(good[:length])
        with suppress(FormatError):
            decode_info(good[:length])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode) | _json.map(json.dumps).map(str.encode))
@example(names.SEALED)
def test_anything_else_is_a_clear_error(data: bytes) -> None:
    """Garbage, zeros and other people's JSON are refused as corrupt or foreign.

    Hypothesis draws our own constants, too: what begins as a sealed object does is refused as one.
    """
    with pytest.raises(SealError if data.startswith(names.SEALED) else (CorruptError, ForeignError)):
        decode(data)
    with suppress(FormatError):
        assert decode_info(data) is None


def test_deep_nesting_is_a_clear_error() -> None:
    """A document made to exhaust the stack is refused like any other garbage."""
    for data in (b"[" * 100_000, encode(manifest(info()))[:95] + b"[" * 100_000):
        with pytest.raises(FormatError):
            decode(data)
        with suppress(FormatError):
            assert decode_info(data) is None
    body = encode(manifest(info()))[len(b'{"digest":"xxh3-128:","manifest":') + 32 : -2]
    deep = body.replace(b'"v":[]', b'"v":' + b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(CorruptError, match="RecursionError"):
        decode(b'{"digest":"%s","manifest":%s}\n' % (digest(deep).encode(), deep))


def _edited(**changes: object) -> bytes:
    """A manifest with changed fields and a digest that fits: what another version, or a forger, would write."""
    body = json.loads(encode(manifest(info())))["manifest"] | changes
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"digest":"%s","manifest":%s}\n' % (digest(text).encode(), text)


def test_a_newer_manifest_is_named_newer_and_not_corrupt() -> None:
    """The message says which versions and what to do; also when that version uses another digest."""
    for data in (_edited(version=6), re.sub(rb'"xxh3-128:[0-9a-f]+"', b'"blake9:00ff"', _edited(version=6))):
        for read in (decode, decode_info):
            with pytest.raises(NewerFormatError, match=r"version 6, this program reads up to 5.*upgrade"):
                read(data)


def test_another_programs_manifest_is_foreign() -> None:
    """Same envelope, other format name."""
    for read in (decode, decode_info):
        with pytest.raises(ForeignError, match="other-tool"):
            read(_edited(format="other-tool"))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "data/../ckpt.json", "snapshots/x.json", "data/notes.txt", ""]
)
def test_a_manifest_cannot_name_files_outside_the_run(name: str) -> None:
    """A tampered manifest with a fitting digest cannot make anyone read or delete other files."""
    with pytest.raises(CorruptError, match="bad data file name"):
        decode(_edited(files=[{"name": name, "nbytes": 5000}]))


def test_a_manifest_that_contradicts_itself_is_corrupt() -> None:
    """Missing keys, pieces outside their file, an id that is none."""
    about = json.loads(encode(manifest(info())))["manifest"]["info"]
    piece = {"file": 0, "offset": 4090, "nbytes": 99, "digest": "x"}
    entry = {"dtype": "uint8", "shape": [99], "container_dtype": "U8", "pieces": [piece]}
    for changes in (
        {"entries": {"w": entry}},
        {"entries": {"w": entry | {"pieces": [piece | {"nbytes": -1}]}}},
        {"entries": {"w": entry | {"pieces": [piece | {"file": -1, "nbytes": 1}]}}},
        {"entries": {"w": entry | {"pieces": [piece | {"file": 7}]}}},
        {"entries": {"w": entry | {"pieces": [piece | {"offset": 0, "alias": 1}]}}},
        {"entries": {"w": {}}},
        {"entries": []},
        {"files": None},
        {"info": about | {"id": "latest"}},
        {"info": about | {"seq": about["seq"] + 1}},
        {"info": []},
    ):
        with pytest.raises(CorruptError):
            decode(_edited(**changes))


def test_decoding_looks_for_no_garbage() -> None:
    """All that it makes stays: in a process with torch each look takes as long as reading a hundred megabytes."""
    data = encode(dataclasses.replace(manifest(info()), notes={"many": [[n] for n in range(5000)]}))
    looked = list[str]()
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: looked.append(phase))
    gc.set_threshold(100)
    try:
        gc.collect()
        looked.clear()
        decode(data)
        during = list(looked)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert gc.isenabled()
    assert len(during) <= 4, "at most one before it and one after it"
