"""Blocks in which a record without a valid text is an empty document, reported and counted."""

import threading
from collections import Counter

from z2all_ds.base.console import say
from z2all_ds.base.errors import BadRecordError
from z2all_ds.corpus.reading.shards import TextBlock

BAD_RECORDS: Counter[str] = Counter()
"""Number of different records that this process has skipped, by domain."""
SHOWN = 10


class BadReads(threading.local):
    """How often this thread has read a bad record as an empty document. Per thread: each stream is read by one."""

    count = 0


BAD_READS = BadReads()


class SkippingBlock:
    """The texts of a block; `seen` are the bad records of the domain that were reported before."""

    def __init__(self, texts: TextBlock, domain: str, seen: set[str]) -> None:
        self._texts, self._domain, self._seen = texts, domain, seen

    def text(self, number: int) -> str:
        try:
            return self._texts.text(number)
        except BadRecordError as error:
            BAD_READS.count += 1
            if error.what not in self._seen:
                self._seen.add(error.what)
                BAD_RECORDS[self._domain] += 1
                count = BAD_RECORDS[self._domain]
                if count <= SHOWN or count % 1000 == 0:
                    say(f"data: skipped {error.what}: {error.rule} ({count} bad records of {self._domain} so far)")
            return ""
