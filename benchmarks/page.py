"""Put the tables of a record into the page for readers, between two markers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import MeasuredBar, Record
from benchmarks.run import Scale
from benchmarks.table import disturbance, number, spread, target, verdict

BEGIN = "<!-- results: written by `python -m benchmarks`, do not edit -->"
END = "<!-- end of results -->"


def write_page(page: Path, record: Record) -> None:
    """Replace what is between the markers of `page`.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have the lines {BEGIN!r} and {END!r} once each")
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{render(record)}{END}{rest.partition(END)[2]}")


def render(record: Record) -> str:
    """The record as Markdown."""
    machine = record.machine
    lines = [
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB memory, "
        f"{machine['kernel']}, {machine['file_system']}, transparent huge pages: {machine['huge_pages']}.",
        "",
        "### Targets",
        "",
        "| bar | target | limit | median | quartiles (samples) | |",
        "|---|---|---|---|---|---|",
    ]
    for bar in record.bars.values():
        lines += [
            f"| {bar.result.name} | {check.what} | {target(check)} | {number(check.measured, check.unit)} "
            f"| {spread(check.series)} | {verdict(check)} |"
            for check in bar.result.checks
        ]
    for bar in record.bars.values():
        lines += ["", *_bar(bar)]
    return "\n".join([*lines, "", ""])


def _bar(bar: MeasuredBar) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in bar.versions.items())
    rounds = "" if bar.scale is Scale.FULL else f" Only a {bar.scale.value} run: too few samples for a result."
    lines = [
        f"### {bar.result.title}",
        "",
        f"Measured {bar.when[:10]}; {software}.{rounds}",
        "",
        *(f"- {key}: {value}" for key, value in bar.result.conditions.items()),
        "",
        "| measured | median | quartiles (samples) | note |",
        "|---|---|---|---|",
        *(
            f"| {series.name} | {number(series.median, series.unit)} | {spread(series)} | {series.note} |"
            for series in bar.result.series
        ),
    ]
    notes = [*bar.result.notes, *([disturbance(bar)] if bar.disturbed else [])]
    return [*lines, "", *notes] if notes else lines
