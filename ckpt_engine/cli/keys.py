"""`ckpt keys`: the keys of sealed runs."""

from __future__ import annotations

import click

from ckpt_engine.cli.output import print_text
from ckpt_engine.cli.root import options_of, root_argument, storage_options
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.units import count
from ckpt_engine.store.lease import acquire
from ckpt_engine.tools.stored_run import repository_of


@click.group("keys", short_help="Make, show and rotate the keys of sealed runs.")
def keys() -> None:
    """Make, show and rotate the keys of sealed runs."""


@keys.command("new", short_help="Make a key file.")
@click.argument("file")
def new(file: str) -> None:
    """Make the key FILE, which only its owner can read, and print its recipient."""
    from ckpt_engine.store.storage.seal_keys import KeyPair

    print_text(KeyPair.make(file).recipient)


@keys.command("show", short_help="Print the recipient of a key file.")
@click.argument("file")
def show(file: str) -> None:
    """Print the recipient of the key FILE, which is public, and nothing else."""
    from ckpt_engine.store.storage.seal_keys import KeyPair

    print_text(KeyPair.read(file).recipient)


@keys.command("rotate", short_help="Wrap a run's keys for other recipients.")
@root_argument
@storage_options
def rotate(root: str) -> None:
    """Wrap the keys of the run at ROOT for the recipients that its seal.to names now, signed by seal.sign.

    Data and manifests stay as they are. seal.key has to open the keys, and seal.signed_by to accept their present
    signer. Stop the run before.
    """
    for tier in options_of(root).tiers:
        storage = repository_of(tier).storage
        rotate_keys = storage.capabilities.rotate
        if tier.seal is None or not tier.seal.to or rotate_keys is None:
            raise ConfigError(
                f"{tier.url} has no seal.to: who is to open it?",
                hint="name a ckpt.yaml whose seal.to has all recipients",
            )
        with acquire(storage, is_rotating=True):
            print_text(
                f"{count(rotate_keys(), 'key')} wrapped for {count(len(tier.seal.to), 'recipient')} at {tier.url}"
            )
