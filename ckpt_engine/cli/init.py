"""`ckpt init` writes a first ckpt.yaml.

`ckpt schema` prints what may be in one.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import click
import yaml

from ckpt_engine.cli.output import print_json, print_text
from ckpt_engine.config import Config, load_config
from ckpt_engine.tools.new_files import check_free, new_file

_SCHEMA_FILE = "ckpt.schema.json"
_PRESETS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text())


@click.command("init", short_help="Write a first ckpt.yaml.")
@click.argument("file", default="ckpt.yaml", type=click.Path(path_type=Path))
@click.option(
    "--preset", type=click.Choice(list(_PRESETS)), help="Ask nothing, and write the options for this environment."
)
@click.option(
    "--tier", "tiers", multiple=True, metavar="URL", help="A folder or storage URL, nearest first. Repeatable."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(file: Path, preset: str | None, tiers: tuple[str, ...], force: bool) -> None:
    """Write FILE (ckpt.yaml) after three questions or from a preset, and the schema beside it, for editors."""
    check_free(file, replace=force)
    places = list(tiers)
    if preset is None:
        places = places or [
            click.prompt("Where do snapshots go? A folder or storage URL", default="ckpt"),
            click.prompt(
                "A second place, for the day the first one is gone? Nothing: none", default="", show_default=False
            ),
        ]
        preset = click.prompt("How does the job run?", type=click.Choice(list(_PRESETS)), default="laptop")
    places = [place for place in places or ["ckpt"] if place]
    load_config({"tiers": places})
    if preset == "slurm":  # a job starts wherever it was submitted
        places = [str(Path.cwd() / one) if re.match(r"(?!memory$)[\w.](?!.*://)", one) else one for one in places]
    with new_file(file, replace=force) as out:
        out.write(_text(preset, places).encode())
    load_config(file)
    with new_file(file.with_name(_SCHEMA_FILE), replace=True) as out:
        out.write((json.dumps(_schema(), indent=2, ensure_ascii=False) + "\n").encode())
    print_text(f"wrote {file} and {_SCHEMA_FILE}: give it to Checkpointer, AdaptiveCheckpoint or TransformersCallback")


def _text(preset: str, places: list[str]) -> str:
    listed = "".join(f"  - {json.dumps(place)}\n" for place in places)
    return textwrap.dedent(
        f"""\
        # yaml-language-server: $schema={_SCHEMA_FILE}
        # All options: docs/configuration.md, or `ckpt schema`.

        # Where snapshots go, nearest first: every snapshot to the first place, copies to the others.
        tiers:
        {{}}
        # Share of training time that snapshots may cost; how often one is taken follows from it.
        overhead: 1%

        {{}}"""
    ).format(listed, _PRESETS[preset])


@click.command("schema", short_help="Print the JSON Schema of ckpt.yaml.")
def schema() -> None:
    """Print the JSON Schema of ckpt.yaml.

    Editors complete and check a YAML file that names the schema in its first line:

    \b
        # yaml-language-server: $schema=ckpt.schema.json
    """
    print_json(_schema())


def _schema() -> dict[str, object]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:ckpt-engine:ckpt.yaml",
        **Config.model_json_schema(),
    }
