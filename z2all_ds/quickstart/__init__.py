"""`z2all quickstart`: raw text to a verified export, with data that every machine has."""
