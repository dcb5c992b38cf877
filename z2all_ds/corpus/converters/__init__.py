"""Converters of raw data into drafts, registered by name (`registry.py`).

`sources.py` has well-known corpora, `generic.py` rows with any fields, `builtin.py` text without raw files.
"""

from z2all_ds.corpus.converters import builtin as _builtin  # noqa: F401 - registers its converters
from z2all_ds.corpus.converters import sources as _sources  # noqa: F401 - registers its converters
from z2all_ds.corpus.converters.generic import field_map_converter, parse_field_map
from z2all_ds.corpus.converters.registry import (
    BuiltIn,
    Source,
    built_in,
    describe_converters,
    find_converter,
    load_plugin,
    source,
)

__all__ = [
    "BuiltIn",
    "Source",
    "built_in",
    "describe_converters",
    "field_map_converter",
    "find_converter",
    "load_plugin",
    "parse_field_map",
    "source",
]
