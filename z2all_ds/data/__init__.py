"""The data room: from a corpus folder and a tokenizer to packed batches in an order that nothing disturbs.

`stream` tells the whole way at its head. Every other file is one part of it and needs no torch:

    readers    documents of a shard and of a domain, in any order
    order      the shuffle, computed
    mixture    which domain comes next
    packing    pieces of documents -> one sample
    lanes      one endless row of samples and its cursor
    state      the cursors as JSON: merge, check, count
    prefetch   a thread that works ahead

For users: build a `PackedStream` from a `StreamSpec`, wrap it in a `BatchLoader`, save `merge_states` of all ranks'
`state_dict()` with the checkpoint, and give it to `load_state_dict` at whatever world size comes next.
"""

from typing import TYPE_CHECKING, Any

from z2all_ds.data.state import DomainTokens, StreamState, merge_states, tokens_per_domain

if TYPE_CHECKING:
    from z2all_ds.data.stream import Batch, BatchLoader, PackedStream, StreamSpec

__all__ = [
    "Batch",
    "BatchLoader",
    "DomainTokens",
    "PackedStream",
    "StreamSpec",
    "StreamState",
    "merge_states",
    "tokens_per_domain",
]


def __getattr__(name: str) -> Any:
    """Loads torch only for those who want a stream."""
    if name in __all__:
        from z2all_ds.data import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
