"""Show results as tables in a terminal, targets beside what was measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.record import MeasuredBar, Record
from benchmarks.values import Check, Series


def number(value: float, unit: str) -> str:
    """A value with three significant digits and its unit."""
    if value == 0:
        text = "0"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return f"{text} {unit}".strip()


def spread(series: Series) -> str:
    """Quartiles and the number of samples."""
    return f"{number(series.low, '')} to {number(series.high, '')} ({len(series.samples)})"


def target(check: Check) -> str:
    """The limit as people write it."""
    return f"{'≤' if check.direction == 'at most' else '≥'} {number(check.limit, check.unit)}"


def verdict(check: Check) -> str:
    """One word."""
    return "pass" if check.passed else "MISS"


def print_bar(console: Console, bar: MeasuredBar) -> None:
    """One bar: its targets, everything else that was measured, and the conditions."""
    checks = Table("target", "limit", "median", "quartiles (samples)", "")
    for check in bar.result.checks:
        colour = "green" if check.passed else "red"
        checks.add_row(
            check.what,
            target(check),
            number(check.measured, check.unit),
            spread(check.series),
            f"[{colour}]{verdict(check)}",
        )
    console.print(checks)
    rows = Table("measured", "median", "quartiles (samples)", "", box=None)
    for series in bar.result.series:
        rows.add_row(series.name, number(series.median, series.unit), spread(series), series.note)
    console.print(rows)
    for grid in bar.result.grids:
        shown = Table(*grid.columns, title=grid.title, title_justify="left")
        for row in grid.rows:
            shown.add_row(*row)
        console.print(shown)
    for key, value in bar.result.conditions.items():
        console.print(f"  [dim]{key}: {value}", highlight=False)
    for note in bar.result.notes:
        console.print(f"  [dim]{note}", highlight=False)
    if bar.disturbed:
        console.print(f"  [yellow]{disturbance(bar)}", highlight=False)


def disturbance(bar: MeasuredBar) -> str:
    """How much others used the processors."""
    return (
        f"Other processes used {bar.shares['others']:.0%} of the processors meanwhile and {bar.shares['stolen']:.0%} "
        "were taken by the hypervisor: repeat this on a quiet machine."
    )


def print_summary(console: Console, record: Record) -> None:
    """All targets of all bars, one line each."""
    table = Table("bar", "target", "limit", "median", "", title="Targets")
    for bar in record.bars.values():
        for check in bar.result.checks:
            colour = "green" if check.passed else "red"
            table.add_row(
                bar.result.name,
                check.what,
                target(check),
                number(check.measured, check.unit),
                f"[{colour}]{verdict(check)}[/]" + (" (disturbed)" if bar.disturbed else ""),
            )
    console.print(table)
