"""Programs of others with us in them: `python -m tests.real.third_party --list`, `--only NAME`, `--sources FOLDER`.

Nothing of theirs is here: sources come from a folder of clones named `owner+name`, else from GitHub, at a commit that
`table.py` names. A program gets the lines that our pages ask for and is killed with SIGKILL at random instants until it
has come to its end. Its last snapshot that a run which nothing interrupts has too must be the same, bit for bit; that
run must print what the unchanged program prints, and so must the killed one. A suite is run with us in every Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.real.third_party.lives import LIFE_SECONDS, OFFLINE, verify
from tests.real.third_party.table import PROGRAMS, Program, Suite

REPOSITORY = Path(__file__).parents[3]
_CORPORA = "data/wikitext-2"


def unpack(one: Program | Suite, sources: Path | None, target: Path) -> None:
    """The files of one folder at the commit."""
    tree = f"{one.commit}:{one.folder}" if one.folder else one.commit
    where = None
    for found in (sources / one.repository.replace("/", "+"),) if sources is not None else ():
        where = next((path for path in (found / "repo", found) if path.is_dir()), None)
    with tempfile.TemporaryDirectory() as scratch:
        if where is None:
            url = f"https://github.com/{one.repository}"
            clone = ["git", "clone", "-q", "--filter=blob:none", "--no-checkout", url, scratch]
            if subprocess.run(clone, timeout=LIFE_SECONDS, check=False).returncode:
                raise SystemExit(f"{url} cannot be cloned: without a network give --sources FOLDER with a clone in it")
        done = subprocess.run(
            ["git", "-C", str(where or scratch), "archive", "--format=tar", tree, "--", ".", f":(exclude){_CORPORA}"],
            capture_output=True,
            timeout=LIFE_SECONDS,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{one.repository} has no {tree}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")


def verify_suite(suite: Suite, source: Path) -> dict[str, Any]:
    """New failures of one suite."""
    places = (source, REPOSITORY, Path(__file__).parent)
    command = [sys.executable, str(Path(__file__).parent / "suite.py"), "--timeout", "3000"]
    done = subprocess.run(
        [*command, "--", *suite.options, *suite.paths],
        cwd=source,
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(map(str, places))},
        stdout=subprocess.PIPE,
        timeout=10_000,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{suite.repository}: exit code {done.returncode}")
    report = json.loads(done.stdout)
    names = {row["test"].rpartition("::")[2]: row["line"] for row in report["new_failures"]}
    new = {name: line for name, line in names.items() if name not in suite.expected}
    return {
        "verdict": "new failures" if new else "no new failure",
        "new_failures": new,
        "expected": {name: suite.expected[name] for name in names if name in suite.expected},
        **{key: report[key] for key in ("unsteady", "passed", "skipped")},
        "failed_before": len(report["failed_before"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a program is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="*", choices=sorted(PROGRAMS))
    parser.add_argument("--sources", type=Path, help="folder with clones named owner+name")
    parser.add_argument("--folder", type=Path, help="where to work; kept")
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {one.repository} at {one.commit[:12]}" for name, one in PROGRAMS.items()))
        return 0
    place = options.folder or Path(tempfile.mkdtemp(prefix="ckpt-third-party-"))
    os.environ.update(OFFLINE, HF_HOME=str(place / "cache"))
    results = {}
    for name in options.only or PROGRAMS:
        one, source = PROGRAMS[name], place / name / "source"
        shutil.rmtree(place / name, ignore_errors=True)
        source.mkdir(parents=True)
        unpack(one, options.sources, source)
        results[name] = (
            verify(name, one, source, options.kills) if isinstance(one, Program) else verify_suite(one, source)
        )
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    good = ("bitwise", "no new failure")
    return 0 if all(one["verdict"] in good and one.get("unchanged by us", True) for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
