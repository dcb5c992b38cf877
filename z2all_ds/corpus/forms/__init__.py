"""Reading raw files as rows: JSON lines, JSON arrays, Parquet and plain text, packed or not, in bounded memory."""

from z2all_ds.corpus.forms.detect import FORMS
from z2all_ds.corpus.forms.opening import open_slice
from z2all_ds.corpus.forms.plan import expand_raw, plan_slices
from z2all_ds.corpus.forms.slices import Advance, ReadLimits, Row, RowReader, Slice

__all__ = [
    "FORMS",
    "Advance",
    "ReadLimits",
    "Row",
    "RowReader",
    "Slice",
    "expand_raw",
    "open_slice",
    "plan_slices",
]
