"""Measures every bar of the project against its reference and its peers, interleaved in one run."""
