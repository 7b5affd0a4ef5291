"""How often a run takes a snapshot."""
