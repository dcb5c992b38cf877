"""Reads raw files as rows in bounded memory: JSON lines, JSON arrays, Parquet and plain text, compressed or not."""

from z2all_ds.corpus.forms.detect import FORMS
from z2all_ds.corpus.forms.opening import open_slice
from z2all_ds.corpus.forms.plan import expand_raw, plan_slices
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row, RowReader, Slice

__all__ = ["FORMS", "Advance", "ReadLimits", "Row", "RowReader", "Slice", "expand_raw", "open_slice", "plan_slices"]
