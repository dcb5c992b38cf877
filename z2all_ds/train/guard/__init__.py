"""Bad steps: how they are detected, and how the run reacts."""
