"""Whether training gives the same numbers under every DeepSpeed JSON: `z2all train parity`.

`reference.py` takes the steps in plain torch, in a process of its own; `command.py` takes them again under each JSON
in ranks of its own; `compare.py` holds the two against each other and `report.py` shows them.
"""
