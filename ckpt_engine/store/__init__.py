"""How snapshots are stored, whatever stores them."""
