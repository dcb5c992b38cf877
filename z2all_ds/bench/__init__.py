"""The bench room: speed and memory of the real parts, as figures with their units; never as timed tests."""
