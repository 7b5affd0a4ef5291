"""Runs made with the store alone, and a way to call the command line as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import termios
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_engine.cli.main import main
from ckpt_engine.store import container, names
from ckpt_engine.store.container import PIECE_BYTES, digest
from ckpt_engine.store.manifest import DataFile, Entry, Manifest, Piece, SnapshotInfo
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage

CREATED = 1_700_000_000.0


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ckpt(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `ckpt` in this process."""

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(end.value.code if isinstance(end.value.code, int) else 1, out, err)

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `ckpt` in this process, with standard output and error in a terminal of 80 × 24 or so many columns."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: object, columns: int = 80) -> Screen:
        controller, device = pty.openpty()
        termios.tcsetwinsize(device, (24, columns))
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.extend(iter(partial(_read, controller), b"")), daemon=True)
        reader.start()
        kept = {number: os.dup(number) for number in (1, 2)}
        try:
            with os.fdopen(os.dup(device), "w", buffering=1) as screen, contextlib.ExitStack() as stack:
                for number in kept:
                    os.dup2(device, number)
                stack.enter_context(contextlib.redirect_stdout(screen))
                stack.enter_context(contextlib.redirect_stderr(screen))
                with pytest.raises(SystemExit) as end:
                    main([str(argument) for argument in arguments])
        finally:
            for number, before in kept.items():
                os.dup2(before, number)
                os.close(before)
            os.close(device)
            reader.join(30.0)
            os.close(controller)
        code = 0 if end.value.code is None else end.value.code
        return Screen(code if isinstance(code, int) else 1, b"".join(read).decode())

    return run


def _read(controller: int) -> bytes:
    try:
        return os.read(controller, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@dataclass(frozen=True)
class Screen:
    """What a command wrote to its terminal and how it ended."""

    code: int
    out: str

    @property
    def lines(self) -> list[str]:
        """As they stand in the end: without colours, and of a line that changed the last form."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.out.replace("\r\n", "\n"))
        return [line.rpartition("\r")[2] for line in plain.split("\n") if line]


class RunFolder:
    """A run on disk that grows by hand-made snapshots."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repository = Repository(open_storage(path))
        self.repository.create_if_absent()

    def add(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        tree: Mapping[str, Any] | None = None,
        **info: Any,
    ) -> str:
        """A snapshot with these entries; without a tree, one in which each entry `component/key` is a tensor."""
        blobs = {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}
        forms = {n: container.container_form(str(a.dtype), a.shape, len(blobs[n])) for n, a in arrays.items()}
        header = container.build_header([(n, *forms[n], len(blobs[n])) for n in arrays])
        snapshot = names.snapshot_id(self.repository.next_seq(), step)
        offset, entries = len(header), {}
        for name, blob in blobs.items():
            pieces = []
            for start in range(0, len(blob), PIECE_BYTES):
                part = blob[start : start + PIECE_BYTES]
                pieces.append(Piece(0, offset + start, len(part), digest(part), len(part)))
            entries[name] = Entry(str(arrays[name].dtype), arrays[name].shape, tuple(pieces), forms[name][0])
            offset += len(blob)
        if tree is None:
            made: dict[str, Any] = {}
            for name in arrays:
                component, _, key = name.partition("/")
                made.setdefault(component, {})[key] = {"$": "tensor", "entry": name}
            tree = made
        components: dict[str, int] = {}
        for name, blob in blobs.items():
            components[name.partition("/")[0]] = components.get(name.partition("/")[0], 0) + len(blob)
        body = header + b"".join(blobs.values())
        file = names.data_name(snapshot)
        self.repository.storage.put(file, [memoryview(body)])
        facts: dict[str, Any] = {"epoch": None, "reason": "interval", "created": CREATED} | info
        self.repository.commit(
            Manifest(
                SnapshotInfo(
                    id=snapshot,
                    seq=self.repository.next_seq(),
                    step=step,
                    nbytes=sum(map(len, blobs.values())),
                    components=components,
                    **facts,
                ),
                run=self.repository.run_id,
                world={"size": 1},
                software={"python": "3.11.7", "torch": "2.13.0"},
                files=(DataFile(file, len(body)),),
                entries=entries,
                tree=tree,
            )
        )
        return snapshot

    def data_file(self, snapshot: str) -> Path:
        """The path of a snapshot's data file."""
        return self.path / names.data_name(snapshot)

    def manifest_file(self, snapshot: str) -> Path:
        """The path of a snapshot's manifest."""
        return self.path / names.manifest_name(snapshot)

    def flip(self, snapshot: str, entry: str, at: int = 0) -> None:
        """Flip one bit of an entry's bytes on disk."""
        piece = self.repository.read(snapshot).entries[entry].pieces[0]
        with self.data_file(snapshot).open("r+b") as file:
            file.seek(piece.offset + at)
            byte = file.read(1)[0]
            file.seek(piece.offset + at)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Entries of a small training state."""
    rng = np.random.default_rng(0)
    return {
        "state_dict/layer.weight": rng.standard_normal((64, 32)).astype("float32"),
        "state_dict/layer.bias": rng.standard_normal(64).astype("float32"),
        "optimizer/exp_avg": rng.standard_normal((64, 32)),
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """A run without snapshots."""
    return RunFolder(tmp_path / "run")
