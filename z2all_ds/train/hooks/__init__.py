"""Features called by the training loop. Each is one file and one line in `registry.py`."""
