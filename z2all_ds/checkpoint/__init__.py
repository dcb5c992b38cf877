"""The checkpoint room: a step's folder is complete or it is not there; the newest complete one is found and loaded.

layout.py knows names, manifests and health (no torch); save.py and restore.py talk to DeepSpeed.
"""
