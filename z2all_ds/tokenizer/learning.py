"""Has a vocabulary learned in a process of its own, shows how far it is, and stops it at once on Ctrl-C.

Trainers stay in their own code for minutes, where Python cannot deliver Ctrl-C, and use gigabytes that Python does not
give back. A process can be ended at any time, and its memory goes with it.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base import errors
from z2all_ds.base.child_process import JsonProcess, module_command, package_environment
from z2all_ds.base.console import heartbeat, progress
from z2all_ds.base.errors import MachineError, Z2allError
from z2all_ds.tokenizer.bbpe import SMALLEST_VOCABULARY

MERGE_STAGE = "Compute merges"
"""What `tokenizers` calls it in its progress lines."""


@dataclass(frozen=True)
class Learned:
    """Files of the tokenizer by name, and how much text it took."""

    files: dict[str, bytes]
    text_bytes: int


def learn_in_own_process(
    algorithm: str, inputs: Sequence[str], shares: Mapping[str, int], text_vocab_size: int
) -> Learned:
    """`inputs` as for open_sources, `shares` the bytes on disk to read of each domain."""
    with tempfile.TemporaryDirectory(prefix="z2all-tokenizer-") as scratch:
        job = {
            "algorithm": algorithm,
            "inputs": list(inputs),
            "shares": dict(shares),
            "text_vocab_size": text_vocab_size,
            "out": scratch,
        }
        command = module_command("z2all_ds.tokenizer.learning_process")
        # `tokenizers` writes its progress to stderr, as plain JSON objects.
        with closing(JsonProcess(command, package_environment(), error_mark="")) as process:
            process.send(job)
            text_bytes = _watch(_reports(process), sum(shares.values()), algorithm, text_vocab_size)
        files = {path.name: path.read_bytes() for path in Path(scratch).iterdir()}
    return Learned(files, text_bytes)


def _watch(reports: Iterator[dict[str, Any]], total_bytes: int, algorithm: str, text_vocab_size: int) -> int:
    """Bars for the reports of one process; returns the bytes of text."""
    report: dict[str, Any] = {}
    with progress("reading text", total_bytes / 1e6, "MB") as advance:
        shown = 0
        for report in reports:
            if "read" not in report:
                break
            advance((report["read"] - shown) / 1e6)
            shown = report["read"]
    # SentencePiece does not say how far it is.
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
    """Yields its reports up to the one that says done; raises the error that it reports, and one if it dies."""
    while (report := process.receive()) is not None:
        if "error" in report:
            name, what, rule, fix = report["error"]
            kind: type[Z2allError] = getattr(errors, name)
            raise kind(what, rule, fix)
        yield report
        if "done" in report:
            return
    code = process.wait()
    # The kernel's way of saying that memory is short is to kill.
    last_lines = " ".join([*process.error_lines][-3:])
    why = "it was killed, most likely for lack of memory" if code == -9 else f"exit code {code}: {last_lines}"
    raise MachineError("the process that learns the vocabulary", why, "Try a smaller max_bytes.")
