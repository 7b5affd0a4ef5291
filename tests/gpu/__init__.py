"""Tests that need a CUDA device: `python -m pytest -m gpu tests/gpu`."""
