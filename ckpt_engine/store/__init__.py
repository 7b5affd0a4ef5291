"""What lies in a run's folder: the format, the repository, the lease, retention."""
