"""`ckpt top`: how a run is, on a screen that changes."""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import click

from ckpt_engine.cli.output import (
    BAR_WIDTH,
    bar,
    cut,
    draw,
    for_people,
    headline,
    json_option,
    print_json,
    print_text,
    say_waiting,
    wrapped,
)
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.cli.status import print_status, run_lines, to_json
from ckpt_engine.config import Config
from ckpt_engine.observe.units import place, size
from ckpt_engine.store.names import parse_id
from ckpt_engine.tools.live_run import LiveWriter
from ckpt_engine.tools.run_status import RunReading, TierReading, known, read_run
from ckpt_engine.writer.run_records import TierStatus

FRAME_SECONDS = 0.5
_BOLD, _RED = {"bold": True}, {"fg": "red"}
_ENTER, _LEAVE = "\033[?1049h\033[?25l\033[?7l", "\033[?7h\033[?25h\033[?1049l"
"""The terminal's other screen, without a cursor, where long lines do not wrap."""
_SNAPSHOT = re.compile(r"snapshot \d{8}-s\d{10}-[0-9a-f]{8} ")


@click.command("top", short_help="Watch a run on a screen that changes.")
@root_argument
@click.option(
    "--every", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between two looks."
)
@storage_options
@json_option
def top(root: str, every: float, as_json: bool) -> None:
    """Show how the run at ROOT is, as it changes: tiers, next snapshot, overhead, events; q or Ctrl-C ends it.

    A run that does not answer, or has not begun, is asked again. Where the output is no terminal, each look is printed
    as `ckpt status` does; with --json it is one line.
    """
    is_screen = sys.stdout.isatty() and not as_json
    with suppress(KeyboardInterrupt):
        (_watch if is_screen else partial(_print_looks, as_json=as_json))(root, options_of(root), every)


def _print_looks(root: str, config: Config, every: float, *, as_json: bool) -> None:
    while True:
        problems: list[str] = []
        found = known(partial(read_run, config, say_waiting), problems)
        if as_json:
            print_json({"error": problems[0]} if found is None else to_json(found), indent=None)
        else:
            print_text(f"{root} at {time.strftime('%H:%M:%S')}", bold=True)
            print_text(*problems, fg="red") if found is None else print_status(found)
        threading.Event().wait(every)


def _watch(root: str, config: Config, every: float) -> None:
    shown: RunReading | None = None
    with _full_screen() as ends:
        while True:
            problems: list[str] = []
            shown = known(partial(read_run, config, partial(_draw, root, shown)), problems) or shown
            for _ in range(math.ceil(every / FRAME_SECONDS)):
                _draw(root, shown, "".join(problems))
                if ends(min(every, FRAME_SECONDS)):
                    return


def _draw(root: str, found: RunReading | None, trouble: str) -> None:
    width, height = os.get_terminal_size(sys.stdout.fileno())
    rows = (*rows_of(root, found, trouble, width)[: height - 1], ("q or Ctrl-C ends it", {}))
    text = "\033[K\n".join(click.style(cut(for_people(row), width), **style) for row, style in rows)
    draw(f"\033[H{text}\033[K\033[J")


@contextmanager
def _full_screen() -> Iterator[Callable[[float], bool]]:
    """The terminal's other screen in the block; what it gives waits so many seconds, and says whether q was typed."""
    keys = [0] if os.isatty(0) else []

    def ends(seconds: float) -> bool:
        ready, _, _ = select.select(keys, [], [], seconds)
        return any(os.read(key, 64)[:1] in (b"", b"q") for key in ready)

    with ExitStack() as undo:
        undo.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        for key in keys:
            undo.callback(termios.tcsetattr, key, termios.TCSADRAIN, termios.tcgetattr(key))
            tty.setcbreak(key)
        undo.callback(draw, _LEAVE)
        draw(_ENTER)
        yield ends


def rows_of(root: str, found: RunReading | None, trouble: str, width: int) -> list[tuple[str, dict[str, Any]]]:
    """What the screen shows, from above: each row's text and style.

    Args:
        found: how the run was when it answered last; None: it has not yet.
        trouble: why it does not answer now.
    """
    title = f"{headline(root, width - 10)[0]:<{width - 10}}  {time.strftime('%H:%M:%S')}"
    rows: list[tuple[str, dict[str, Any]]] = [(title, _BOLD), (headline(trouble, width)[0], _RED)]
    if found is None:
        return rows
    live, room = found.live or LiveWriter(None), max(8, width - BAR_WIDTH - 48)
    titles = f"{'tier':<{room + 2}}  {'state':<9}  {'newest step':>11}  {'has':<{BAR_WIDTH}}  waiting"
    tiers = [_tier_line(*one, live.rates, room) for one in enumerate(found.tiers[:6], 1)]
    troubles = [text for number, one in enumerate(found.tiers, 1) for text in one.troubles(number)]
    lines = [row for line in run_lines(found) for row in wrapped(for_people(line), width)]
    events = [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {line}" for at, line in reversed(live.events)]
    return [
        *rows,
        (titles, _BOLD),
        *((one, {}) for one in tiers),
        *((headline(one, width)[0], _RED) for one in troubles),
        ("", {}),
        *((one, {}) for one in lines),
        ("", {}),
        ("last events" if events else "", _BOLD),
        *((headline(for_people(_SNAPSHOT.sub("", one)), width)[0], {}) for one in events),
    ]


def _tier_line(number: int, tier: TierReading, rates: Mapping[str, float | None], room: int) -> str:
    """How much of what it is to have it has, as a bar; what it waits for, and how fast it was."""
    said, where, has = tier.writer or TierStatus(tier.url, ""), place(tier.url), tier.snapshots or 0
    newest, rate = tier.newest or parse_id(said.newest or ""), rates.get(where)
    name = where if len(where) <= room else f"…{where[1 - room :]}"
    step = f"{newest.step:,}" if newest is not None else ""
    done = bar(has / (has + said.waiting)) if has else ""
    notes = [*([size(said.waiting_bytes)] if said.waiting else []), *([f"{size(rate)}/s"] if rate else [])]
    return f"{number} {name:<{room}}  {tier.state:<9}  {step:>11}  {done:<{BAR_WIDTH}}  {', '.join(notes)}"
