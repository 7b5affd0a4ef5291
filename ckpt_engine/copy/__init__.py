"""How a snapshot gets to a place."""
