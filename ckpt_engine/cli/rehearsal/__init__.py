"""Runs the user's own training script for `ckpt verify-resume`, with its snapshots in a scratch folder."""
