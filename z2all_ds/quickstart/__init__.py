"""`z2all quickstart`: raw text to a verified export, on what every machine has."""
