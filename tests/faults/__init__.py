"""The fault campaign: real trainings whose storage fails at a random moment, and what must hold afterwards."""
