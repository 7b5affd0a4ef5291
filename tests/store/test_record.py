"""The record of a run is protected by a digest and by its snapshots: no damage makes a place one of another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_engine.copy.transfer import RunText, adopt_run
from ckpt_engine.errors import CorruptError, ForeignError, FormatError
from ckpt_engine.store import names
from ckpt_engine.store.repository import Repository, encode_record, parse_record
from ckpt_engine.store.sealed_json import seal, unseal
from ckpt_engine.store.storage.local import LocalStorage
from tests.store.samples import save


def flips(data: bytes) -> list[bytes]:
    """`data` with each of its bits flipped once."""
    return [
        data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :] for bit in range(len(data) * 8)
    ]


def unprotected(run: str) -> bytes:
    """A record as earlier versions wrote it."""
    return json.dumps({"format": "ckpt-engine", "version": 1, "run": run, "created": 1.75e9}).encode() + b"\n"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(LocalStorage(tmp_path / "run"))


def test_every_flipped_bit_of_sealed_text_is_found() -> None:
    """Wherever it is: in a value, a name, the digest, its name, or the white space at the end."""
    text = seal({"note": 'grüße, "digest": "no"', "number": 1.5, "rows": [{"a": None}]})
    assert unseal(text, "here") == {"note": 'grüße, "digest": "no"', "number": 1.5, "rows": [{"a": None}]}
    for end in (b"\n", b" " * 9 + b"\n"):
        assert unseal(text + end, "here") == unseal(text, "here")
        for damaged in flips(text + end):
            with pytest.raises(FormatError, match="here"):
                unseal(damaged, "here")


def test_text_without_a_digest_is_read_as_ever() -> None:
    """Earlier versions wrote no digest."""
    assert unseal(b'{"run": "x"}\n', "here") == {"run": "x"}
    for text, error in ((b"[1]", ForeignError), (b"{", CorruptError), (b"\xff", CorruptError), (b"", CorruptError)):
        with pytest.raises(error, match="here"):
            unseal(text, "here")


def test_a_flipped_bit_in_the_record_never_makes_it_another_run(repository: Repository, tmp_path: Path) -> None:
    """The snapshots say whose it is, and the next writer mends it; without any it is damaged, and that is said."""
    run = repository.create_if_absent().run
    path = tmp_path / "run" / names.RECORD
    text = path.read_bytes()
    for damaged in flips(text):
        with pytest.raises(FormatError):
            parse_record(damaged, "here")
    for damaged in flips(text)[::97]:
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"ckpt\.json") as caught:
            Repository(repository.storage).record()
        assert caught.value.hint is not None
    path.write_bytes(text)
    save(repository)
    for damaged in (b"{}", *flips(text)[::7]):
        path.write_bytes(damaged)
        assert Repository(repository.storage).run_id == run
        assert Repository(repository.storage).create_if_absent().run == run
        assert parse_record(path.read_bytes(), "here").run == run


def test_an_older_record_is_believed_only_where_the_snapshots_agree(repository: Repository, tmp_path: Path) -> None:
    """It has no digest: each flipped bit of its run is found by the manifests, and the next writer protects it."""
    run = repository.create_if_absent().run
    path = tmp_path / "run" / names.RECORD
    path.write_bytes(unprotected(run))
    assert Repository(repository.storage).run_id == run
    save(Repository(repository.storage))
    text = unprotected(run)
    at = text.index(run.encode())
    for damaged in flips(text)[at * 8 : (at + len(run)) * 8]:
        path.write_bytes(damaged)
        assert Repository(repository.storage).run_id == run
    path.write_bytes(text.replace(run[:8].encode(), b"0" * 8))
    record = Repository(repository.storage).create_if_absent()
    assert path.read_bytes() == encode_record(record)
    assert record.created == 1.75e9


def test_a_record_of_another_run_gives_way_to_the_snapshots(repository: Repository, tmp_path: Path) -> None:
    """Somebody has put it there by hand; what was saved decides."""
    run = repository.create_if_absent().run
    save(repository)
    other = Repository(LocalStorage(tmp_path / "other")).create_if_absent()
    (tmp_path / "run" / names.RECORD).write_bytes(encode_record(other))
    assert Repository(repository.storage).create_if_absent().run == run
    assert Repository(repository.storage).run_id == run


@pytest.mark.parametrize("has_digest", [True, False])
def test_a_place_whose_record_is_damaged_stays_a_place_of_its_run(
    repository: Repository, tmp_path: Path, has_digest: bool
) -> None:
    """It is mended when it is taken; a place that has another run's snapshots is refused and left alone."""
    mine = RunText.of(Repository(repository.storage)) if repository.create_if_absent() else None
    assert mine is not None
    save(repository)
    path = tmp_path / "run" / names.RECORD
    text = path.read_bytes() if has_digest else unprotected(mine.run)
    at = text.index(mine.run.encode())
    path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
    assert adopt_run(mine, repository.storage).run_id == mine.run
    assert parse_record(path.read_bytes(), "here").run == mine.run
    other = Repository(LocalStorage(tmp_path / "other"))
    other.create_if_absent()
    save(other)
    for content in (None, b"damaged"):
        record = tmp_path / "other" / names.RECORD
        record.unlink() if content is None else record.write_bytes(content)
        with pytest.raises(ForeignError, match="another run"):
            adopt_run(mine, other.storage)
        assert record.exists() is (content is not None)
