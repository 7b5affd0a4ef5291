"""The process that outlives the trainer.

It makes snapshots durable, and copies them to the further tiers.
"""
