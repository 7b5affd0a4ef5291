"""Getting a snapshot to a place: what it needs there, the copy itself, and making room."""
