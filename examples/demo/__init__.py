"""The parts of the demo: recording, killing, comparing, measuring and showing."""
