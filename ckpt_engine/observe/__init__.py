"""Events, metrics and reports: how everything that happens is said."""
