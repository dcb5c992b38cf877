"""The checkpoint room: a step's folder is complete or it is not there, and goes on at any shape.

No torch: layout.py (names, manifests, health), checksums.py, kinds.py. From the engine to files and back: flats.py knows
where DeepSpeed keeps what is stepped, engine_state.py moves it, state_files.py is the format; save.py and restore.py are
what training calls.
"""
