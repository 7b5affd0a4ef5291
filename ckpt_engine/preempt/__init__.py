"""Stopping in time: who asks a run to stop, what becomes durable before its time is over, and what to say about it."""
