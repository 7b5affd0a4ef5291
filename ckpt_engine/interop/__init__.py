"""Snapshots as the files of other programs, and back: one module per kind of file."""
