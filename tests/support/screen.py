"""A terminal of 80 columns for a test: what programs write to it, and what a person sees there in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

COLUMNS, ROWS = 80, 24
_PARTS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]|([\r\n\b])|([^\x1b\r\n\b])", re.DOTALL)


def rows_of(written: str, columns: int = COLUMNS) -> list[str]:
    """The rows that are seen, those that have scrolled away included; what a program writes later is over it."""
    screen, row, column = list[list[str]](), 0, 0
    for part in _PARTS.finditer(written):
        number, command, control, text = part.groups()
        count = int(number) if number and number.isdigit() else 0
        if text is not None and column == columns:
            row, column = row + 1, 0
        while len(screen) <= row:
            screen.append([" "] * columns)
        match command or control:
            case "A":
                row = max(0, row - max(1, count))
            case "B":
                row += max(1, count)
            case "C":
                column = min(columns, column + max(1, count))
            case "D":
                column = max(0, column - max(1, count))
            case "G":
                column = max(1, count) - 1
            case "K":
                first, last = (0 if count else column), (column if count == 1 else columns)
                screen[row][first:last] = [" "] * (last - first)
            case "J":
                screen[row][column:] = [" "] * (columns - column)
                del screen[row + 1 :]
            case "\r":
                column = 0
            case "\n":  # the terminal is not raw: a line feed begins a line
                row, column = row + 1, 0
            case "\b":
                column = max(0, column - 1)
            case None if text is not None:
                screen[row][column] = text
                column += 1
    return ["".join(one).rstrip() for one in screen]


class Recorded:
    """What was written; complete when `recording` is over."""

    text = ""


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Standard output and error of this process are one such terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    for name, value in {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}.items():
        monkeypatch.setenv(name, value)
    found, read = Recorded(), list[bytes]()

    def follow() -> None:
        while True:
            try:
                read.append(os.read(master, 1 << 16))
            except OSError:  # the other side is closed
                return

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    with os.fdopen(slave, "w", buffering=1) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        yield found
    reader.join(60)
    os.close(master)
    found.text = b"".join(read).decode()
