"""Programs that work on stored runs.

`ckpt` shows what they find; some rehearse training.
"""
