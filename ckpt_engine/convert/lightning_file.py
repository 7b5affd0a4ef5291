"""A snapshot as a `.ckpt` file that Lightning reads without us."""

from __future__ import annotations

from ckpt_engine.errors import MismatchError
from ckpt_engine.store.manifest import Manifest

VERSION_KEY = "pytorch-lightning_version"
_NEEDED = ("state_dict", VERSION_KEY)


def require_lightning(manifest: Manifest) -> None:
    """Refuse what Lightning could not load.

    Raises:
        MismatchError: the snapshot was not taken by the Lightning adapter.
    """
    missing = [key for key in _NEEDED if key not in manifest.tree]
    if missing:
        raise MismatchError(
            f"{manifest.info.id} is not of a Lightning run: it has no {' and no '.join(map(repr, missing))}",
            hint="--to torch exports its whole state, --to safetensors its tensors",
        )
