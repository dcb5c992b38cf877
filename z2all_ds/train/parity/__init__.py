"""`z2all train parity`: checks that training gives the same numbers under every DeepSpeed JSON.

`reference.py` takes the steps in plain torch in a separate process; `command.py` takes them under each JSON in separate
ranks; `compare.py` compares the two and `report.py` prints the result.
"""
