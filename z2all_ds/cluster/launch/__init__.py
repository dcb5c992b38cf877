"""Launches on several nodes: plans them, starts and watches the ranks, classifies the outcome."""
