"""Training on several nodes: what a launch will do, ranks started and watched, the outcome judged."""
