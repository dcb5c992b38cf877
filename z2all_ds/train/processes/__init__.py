"""The processes of a training run on one machine: start, logs, watchdog, stop."""
