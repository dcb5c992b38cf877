"""Cleaning steps: rules for one text, and the search for duplicates in a whole build.

`CleaningRules` selects the steps, `Cleaner` applies those for one document, `CleaningReport` counts their effects. For
duplicates, workers store `content_key` and `signature` of each document, and the driver decides with
`find_exact_duplicates` and `find_near_duplicates`.
"""

from z2all_ds.corpus.cleaning.cleaner import Cleaner, CleaningReport
from z2all_ds.corpus.cleaning.rules import CleaningRules

__all__ = ["Cleaner", "CleaningReport", "CleaningRules"]
