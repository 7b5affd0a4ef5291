"""The way back: choose a snapshot, verify, read, and rebuild the state."""
