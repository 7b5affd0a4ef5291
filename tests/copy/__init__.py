"""Snapshots that share data: reading, writing, keeping and compacting them."""
