"""Records `docs/figures/terminal.svg`: a script is killed, started again, and compared with a run that nothing stops.

Every line is the output of a command that runs here, in a terminal of 80 columns: `make pictures`.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

EXAMPLES = Path(__file__).resolve().parent
COLUMNS, ROWS = 80, 60
CLEARED = "\r\x1b[K"
"""What a terminal shows of a line ends here and begins again."""
TRAIN = "python train.py --epochs {epochs}"


def commands(epochs: int, seconds: float) -> list[str]:
    """What the recording types: the second run is killed after `seconds`."""
    train = TRAIN.format(epochs=epochs)
    return [
        train,
        "mv plain-out whole",
        f"timeout -s KILL {seconds:.0f} {train}",
        train,
        "ckpt diff whole plain-out",
    ]


def run(command: str, folder: Path) -> str:
    """The output of the command in bash, in a terminal, as a person sees it.

    Raises:
        RuntimeError: it failed, and not by the kill that it asks for.
    """
    main, terminal = pty.openpty()
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color", "PATH": binaries}
    given["OMP_NUM_THREADS"] = "1"  # a small model trains faster so, beside other programs
    process = subprocess.Popen(
        ["bash", "--norc", "-ic", f"stty cols {COLUMNS} rows {ROWS}; {command}; (exit $?)"],
        cwd=folder,
        env=os.environ | given,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    parts = []
    try:
        while part := os.read(main, 65536):
            parts.append(part)
    except OSError:
        pass  # the last process has closed the terminal
    os.close(main)
    lines = b"".join(parts).decode().replace("\r\n", "\n").split("\n")
    output = "\n".join(line.rpartition(CLEARED)[2] for line in lines)
    if process.wait() not in ((137,) if "KILL" in command else (0,)):
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output}")
    return output


def shorten(output: str) -> list[str]:
    """The lines; of many in a row that differ in their numbers only, the first, a `…`, and the last."""
    shown: list[str] = []
    for _, group in itertools.groupby(output.splitlines(), lambda line: re.sub(r"[\d.]+", "0", line)):
        first, *others = group
        shown += [first, "…", others[-1]] if len(others) > 1 else [first, *others]
    return shown


def record(folder: Path, epochs: int) -> list[tuple[str, list[str]]]:
    """Each command with the lines that it has printed, in `folder`.

    Raises:
        RuntimeError: the kill came too early or too late to show a resume.
    """
    shutil.copy(EXAMPLES / "plain_loop.py", folder / "train.py")
    recorded: list[tuple[str, list[str]]] = []
    seconds = 0.0
    for number in range(len(commands(epochs, seconds))):
        began = time.monotonic()
        command = commands(epochs, seconds)[number]
        recorded.append((command, shorten(run(command, folder))))
        if number == 0:
            seconds = max(1.0, 0.6 * (time.monotonic() - began))
    if not any("resumed at step" in line for line in recorded[3][1]):
        raise RuntimeError(f"the run was not resumed: it was killed after {seconds:.0f} s")
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, nargs="?", default=EXAMPLES.parent / "docs" / "figures" / "terminal.svg")
    parser.add_argument("--epochs", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        for command, lines in record(Path(folder), args.epochs):
            console.print(Text(f"$ {command}", style="bold"))
            for line in lines:
                console.print(Text.from_ansi(line))
        picture = console.export_svg(title="killed, and started again", unique_id="terminal")
    # A reader's browser has a font of fixed width; no page asks another server for one.
    args.picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    print(args.picture)


if __name__ == "__main__":
    main()
