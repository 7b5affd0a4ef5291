"""What every kind of training loop shares: what belongs to a snapshot, when one is taken, and how a run resumes."""
