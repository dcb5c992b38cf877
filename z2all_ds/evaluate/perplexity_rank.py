"""One rank's share of a perplexity measurement: the settings, and the sums over its documents.

With several ranks, `perplexity.py` runs this module once per rank, as a process on its own GPU or its share of the
cores. It reads a request from stdin and writes progress and the result, or a user's error, to stdout.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch

from z2all_ds.base.child_process import read_messages, write_message
from z2all_ds.base.errors import Z2allError
from z2all_ds.base.parent_watch import follow_owner
from z2all_ds.evaluate.loading import AUTO, LoadedModel, load_model
from z2all_ds.evaluate.scoring import score
from z2all_ds.evaluate.texts import TextDomain, open_texts
from z2all_ds.evaluate.windows import (
    Window,
    WindowSettings,
    document_windows,
    packed_windows,
    read_document,
    window_settings,
)


@dataclass(frozen=True)
class PerplexitySettings:
    """The texts and limits of a measurement; the same for every model and every rank."""

    data: str
    documents: int | None = None
    """Number per domain, 0 for all; None: 50 of a corpus, all of plain files."""
    window: int | None = None
    """None: as long as the model supports."""
    stride: int | None = None
    """Default: window - 1."""
    packed: bool = False
    bos: str = AUTO
    batch: int = 8
    dtype: str = AUTO
    follow_links: bool = False
    """Read files that links in a folder of plain files lead to outside of it."""


@dataclass
class Sums:
    """Sums over documents and over ranks."""

    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    bytes: int = 0
    characters: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class RankResult:
    """Sums of one rank by domain, and how they were measured."""

    model: str
    step: int | None
    window: int
    stride: int | None
    """None for packed windows."""
    bos: bool
    sums: dict[str, Sums] = field(default_factory=dict)


def measure_share(
    loaded: LoadedModel,
    domains: list[TextDomain],
    settings: PerplexitySettings,
    rank: int,
    ranks: int,
    advance: Callable[[float], None],
) -> RankResult:
    """Measure the share of one rank: its documents or, if packed, its windows of the whole sequence.

    `advance` gets the bytes of text that have been scored.
    """
    cut = window_settings(
        loaded.tokenizer, loaded.known_max_tokens, settings.window, settings.stride, settings.packed, settings.bos
    )
    stride = None if cut.packed else cut.stride
    result = RankResult(loaded.label, loaded.step, cut.window, stride, cut.bos_id is not None)
    for domain in domains:
        sums = result.sums[domain.name] = Sums()
        windows = (_packed if cut.packed else _separate)(loaded, domain, cut, sums, rank, ranks)
        read, reported = _CountedWindows(windows), 0.0
        for _, losses in score(loaded, read, settings.batch):
            sums.tokens += len(losses)
            sums.nats += losses.sum().item()
            # Many documents are read at once; of their bytes, those of the scored tokens are done.
            done = sums.bytes * sums.tokens / max(1, read.tokens)
            advance(max(0.0, done - reported))
            reported = max(reported, done)
        advance(max(0.0, sums.bytes - reported))
    return result


class _CountedWindows:
    """Windows, and the number of tokens to be predicted in those taken so far."""

    def __init__(self, windows: Iterator[Window]) -> None:
        self._windows, self.tokens = windows, 0

    def __iter__(self) -> Iterator[Window]:
        for window in self._windows:
            self.tokens += sum(window.counted)
            yield window


def _separate(
    loaded: LoadedModel, domain: TextDomain, cut: WindowSettings, sums: Sums, rank: int, ranks: int
) -> Iterator[Window]:
    for text in domain.read(rank, ranks):
        document = read_document(loaded.tokenizer, text, first_counts=cut.bos_id is not None)
        sums.documents += 1
        sums.bytes += document.bytes
        sums.characters += document.characters
        yield from document_windows(document.ids, cut)


def _packed(
    loaded: LoadedModel, domain: TextDomain, cut: WindowSettings, sums: Sums, rank: int, ranks: int
) -> Iterator[Window]:
    """Yield windows: every rank reads all documents, since a window begins where the previous one ends."""

    def documents() -> Iterator[list[int]]:
        for number, text in enumerate(domain.read(0, 1)):
            document = read_document(loaded.tokenizer, text, first_counts=number > 0 or cut.bos_id is not None)
            if number % ranks == rank:
                sums.documents += 1
                sums.bytes += document.bytes
                sums.characters += document.characters
            yield document.ids

    for number, window in enumerate(packed_windows(documents(), cut)):
        if number % ranks == rank:
            yield window


def main() -> None:
    """Run one rank as a process."""
    follow_owner()
    request = next(read_messages(sys.stdin))
    rank, ranks, settings = request["rank"], request["ranks"], PerplexitySettings(**request["settings"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        loaded = load_model(request["model"], settings.dtype, device, quiet=True)
        domains = open_texts(settings.data, settings.documents, settings.follow_links)
        result = measure_share(
            loaded, domains, settings, rank, ranks, lambda count: write_message(sys.stdout, {"bytes": count})
        )
        write_message(sys.stdout, {"result": asdict(result)})
    except Z2allError as error:
        write_message(sys.stdout, {"error": [type(error).__name__, error.what, error.rule, error.fix]})


if __name__ == "__main__":
    main()
