"""Programs that work on stored runs, and rehearsals of training: `ckpt` shows what they find."""
