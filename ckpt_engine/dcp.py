"""Snapshots through `torch.distributed.checkpoint`: what `dcp.save`, `dcp.async_save` and `dcp.load` are given."""

from ckpt_engine.interop.dcp_reader import CkptReader
from ckpt_engine.interop.dcp_writer import CkptWriter

__all__ = ["CkptReader", "CkptWriter"]
