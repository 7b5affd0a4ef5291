"""Everything that reads a run, done to a mutant: what ends otherwise than the law allows is a finding."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckpt_engine import Checkpointer
from ckpt_engine.cli.main import commands
from ckpt_engine.dcp import CkptReader
from ckpt_engine.errors import CkptError
from tests.fuzz.mutants import Mutant, apply

MOST_SECONDS = 20.0
"""Of processor time: the machine may be busy."""
MOST_TIMES, MOST_BYTES = 3, 200 << 20
"""Memory that reading may take: so many times the size of the snapshot, and so much."""


@dataclass(frozen=True)
class Finding:
    """What reading a mutant has done.

    Args:
        what: traceback, hang, memory or no-resume.
    """

    what: str
    reading: str
    detail: str


def load(root: Path, _: Path) -> None:
    """The newest snapshot, or an older one."""
    Checkpointer(root).load()


def load_into(root: Path, _: Path) -> None:
    """Into live tensors of the older snapshot's form."""
    from tests.fuzz import stores

    live = stores.every_kind(1)
    Checkpointer(root).load(into={key: live[key] for key in ("state_dict", "optimizer", "memory", "last")})


def load_dcp(root: Path, _: Path) -> None:
    """Through torch.distributed.checkpoint."""
    reader = CkptReader(root)
    metadata = reader.read_metadata()
    assert isinstance(metadata, dcp.metadata.Metadata)
    for name, value in (reader._outline.values if reader._outline is not None else {}).items():
        assert isinstance(name, str), value


def verb(*line: str) -> Callable[[Path, Path], None]:
    """A verb of the command line; ROOT and OUT stand for the run and a path that is free."""

    def run(root: Path, out: Path) -> None:
        words = [
            str(root) if word == "ROOT" else str(out) if word == "OUT" else word.replace("ROOT", str(root))
            for word in line
        ]
        done = CliRunner().invoke(commands, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit | click.ClickException):
            raise done.exception

    run.__name__ = " ".join(line)
    return run


READINGS: Sequence[Callable[[Path, Path], None]] = (
    load,
    load_into,
    load_dcp,
    verb("ls", "ROOT"),
    verb("ls", "ROOT", "--json"),
    verb("show", "ROOT"),
    verb("show", "ROOT", "--all"),
    verb("show", "ROOT", "--json"),
    verb("verify", "ROOT"),
    verb("verify", "ROOT", "--json"),
    verb("status", "ROOT"),
    verb("status", "ROOT", "--json"),
    verb("diff", "ROOT#latest", "ROOT#step=1"),
    verb("export", "ROOT", "OUT", "--to", "safetensors", "--only", "*"),
    verb("export", "ROOT", "OUT", "--to", "safetensors", "--only", "*", "--dtype", "bfloat16"),
    verb("export", "ROOT", "OUT", "--to", "torch"),
    verb("export", "ROOT", "OUT", "--to", "lightning"),
    verb("export", "ROOT", "OUT", "--to", "dcp"),
    verb("export", "ROOT", "OUT", "--to", "accelerate"),
    verb("export", "ROOT", "OUT", "--to", "transformers"),
    verb("cp", "ROOT", "OUT"),
    verb("compact", "ROOT"),
    verb("pin", "ROOT", "latest"),
    verb("prune", "ROOT", "--keep", "last=1"),
)
"""In this order: the last ones write."""


def read(mutant: Mutant, source: Path, folder: Path, readings: Sequence[Callable[[Path, Path], None]]) -> list[Finding]:
    """Make a mutant in `folder`, and read it."""
    root = folder / "run"
    apply(mutant, source, root)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    found = []
    for number, reading in enumerate(readings):
        name = getattr(reading, "__name__", "")
        before, began = _fresh_peak(), time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reading(root, folder / f"out{number}")
        except CkptError as err:
            if reading is load and _must_resume(mutant):
                found.append(Finding("no-resume", name, str(err)))
        except Exception as err:  # noqa: BLE001 - that is what is looked for
            found.append(Finding("traceback", name, "".join(traceback.format_exception(err))[-3000:]))
        seconds, grown = time.process_time() - began, _status("VmHWM") - before
        if seconds > MOST_SECONDS:
            found.append(Finding("hang", name, f"{seconds:.1f} s"))
        if grown > MOST_TIMES * size + MOST_BYTES:
            found.append(Finding("memory", name, f"{grown >> 20} MB for a run of {size >> 10} kB"))
    return found


def _must_resume(mutant: Mutant) -> bool:
    """Whether the older snapshot is untouched, so that a resume has something to go on with."""
    newest_only = all(edit.file in ("manifest", "data") for edit in mutant.edits)
    return newest_only and mutant.store in ("plain", "ranks")


def _fresh_peak() -> int:
    """Have the kernel forget the largest size so far; the size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def described(mutant: Mutant, finding: Finding) -> dict[str, Any]:
    """For reports."""
    return {"what": finding.what, "reading": finding.reading, "mutant": mutant.to_json(), "detail": finding.detail}
