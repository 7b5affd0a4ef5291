"""Plays random schedules of two jobs: `python -m tests.restore.histories.campaign --seeds 200`.

Each names its seed where something is wrong; `--first N --seeds 1` plays that one again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.restore.histories.schedule import KINDS, Schedule, preload


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    preload("accelerate", "lightning.pytorch", "transformers", "accelerate_ckpt.transformers_events", "lightning_ckpt")
    began, required, overtaken, bad = time.monotonic(), 0, 0, []
    kinds: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        with tempfile.TemporaryDirectory(prefix="histories-", ignore_cleanup_errors=True) as folder:
            schedule = Schedule(seed, Path(folder), KINDS[seed % len(KINDS)])
            try:
                schedule.play()
                counted, wrong = schedule.judge()
            except AssertionError as err:
                counted, wrong = 0, [str(err)]
            kinds.update(job.kind for job in schedule.jobs)
            required += counted
            overtaken += schedule.overtaken
            if wrong or arguments.verbose:
                print(f"seed {seed}: {schedule.options}", *schedule.said, *wrong, sep="\n  ", flush=True)
            if wrong:
                bad.append(seed)
            print(f"seed {seed}: {len(schedule.jobs)} jobs, {counted} required, {len(wrong)} wrong", flush=True)
    jobs = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{arguments.seeds} schedules, {jobs}, {overtaken} times overtaken")
    print(f"{required} acknowledged snapshots had to be there; bad seeds: {bad}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
