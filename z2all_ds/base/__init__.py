"""Modules for all other subpackages; they import no other subpackage."""
