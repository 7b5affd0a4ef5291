"""How state leaves the training thread: capture, flatten, plan, stage into the arena, fence."""
