"""The build of a corpus: `build.py` has an overview of its steps."""
