"""A few words of the state at each step: whether a resumed run repeats what the earlier process did."""
