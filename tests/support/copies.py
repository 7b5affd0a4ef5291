"""Copies of snapshots in the form in which a tier with a codec stores them."""

from __future__ import annotations

from functools import partial
from typing import Any

from ckpt_engine.copy.codec_selector import EncodeStats
from ckpt_engine.copy.encode_pieces import Pick
from ckpt_engine.copy.encoded_copy import put_encoded
from ckpt_engine.copy.transfer import Copied, copy_snapshot
from ckpt_engine.store.repository import Repository


def copy_encoded(
    source: Repository, target: Repository, snapshot: str, pick: Pick, tally: EncodeStats, **how: Any
) -> Copied:
    """Copy one snapshot with these codecs; see `copy_snapshot`."""
    put = partial(put_encoded, source, target, pick=pick, tally=tally)
    return copy_snapshot(source, target, snapshot, put=put, **how)
