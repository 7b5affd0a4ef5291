"""The process that outlives the trainer: it makes snapshots durable, and copies them to the further tiers."""
