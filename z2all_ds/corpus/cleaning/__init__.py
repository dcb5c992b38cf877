"""Cleaning: rules over one text, and duplicates over a whole build; every step optional, counted and shown.

`CleaningRules` says which steps, `Cleaner` takes those that see one document, `CleaningReport` tells what they did.
Duplicates need all documents: workers store `content_key` and `signature` of each, and the driver decides with
`find_exact_duplicates` and `find_near_duplicates` (imported from their own modules, which need numpy).
"""

from z2all_ds.corpus.cleaning.cleaner import Cleaner
from z2all_ds.corpus.cleaning.report import CleaningReport
from z2all_ds.corpus.cleaning.rules import CleaningRules

__all__ = ["Cleaner", "CleaningReport", "CleaningRules"]
