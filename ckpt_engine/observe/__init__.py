"""How a run reports what happens in it."""
