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
from z2all_ds.base.paths import explain_system_errors
from z2all_ds.tokenizer import bbpe, spm
from z2all_ds.tokenizer.sampling import Sources, open_sources
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE

REPORT_EVERY_SECONDS = 0.2


class TextReader:
    """Passes the sampled texts to a trainer, counts them and reports progress."""

    def __init__(self, sources: Sources, shares: Mapping[str, int]) -> None:
        self._sources, self._shares = sources, shares
        self.text_bytes = 0
        self.failure: BaseException | None = None
        """Kept, because trainers may ignore errors of the iterator."""

    def texts(self) -> Iterator[str]:
        try:
            yield from self._texts()
        except BaseException as error:
            self.failure = error

    def _texts(self) -> Iterator[str]:
        bytes_on_disk, reported, has_text = 0, 0.0, False
        for name, share in self._shares.items():
            for size, text in self._sources.domains[name].sample(share) if share else ():
                bytes_on_disk += size
                self.text_bytes += len(text.encode())
                has_text = has_text or bool(text.strip())
                if time.monotonic() - reported > REPORT_EVERY_SECONDS:
                    reported = time.monotonic()
                    report(read=bytes_on_disk)
                yield text
        report(read=bytes_on_disk)
        if not has_text:
            raise DataError("training text", "no text found in the inputs", "Give text, or a larger max_bytes.")
        # The folder stores the fingerprint of the manifest. Last, as errors that name a record say more.
        for name, share in self._shares.items():
            if share:
                self._sources.domains[name].check_content()
        report(stage="read")


def learn(algorithm: str, reader: TextReader, text_vocab_size: int, split: str) -> dict[str, bytes]:
    """Return the files of the tokenizer by name."""
    files: dict[str, bytes] = {}
    try:
        if algorithm == "bbpe":
            backend = bbpe.learn_bbpe(reader.texts(), text_vocab_size, split, show_progress=True)
        else:
            backend, files[spm.MODEL_FILE] = spm.learn_spm(reader.texts(), text_vocab_size)
    except Exception:
        if reader.failure is None:
            raise
    if reader.failure is not None:
        raise reader.failure
    return {TOKENIZER_FILE: backend.to_str().encode(), **files}


def report(**values: Any) -> None:
    write_message(sys.stdout, values)


def main() -> None:
    follow_owner()
    job = next(read_messages(sys.stdin))
    try:
        with explain_system_errors():
            reader = TextReader(open_sources(job["inputs"], with_fingerprint=False), job["shares"])
            for name, data in learn(job["algorithm"], reader, job["text_vocab_size"], job["split"]).items():
                (Path(job["out"]) / name).write_bytes(data)
            report(done=reader.text_bytes)
    except Z2allError as error:
        report(error=[type(error).__name__, error.what, error.rule, error.fix])


if __name__ == "__main__":
    main()
