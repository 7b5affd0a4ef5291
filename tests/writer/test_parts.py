"""The pure parts of the writer: skeletons, pieces, values on the wire, and the client."""

from __future__ import annotations

import math
import threading
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.copy.job import (
    EntryLayout,
    ErrorRecord,
    GroupMark,
    JobDone,
    KeySkeleton,
    Layout,
    PersistJob,
    TrainedGroup,
    WriterConfig,
    job_from_json,
    to_json,
)
from ckpt_engine.copy.write_snapshot import LEAST_PIECE_BYTES, CutLayout, cut, digesting, part_piece_bytes
from ckpt_engine.errors import CkptError, LeaseHeldError, StorageFullError, WriterError
from ckpt_engine.observe.events import Notice, WriterLost
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.lease_holder import LeaseHolder
from ckpt_engine.writer import channel
from ckpt_engine.writer.channel import decode, encode
from ckpt_engine.writer.client import WriterLife
from ckpt_engine.writer.launch import ThreadWriter
from ckpt_engine.writer.messages import Kind


def value(index: int) -> dict[str, Any]:
    return {"$": "v", "i": index}


def test_a_skeleton_takes_new_values_each_time() -> None:
    """Placeholders at any depth are replaced, and one filling does not show in the next."""
    skeleton = KeySkeleton({"a": [value(1), {"$": "tuple", "items": [value(0)]}], "b": {"c": 3}})
    assert skeleton.fill([10, {"x": 1}]) == {"a": [{"x": 1}, {"$": "tuple", "items": [10]}], "b": {"c": 3}}
    assert skeleton.fill([11, None])["a"] == [None, {"$": "tuple", "items": [11]}]


def test_values_are_inserted_as_they_are() -> None:
    """A value that looks like a placeholder is none."""
    assert KeySkeleton([value(0)]).fill([value(0)]) == [value(0)]


def test_a_skeleton_may_be_one_value() -> None:
    """A top-level key whose whole state is a number."""
    assert KeySkeleton(value(0)).fill([5]) == 5


def test_a_skeleton_names_its_entries_once() -> None:
    """Tied tensors count once; plain data that has an "entry" key does not count."""
    tensor = {"$": "tensor", "entry": "w"}
    assert KeySkeleton([tensor, {"entry": "not"}, tensor, {"$": "ndarray", "entry": "v"}]).entries == ("w", "v")


@pytest.mark.parametrize("values", [[], [1, 2]])
def test_too_few_or_too_many_values_are_refused(values: list[Any]) -> None:
    """A job that does not fit its skeleton must not become a snapshot."""
    with pytest.raises(WriterError, match="1 placeholders"):
        KeySkeleton([value(0)]).fill(values)


@pytest.mark.parametrize("bad", [{"$": "v"}, {"$": "v", "i": -1}, {"$": "v", "i": "0"}])
def test_a_placeholder_without_a_number_is_refused(bad: dict[str, Any]) -> None:
    """It is an error and not stored as data."""
    with pytest.raises(WriterError, match="placeholder"):
        KeySkeleton([bad])


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    item=st.sampled_from([1, 2, 8]),
    piece=st.integers(1, 64),
    offset=st.integers(0, 99),
)
def test_pieces_cover_an_entry_exactly(shape: list[int], item: int, piece: int, offset: int) -> None:
    """In order, without gaps, none too big, and at row boundaries wherever a row fits a piece."""
    nbytes = math.prod(shape) * item
    found = cut(EntryLayout("x", "int8", tuple(shape), "I8", offset, nbytes), most_bytes=piece)
    position = offset
    for extent in found:
        assert extent.start == position
        assert position < extent.stop <= position + piece
        position = extent.stop
    assert position == offset + nbytes
    row_bytes = nbytes // shape[0] if shape and shape[0] else nbytes
    if 0 < row_bytes <= piece:
        assert all((extent.start - offset) % row_bytes == 0 for extent in found)
        assert len(found) <= math.ceil(nbytes / (piece // row_bytes * row_bytes))


def part_of(rows: int, whole_rows: int, row_bytes: int = 4096, name: str = "part") -> EntryLayout:
    shape, whole = (rows, row_bytes // 4), (whole_rows, row_bytes // 4)
    return EntryLayout(name, "float32", shape, "F32", 0, rows * row_bytes, whole)


@given(rows=st.integers(1, 20) | st.integers(1, 40_000), row_bytes=st.sampled_from([4, 4096, 250_001 * 4]))
def test_a_part_of_an_array_has_some_sixteen_pieces(rows: int, row_bytes: int) -> None:
    """Sixteenths, of whole rows where those are small, of at least 128 KiB and at most 16 MiB."""
    part = part_of(rows, rows * 2, row_bytes)
    sizes = [extent.stop - extent.start for extent in cut(part)]
    assert sum(sizes) == part.nbytes
    assert not any(nbytes % 4 for nbytes in sizes)
    assert max(sizes) <= min(max(part.nbytes // 16 + 4096, LEAST_PIECE_BYTES), PIECE_BYTES)
    assert max(sizes) * 32 >= min(part.nbytes, LEAST_PIECE_BYTES * 16)


@pytest.mark.parametrize(("ranks", "arrays"), [(8, 100), (512, 400), (4096, 1000)])
def test_the_pieces_of_many_ranks_are_limited(ranks: int, arrays: int) -> None:
    """Every rank reads the manifest of all: a state of a tebibyte has a quarter of a million pieces more than parts."""
    rows = (1 << 40) // arrays // 4096 // ranks
    parts = [part_of(rows, rows * ranks, name=f"p{number}") for number in range(arrays)]
    least = part_piece_bytes(parts)
    assert len(cut(parts[0], least)) * arrays * ranks <= (1 << 18) + arrays * ranks


def test_digests_are_those_of_the_pieces() -> None:
    """An array of several pieces and a small one: every digest is of exactly its bytes."""
    rows = PIECE_BYTES // 1000 + 5
    big = EntryLayout("big", "uint8", (rows, 1000), "U8", 16, rows * 1000)
    small = EntryLayout("small", "uint8", (3,), "U8", 16 + big.nbytes, 3)
    layout = Layout(16, small.offset + 3, (big, small))
    image = memoryview(bytes(range(251)) * (layout.nbytes // 251 + 1))[: layout.nbytes]
    cut_layout = CutLayout.of(layout)
    entries = cut_layout.entries(digesting(image, cut_layout).result())
    assert [len(entries[name].pieces) for name in ("big", "small")] == [2, 1]
    for entry in entries.values():
        for piece in entry.pieces:
            assert piece.digest == digest(image[piece.offset : piece.offset + piece.nbytes])
            assert (piece.file, piece.codec, piece.raw_nbytes) == (0, "raw", piece.nbytes)
    assert cut_layout.nbytes == big.nbytes + 3


def test_abandoned_digesting_lets_go_of_the_memory() -> None:
    """After `abandon` the image can be released, which the next mapping of a slot needs."""
    layout = Layout(0, 1 << 20, (EntryLayout("x", "uint8", (1 << 20,), "U8", 0, 1 << 20),))
    buffer = bytearray(1 << 20)
    image = memoryview(buffer)
    digesting(image, CutLayout.of(layout)).abandon()
    image.release()
    buffer.clear()  # BufferError if anything still looks at it


@pytest.mark.parametrize(
    "entry",
    [
        EntryLayout("x", "uint8", (4,), "U8", 4, 4),
        EntryLayout("x", "uint8", (99,), "U8", 8, 99),
        EntryLayout("x", "uint8", (0,), "U8", 8, 4),
    ],
    ids=["in the header", "beyond the end", "bytes of nothing"],
)
def test_a_layout_that_contradicts_itself_is_refused(entry: EntryLayout) -> None:
    """Instead of reading outside the slot."""
    with pytest.raises(ValueError, match="entry 'x'"):
        CutLayout.of(Layout(8, 32, (entry,)))


MARKS = (GroupMark(True, -5, 7),)
JOB = PersistJob(7, 0, {"m": [1, None]}, 5, None, "end", {"l": 0.5}, 1.5, 2.5, "p", {"n": []}, marks=MARKS)


def test_values_survive_the_wire() -> None:
    """Every value is equal to itself after JSON."""
    groups = (TrainedGroup("group 0 of sgd", ("a",), ("b", "c"), ()),)
    layout = Layout(8, 32, (EntryLayout("a", "float32", (1, 2), "F32", 8, 8),), groups=groups)
    done = JobDone(4, None, ErrorRecord("CKPT301", "full", "free space"))
    config = WriterConfig("/x", keep={"last": 2}, holder=LeaseHolder(1, "here", 2.0, "python"))
    assert msgspec.convert(decode(encode(to_json(layout))), Layout) == layout
    assert job_from_json(decode(encode(to_json(JOB)))) == JOB
    for other in (done, JobDone(4, "id"), config):
        assert msgspec.convert(decode(encode(asdict(other))), type(other)) == other


@pytest.mark.parametrize("error", [StorageFullError("no space", hint="free some"), LeaseHeldError("held")])
def test_errors_keep_class_and_text_across_the_wire(error: CkptError) -> None:
    """The trainer raises what the writer met."""
    again = ErrorRecord.of(error).exception()
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_stranger_error_is_named() -> None:
    """What is not of our tree arrives as a `WriterError` with the original type's name."""
    assert "ZeroDivisionError: x" in str(ErrorRecord.of(ZeroDivisionError("x")).exception())


def test_a_lost_writer_loses_its_open_jobs_once() -> None:
    """Acknowledged jobs keep their outcome; each open one is lost; `WriterLost` comes last and once."""
    client = ThreadWriter(WriterConfig("tier"))
    for number in (1, 2):
        client.submit(PersistJob(number, 0, {}, 5, None, "x", {}, 0.0, 0.0))
    client._hear({"kind": Kind.DONE, "done": asdict(JobDone(1, "a"))})
    client._lose(ErrorRecord("CKPT600", "gone"), expected=False)
    client._lose(ErrorRecord("CKPT600", "again"), expected=False)
    ok, done, lost = client.poll()
    assert ok == JobDone(1, "a")
    assert done == JobDone(2, None, ErrorRecord("CKPT600", "gone"), lost=True)
    assert lost == WriterLost("gone")
    assert client.poll() == []
    with pytest.raises(WriterError, match="gone"):
        client.submit(JOB)
    assert not client.wait(60.0)  # returns at once: nothing will come


def test_a_writer_that_continues_alone_is_not_waited_for_again() -> None:
    """What it says of its copies after that does not take it back, nor does closing it."""
    client = ThreadWriter(WriterConfig("tier"))
    client._hear({"kind": Kind.CLOSED, "left": "a copy", "said": True, "copies": True})
    client._hear({"kind": Kind.COPYING, "waits": "", "seconds": 1.0, "copies": True})
    client._reached(WriterLife.CLOSING)
    assert client._life is WriterLife.ALONE


def test_waiting_ends_when_something_comes() -> None:
    """A message wakes the waiting thread."""
    client = ThreadWriter(WriterConfig("tier"))
    assert not client.wait(0.0)
    notice = channel.event(Notice("INFO", "x"))
    speaker = threading.Thread(target=client._hear, args=(notice,))
    speaker.start()
    assert client.wait(60.0)
    speaker.join()
    assert client.poll() == [Notice("INFO", "x")]
