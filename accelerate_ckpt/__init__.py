"""The Accelerate adapter: nothing here yet, use `ckpt_engine.Checkpointer` in Accelerate loops meanwhile."""
