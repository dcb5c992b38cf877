"""Learns a vocabulary in a separate process, shows its progress, and stops it at once on Ctrl-C.

Trainers run native code for minutes, where Python cannot handle Ctrl-C, and use gigabytes that Python does not return.
A process can be ended at any time, and its memory is freed.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from z2all_ds.base import errors
from z2all_ds.base.child_process import JsonProcess, module_command, package_environment
from z2all_ds.base.console import heartbeat, progress
from z2all_ds.base.errors import MachineError, Z2allError
from z2all_ds.tokenizer.bbpe import DEFAULT_SPLIT, SMALLEST_VOCABULARY

MERGE_STAGE = "Compute merges"
"""Name of this stage in the progress lines of `tokenizers`."""


def learn_in_own_process(
    algorithm: str,
    inputs: Sequence[str],
    shares: Mapping[str, int],
    text_vocab_size: int,
    split: str = DEFAULT_SPLIT,
) -> tuple[dict[str, bytes], int]:
    """Learn from `inputs` (as for open_sources); `shares` are the bytes on disk to read of each domain, and
    `split` is the name of a pattern of bbpe.

    Return the files of the tokenizer by name, and the bytes of text that were read.
    """
    with tempfile.TemporaryDirectory(prefix="z2all-tokenizer-") as scratch:
        job = {
            "algorithm": algorithm,
            "inputs": list(inputs),
            "shares": dict(shares),
            "text_vocab_size": text_vocab_size,
            "split": split,
            "out": scratch,
        }
        command = module_command("z2all_ds.tokenizer.learning_process")
        # `tokenizers` writes its progress to stderr, as plain JSON objects.
        with closing(JsonProcess(command, package_environment(), error_mark="")) as process:
            process.send(job)
            text_bytes = _show_progress(_reports(process), sum(shares.values()), algorithm, text_vocab_size)
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir()}, text_bytes


def _show_progress(reports: Iterator[dict[str, Any]], total_bytes: int, algorithm: str, text_vocab_size: int) -> int:
    """Show the reports of a process as progress bars; return the bytes of text."""
    report: dict[str, Any] = {}
    with progress("reading text", total_bytes / 1e6, "MB") as advance:
        shown = 0
        for report in reports:
            if "read" not in report:
                break
            advance((report["read"] - shown) / 1e6)
            shown = report["read"]
    # SentencePiece does not report progress.
    with heartbeat("counting" if algorithm == "bbpe" else f"merging to {text_vocab_size:,} tokens"):
        for report in reports:
            if report.get("stage") == MERGE_STAGE or "done" in report:
                break
    if "done" not in report:
        with progress("merging", text_vocab_size - SMALLEST_VOCABULARY, "tokens") as advance:
            shown = 0
            for report in reports:
                if report.get("stage") == MERGE_STAGE:
                    advance(report["current"] - shown)
                    shown = report["current"]
    return int(report["done"])


def _reports(process: JsonProcess) -> Iterator[dict[str, Any]]:
    """Yield the reports up to `done`; raise the error that the process reports, or one if it dies."""
    while (report := process.receive()) is not None:
        if "error" in report:
            name, what, rule, fix = report["error"]
            kind: type[Z2allError] = getattr(errors, name)
            raise kind(what, rule, fix)
        yield report
        if "done" in report:
            return
    code = process.wait()
    last_lines = " ".join([*process.error_lines][-3:])
    why = "it was killed, most likely out of memory" if code == -9 else f"exit code {code}: {last_lines}"
    raise MachineError("the process that learns the vocabulary", why, "Try a smaller max_bytes.")
