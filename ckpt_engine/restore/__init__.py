"""The way back, from stored snapshots to the live state."""
