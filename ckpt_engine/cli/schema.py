"""`ckpt schema`: the JSON Schema of all options."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import print_json
from ckpt_engine.config import Config


@click.command("schema", short_help="Print the JSON Schema of ckpt.yaml.")
def command() -> None:
    """Print the JSON Schema of ckpt.yaml.

    Editors complete and check a YAML file that names the schema in its first line:

    \b
        # yaml-language-server: $schema=ckpt.schema.json
    """
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()})
