"""The evaluate room: what a trained model can do. Works on exported folders with plain transformers."""
