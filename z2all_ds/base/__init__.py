"""What every other subpackage may use. Imports nothing of the package but itself."""
