"""The checkpoint room: a step's folder is complete or it is not there, and goes on at any shape.

layout.py (names, manifests, health), checksums.py and kinds.py load no torch. flats.py knows where DeepSpeed keeps what
is stepped, engine_state.py moves it, state_files.py is the format; save.py and restore.py are what training calls.
"""
