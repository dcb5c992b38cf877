"""Measurements per step: time, tokens, memory, loss per domain."""
