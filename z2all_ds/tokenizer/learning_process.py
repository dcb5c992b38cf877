"""The process that reads text and learns a vocabulary from it: `python -m z2all_ds.tokenizer.learning_process`.

It reads a job from stdin and writes reports to stdout, as messages of `base/child_process.py`. It ends with its owner,
`learning.py`.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from z2all_ds.base.child_process import read_messages, write_message
from z2all_ds.base.errors import DataError, Z2allError
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.tokenizer import bbpe, spm
from z2all_ds.tokenizer.sampling import Sources, open_sources
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE

TELL_EVERY_SECONDS = 0.2


class Reading:
    """Hands texts to a trainer, counts them and tells how far it is."""

    def __init__(self, sources: Sources, shares: Mapping[str, int]) -> None:
        self._sources, self._shares = sources, shares
        self.bytes_of_text = 0
        self.failure: BaseException | None = None
        """Trainers may swallow what goes wrong while reading, so it is kept."""

    def texts(self) -> Iterator[str]:
        try:
            yield from self._texts()
        except BaseException as error:
            self.failure = error

    def _texts(self) -> Iterator[str]:
        bytes_on_disk, told, some = 0, 0.0, False
        for name, share in self._shares.items():
            for size, text in self._sources.domains[name].sample(share) if share else ():
                bytes_on_disk += size
                self.bytes_of_text += len(text.encode())
                some = some or bool(text.strip())
                if time.monotonic() - told > TELL_EVERY_SECONDS:
                    told = time.monotonic()
                    tell(read=bytes_on_disk)
                yield text
        tell(read=bytes_on_disk)
        if not some:
            raise DataError(self._sources.label, "there is no text in it", "Give text, or a larger max_bytes.")
        tell(stage="read")


def learn(
    algorithm: str, sources: Sources, shares: Mapping[str, int], text_vocab_size: int
) -> tuple[dict[str, bytes], int]:
    """Files by name (the first is the tokenizer), and the bytes of text that were read."""
    reading = Reading(sources, shares)
    files: dict[str, bytes] = {}
    try:
        if algorithm == "bbpe":
            backend = bbpe.learn_bbpe(reading.texts(), text_vocab_size, tell_progress=True)
        else:
            backend, files[spm.MODEL_FILE] = spm.learn_spm(reading.texts(), text_vocab_size)
    except Exception:
        if reading.failure is None:
            raise
    if reading.failure is not None:
        raise reading.failure
    return {TOKENIZER_FILE: backend.to_str().encode(), **files}, reading.bytes_of_text


def tell(**values: Any) -> None:
    write_message(sys.stdout, values)


def main() -> None:
    follow_owner()
    job = next(read_messages(sys.stdin))
    try:
        sources = open_sources(job["inputs"], with_fingerprint=False)
        files, text_bytes = learn(job["algorithm"], sources, job["shares"], job["text_vocab_size"])
        for name, data in files.items():
            (Path(job["out"]) / name).write_bytes(data)
        tell(done=text_bytes)
    except Z2allError as error:
        tell(error=[type(error).__name__, error.what, error.rule, error.fix])


if __name__ == "__main__":
    main()
