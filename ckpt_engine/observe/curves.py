"""Keeps the curves of a run's loggers as they were at the snapshot that a run resumes from."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from ckpt_engine.observe.events import LOG
from ckpt_engine.observe.resume_report import NotRestored

NOTE = "curves"
"""The key in a manifest's notes."""
_EVENTS = "events.out.tfevents.*"
_TAG = ".ckpt-"


class Curve(Protocol):
    """One logger of a trainer."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def home(self) -> str:
        """What the user has chosen of the place: a curve continues in no other one."""

    def place(self) -> Mapping[str, Any] | None:
        """What `begin` needs in another process, as JSON; None: this logger cannot continue."""

    def begin(self, place: Mapping[str, Any] | None) -> str:
        """Before the logger writes: it continues at `place`; None: it starts. Returns why it does not, or ""."""

    def marks(self) -> Mapping[str, int]:
        """How much it has written by now; what waits in memory is written first."""

    def cut(self, marks: Mapping[str, int]) -> str:
        """What was written after `marks` goes. Returns what stays nevertheless, or ""."""


@dataclass(eq=False)
class Curves:
    """All loggers of a run, on the rank that logs. Training thread only.

    Args:
        root_url: of the run; a copy of it elsewhere writes curves of its own.
        curves: in the trainer's order.
    """

    _root_url: str
    _curves: Sequence[Curve]
    _problems: list[NotRestored] = field(default_factory=list, init=False)
    _failed: set[str] = field(default_factory=set, init=False)

    def __bool__(self) -> bool:
        return bool(self._curves)

    def begin(self, notes: Mapping[str, Any]) -> None:
        """Before the loggers write: each continues where it was.

        Args:
            notes: of the snapshot that is the newest now; empty: the run starts fresh.
        """
        self._problems = self._each(notes, lambda curve, found: curve.begin(None if found is None else found["place"]))

    def go_on(self, notes: Mapping[str, Any]) -> list[NotRestored]:
        """Both, where the loggers are open already and the snapshot is known."""
        self.begin(notes)
        return self.cut(notes)

    def note(self) -> dict[str, Any]:
        """For a snapshot: where the loggers write, and how much they have written."""
        rows = []
        for one in self._curves:
            try:
                if (place := one.place()) is not None:
                    rows.append({"name": one.name, "home": one.home, "place": dict(place), "marks": dict(one.marks())})
            except Exception as err:  # noqa: BLE001 - said; no logger is worth a snapshot
                if one.name not in self._failed:
                    LOG.warning(
                        "%s: the place of its curve cannot be recorded: %s: %s", one.name, type(err).__name__, err
                    )
                self._failed.add(one.name)
        return {NOTE: {"root": self._root_url, "loggers": rows}} if rows else {}

    def cut(self, notes: Mapping[str, Any]) -> list[NotRestored]:
        """What came after a snapshot goes, because it comes again; what could not be done of that.

        Args:
            notes: of the snapshot that the run resumes from.
        """
        problems, self._problems = self._problems, []
        return problems + self._each(
            notes,
            lambda curve, found: curve.cut(found["marks"]) if found and found["place"] == curve.place() else "",
        )

    def continues(self, notes: Mapping[str, Any]) -> bool:
        """Whether a run that resumes from a snapshot with these notes continues its curves: a fork begins new ones."""
        return bool((notes.get(NOTE) or {}).get("root", self._root_url) == self._root_url)

    @staticmethod
    def runs_of(notes: Mapping[str, Any], root_url: str) -> dict[str, str]:
        """By the name of a logger, the id of the run that it continues after a snapshot with these notes."""
        return {row["name"]: str(row["place"]["run"]) for row in _rows_of(notes, root_url) if "run" in row["place"]}

    def _each(
        self, notes: Mapping[str, Any], do: Callable[[Curve, Mapping[str, Any] | None], str]
    ) -> list[NotRestored]:
        """Does it with each logger, and what `notes` have of it; what went wrong."""
        saved, problems = _rows_of(notes, self._root_url), []
        for curve in self._curves:
            same = (one for one in saved if (one["name"], one["home"]) == (curve.name, curve.home))
            if (found := next(same, None)) is not None:
                saved.remove(found)
            try:
                why = do(curve, found)
            except OSError as err:
                why = str(err)
            if why:
                problems.append(NotRestored(f"the curve of {curve.name}", why))
        return problems


def _rows_of(notes: Mapping[str, Any], root_url: str) -> list[Mapping[str, Any]]:
    """What a snapshot with these notes says of each logger; nothing if it is a copy of another run."""
    note = notes.get(NOTE) or {}
    return list(note["loggers"]) if note.get("root") == root_url else []


class EventFiles:
    """What one run writes into a folder of TensorBoard, which others may write into, too.

    Args:
        folder: of the logger.
        tag: what the names of the run's files end with: `filename_suffix` of `SummaryWriter`.
    """

    def __init__(self, folder: str | os.PathLike[str], tag: str) -> None:
        self.folder, self.tag = Path(folder), tag
        self._before = self.sizes()

    @staticmethod
    def new_tag() -> str:
        """For a run that starts."""
        return _TAG + secrets.token_hex(4)

    @staticmethod
    def tag_of(suffix: str) -> str | None:
        """The one in a `filename_suffix`; None: it is not our suffix."""
        _, tag, random = suffix.rpartition(_TAG)
        return tag + random if tag else None

    def sizes(self) -> dict[str, int]:
        """Of all files of the run; `add_scalars` and `add_hparams` make folders of their own below."""
        return sizes(self.folder, [*self.folder.glob(_EVENTS), *self.folder.glob(f"*/{_EVENTS}")], self.tag)

    def cut(self, marks: Mapping[str, int]) -> str:
        """Files of this process stay, unless an earlier part of it has begun them."""
        return cut_files(self.folder, marks, self._before)


class WriterCurve:
    """A `SummaryWriter` of torch that is open already, and continues in our file.

    Args:
        name: of the logger.
        writer: of torch.
        home: what the user has chosen of its folder; a part of that may be the time of the start.
    """

    def __init__(self, name: str, writer: Any, home: str | os.PathLike[str]) -> None:
        self.name, self.home = name, str(Path(home).resolve())
        self._writer = writer
        self._files: EventFiles | None = None

    def place(self) -> Mapping[str, Any] | None:
        files = self._files
        return None if files is None else {"folder": str(files.folder), "tag": files.tag}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        writer = self._writer
        folder, tag = Path(writer.log_dir).resolve(), EventFiles.new_tag()
        writer.close()
        if place is not None:
            for path in folder.glob(_EVENTS):  # what this start has logged so far, the first one has, too
                if _is_of_this_process(path.name) and EventFiles.tag_of(path.name) is None:
                    path.unlink()
            if Path(place["folder"]) != folder:
                with suppress(OSError):  # it is not empty: others write there
                    folder.rmdir()
            folder, tag = Path(place["folder"]), str(place["tag"])
        writer.log_dir, writer.filename_suffix = str(folder), tag
        self._files = EventFiles(folder, tag)
        return ""

    def marks(self) -> Mapping[str, int]:
        self._writer.flush()
        return {} if self._files is None else self._files.sizes()

    def cut(self, marks: Mapping[str, int]) -> str:
        return "" if self._files is None else self._files.cut(marks)


class TrackedRun:
    """A run of W&B, MLflow and the like that is open already: it continues by its id, which is given before it opens.

    Args:
        name: of the logger.
        home: what the user has chosen of its place.
        run: its id.
        folder: of files that the run is only ever appended to; None: it is on a server, or in a database.
        flush: writes what waits in memory.
    """

    def __init__(self, name: str, home: str, run: str, folder: Path | None, flush: Callable[[], object]) -> None:
        self.name, self.home = name, home
        self._run, self._folder, self._flush = run, folder, flush

    def place(self) -> Mapping[str, Any] | None:
        return {"run": self._run}

    def begin(self, place: Mapping[str, Any] | None) -> str:
        return "" if place is None or place["run"] == self._run else "this start has opened another run"

    def marks(self) -> Mapping[str, int]:
        self._flush()
        return {} if self._folder is None else sizes(self._folder, self._folder.rglob("*"))

    def cut(self, marks: Mapping[str, int]) -> str:
        if self._folder is None:
            return "the run continues, and shows the repeated steps twice"
        return cut_files(self._folder, marks, sizes(self._folder, self._folder.rglob("*")))


def _is_of_this_process(name: str) -> bool:
    """Whether an event file was begun by it: another container's process, or an earlier one, may have had its pid."""
    began, _, rest = name.removeprefix("events.out.tfevents.").partition(".")
    host, me = socket.gethostname(), psutil.Process()
    mine = rest.startswith(f"{host}.{me.pid}.")
    return mine and began.isdigit() and int(began) >= int(me.create_time())


def sizes(folder: Path, files: Iterable[Path], ending: str = "") -> dict[str, int]:
    """Bytes of files below `folder`, by their path from there."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in files
        if path.name.endswith(ending) and path.is_file()
    }


def cut_files(folder: Path, marks: Mapping[str, int], files: Collection[str]) -> str:
    """Files that are only ever appended to get the size they had; what was not there then goes. As `Curve.cut`."""
    for name in files:
        if name not in marks:
            (folder / name).unlink(missing_ok=True)
    short = []
    for name, nbytes in marks.items():
        path = folder / name
        now = path.stat().st_size if path.is_file() else 0
        if now > nbytes:
            os.truncate(path, nbytes)
        elif now < nbytes:
            short.append(name)
    return f"the end of {short[0]} is missing" if short else ""
