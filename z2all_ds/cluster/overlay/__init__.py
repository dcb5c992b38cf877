"""A private network for nodes that cannot reach each other."""
