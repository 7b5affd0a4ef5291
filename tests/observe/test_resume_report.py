"""The resume report: JSON and text."""

import json

from ckpt_engine.observe.resume_report import (
    ChangedPart,
    NotRestored,
    Rejected,
    Restored,
    ResumeReport,
    resumed_by_others,
)

REPORT = ResumeReport(
    url="file:///data/run1",
    snapshot="00000007-s0000001200-deadbeef",
    step=1200,
    epoch=3,
    restored=(Restored("model", "600 tensors"), Restored("optimizer", "AdamW, 2 parameter groups"), Restored("rng")),
    not_restored=(NotRestored("callbacks.Sampler", "it has no state_dict"),),
    rejected=(Rejected("00000008-s0000001300-cafecafe", "CKPT401", "data file is 17 bytes short"),),
    notes=("partially accumulated gradients are kept",),
    seconds=1.25,
    read_bytes=1_500_000_000,
)


def test_json_round_trip() -> None:
    """The report survives JSON and keys of a later version."""
    data = json.loads(json.dumps(REPORT.to_json()))
    assert ResumeReport.from_json(data) == REPORT
    assert ResumeReport.from_json(data | {"of_a_later_version": 1}) == REPORT
    assert list(data["rejected"][0]) == ["id", "code", "reason"]


def test_text() -> None:
    """Everything is in the text, aligned, one fact per line."""
    assert REPORT.text() == (
        "resumed at step 1200, epoch 3 from 00000007-s0000001200-deadbeef in /data/run1 (1.5 GB read, 1.2 s)\n"
        "  restored:\n"
        "    model      600 tensors\n"
        "    optimizer  AdamW, 2 parameter groups\n"
        "    rng\n"
        "  not restored:\n"
        "    callbacks.Sampler  it has no state_dict\n"
        "  passed over:\n"
        "    00000008-s0000001300-cafecafe  [CKPT401] data file is 17 bytes short\n"
        "  note: partially accumulated gradients are kept"
    )


def test_text_of_a_fresh_start() -> None:
    """A run that found nothing says so in one line."""
    assert ResumeReport(url="/data/run1").text() == "starting fresh: nothing was restored from /data/run1"
    assert ResumeReport.from_json(ResumeReport(url="/data/run1").to_json()) == ResumeReport(url="/data/run1")


def test_another_number_of_ranks_is_in_the_line() -> None:
    """The one line that a user without logging sees says what is unusual."""
    report = ResumeReport(url="/run", snapshot="a", step=7, notes=("continues", resumed_by_others(2, 4)))
    assert report.line().endswith("; another number of ranks: 2 before, 4 now")
    assert resumed_by_others(1, 2) == "another number of ranks: 1 before, 2 now"
    assert resumed_by_others(2, 1) == "another number of ranks: 2 before, 1 now"


def test_what_was_changed_is_in_the_line() -> None:
    """The first change by its name, and how many more there are."""
    lr, head = ChangedPart("set", "optimizer.lr", "0.1 becomes 0.2"), ChangedPart("left", "model.head", "as made")
    report = ResumeReport(url="/run", snapshot="a", step=7, changes=(lr, head))
    assert report.line().endswith("; optimizer.lr: 0.1 becomes 0.2; 1 more in resume-report.json")
    assert ResumeReport(url="/run", snapshot="a", changes=(head,)).line().endswith("; model.head: as made")
