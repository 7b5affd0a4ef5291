"""The `ckpt` command: one module per verb; nothing here imports torch unless the verb needs it."""
