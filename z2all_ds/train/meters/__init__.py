"""What a step cost and what came of it: time, tokens, memory, loss per domain."""
