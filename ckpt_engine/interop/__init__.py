"""Snapshots as the files of other programs, and back: one module per kind of file."""

FILES = ("lightning", "torch")
"""Formats of other programs that are one file."""
FOLDERS = ("dcp", "accelerate", "transformers")
"""Formats that are a folder."""
