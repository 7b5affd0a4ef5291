"""How often: from measured costs and failure rates to the interval, and when a snapshot is due."""
