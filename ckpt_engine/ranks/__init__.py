"""Several ranks write one snapshot: who writes what, what they agree on, and how another number of ranks goes on."""
