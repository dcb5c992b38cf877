"""Packs documents into samples with one of two packers, and samples into the columns of a batch.

A document is its tokens and one <|endoftext|>. A sample is `sequence_length` tokens of one domain. `next_tokens[t]` is
already the target of `input_ids[t]`: the next token of the same document, also if that token is the first of the next
sample. The <|endoftext|> is a target, and has no target itself: the loss never crosses the end of a document.

"cut" concatenates the documents and cuts every `sequence_length` tokens: no token is padded, dropped or repeated.
"best_fit" takes documents in groups and packs the documents of a group whole, the longest first; only documents longer
than a sample are cut, and the remaining space is padding.

Samples stay compact (four bytes per token) until they are in the training process, where they are expanded to the five
columns of a batch, ten times the size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from z2all_ds.data.documents import DocumentSpan, LaneDocuments, TokenArray, TokenRun, changed_document
from z2all_ds.data.order import Used

if TYPE_CHECKING:
    import torch


PACKING_MODES = ("cut", "best_fit")
SAMPLES_PER_GROUP, SMALLEST_REST, SMALLEST_PART = 64, 16, 4
"""Group size of "best_fit". On real text in samples of 2048 tokens the padding is 2.7 % with groups of 32, 1.7 % with
64, 1.2 % with 128; a resume reads the group again, and a lane holds one group per domain. A group ends with the lane's
part of an epoch, so that the documents of one epoch are read before those of the next. It takes the rest of the part,
too, if that has fewer than 16 samples; a part of fewer than four shares a group with the next one. Small groups have
more padding: 4.7 % with parts of ten samples."""

Cursor = list[int]
"""Position of a lane in a domain: the block of the lane (0, 1, 2, ...), the position in the block, and then for "cut"
the tokens already used of that document (0 also before the lane's part of it), for "best_fit" (sequence length, samples
used) of the group that begins there, with one more pair for each change of length within the group."""
LaneState = list[Cursor]
"""The cursors of a lane, in the order of the stream's domains."""

NO_TARGET = -100
"""Label of a position without a target; torch's cross-entropy ignores it."""

COLUMNS = ("input_ids", "next_tokens", "position_ids", "document_ids", "domain_ids")

Batch = dict[str, "torch.Tensor"]
"""The columns, each int64 [micro_batch_size, sequence_length]."""


class Sample(NamedTuple):
    """The tokens of one sample and the lengths of its documents."""

    tokens: npt.NDArray[np.int32]
    """[sequence_length + 1]; the last one is the token after the sample, if its last document continues."""
    piece_lengths: list[int]
    """Tokens of each document in the sample, then of the padding if there is any; the sum is sequence_length."""
    domain_index: int
    continues: bool
    """The last document continues in another sample."""
    num_padding: int = 0
    """Padding tokens at the end."""


def make_batch(samples: Sequence[Sample], pin_memory: bool = False) -> Batch:
    """Return the columns of a batch; pinned ones are written in place, without a copy.

    Positions start at 0 in each piece, also in the rest of a document that began in the sample before: attention cannot
    see that sample, so the model must not assume its context.
    """
    import torch

    length = len(samples[0].tokens) - 1
    shape = (len(COLUMNS), len(samples), length)
    # One allocation for all columns, and plain memory from numpy: more torch calls would cost as much as the writing.
    if pin_memory:
        block = torch.empty(shape, dtype=torch.int64, pin_memory=True)
    else:
        block = torch.from_numpy(np.empty(shape, dtype=np.int64))
    counting = np.arange(length)
    input_ids, all_targets, all_positions, all_documents, domain_ids = block.numpy()
    for row, sample in enumerate(samples):
        input_ids[row] = sample.tokens[:-1]
        domain_ids[row] = sample.domain_index
        targets, positions, documents = all_targets[row], all_positions[row], all_documents[row]
        targets[:] = sample.tokens[1:]
        begin = 0
        for number, size in enumerate(sample.piece_lengths):
            end = begin + size
            positions[begin:end] = counting[:size]
            documents[begin:end] = number
            targets[end - 1] = NO_TARGET
            begin = end
        if sample.continues:
            targets[-1] = sample.tokens[-1]
        if sample.num_padding:
            targets[length - sample.num_padding :] = NO_TARGET
    return dict(zip(COLUMNS, block.unbind(), strict=True))


def fresh_cursor(packing: str) -> Cursor:
    return [0, 0, 0] if packing == "cut" else [0, 0]


def tokens_used(cursor: Cursor, packing: str) -> Used:
    """Return the tokens that were used from the document of a cursor on; for "best_fit" with their padding."""
    if packing == "cut":
        return Used(cursor[2], 0)
    return Used(0, sum(length * samples for length, samples in zip(cursor[2::2], cursor[3::2], strict=True)))


class CutPacker:
    """Concatenates the documents of one lane and domain, and cuts every `sequence_length` tokens."""

    def __init__(self, documents: LaneDocuments, domain_index: int, cursor: Cursor) -> None:
        self._documents, self._domain_index = documents, domain_index
        self._used_of_first = cursor[2]  # tokens used of the document at which the next run begins
        self._run: TokenRun | None = None
        self._used = 0  # tokens used of the run
        self._number = 0  # of the current document in the run; `_documents` is at the first one of the run

    def next_sample(self, sequence_length: int, spans: list[DocumentSpan] | None = None) -> Sample:
        """Return the next sample; add its document spans to `spans`."""
        tokens = np.empty(sequence_length + 1, dtype=np.int32)
        lengths: list[int] = []
        filled, continues = 0, False
        while filled < sequence_length:
            run = self._run or self._open_run(sequence_length)
            begin = self._used
            stop = min(len(run.tokens), begin + sequence_length - filled)
            tokens[filled : filled + stop - begin] = run.tokens[begin:stop]
            filled += stop - begin
            continues = self._take(run, stop, lengths, spans)
            if continues:
                tokens[-1] = run.tokens[stop]
            if stop == len(run.tokens):
                self._documents.advance(len(run.ends))
                self._run = None
        if not continues:
            tokens[-1] = 0  # unused
        return Sample(tokens, lengths, self._domain_index, continues)

    def cursor(self) -> Cursor:
        documents = self._documents
        if self._run is None:
            return [documents.block, documents.position, self._used_of_first]
        begin = self._run.ends[self._number - 1] if self._number else 0
        return [documents.block, documents.position + self._number, self._used - begin]

    def _take(self, run: TokenRun, stop: int, lengths: list[int], spans: list[DocumentSpan] | None) -> bool:
        """Add the pieces up to `stop`; return whether the last one ends within its document."""
        begin, number, ends = self._used, self._number, run.ends
        while begin < stop:
            end = min(ends[number], stop)
            lengths.append(end - begin)
            if spans is not None:
                first = ends[number - 1] if number else 0
                spans.append(self._documents.span(number, begin - first, end - first))
            if end == ends[number]:
                number += 1
            begin = end
        self._used, self._number = stop, number
        return number < len(ends) and stop > (ends[number - 1] if number else 0)

    def _open_run(self, wanted_tokens: int) -> TokenRun:
        run = self._documents.run(wanted_tokens)
        used = self._used_of_first or run.begin
        if self._used_of_first >= run.ends[0]:
            raise changed_document(self._documents.document_index, used)
        # The part of the first document may be empty, if places in bytes are the same place in its tokens.
        self._run, self._used, self._number, self._used_of_first = run, used, bisect_right(run.ends, used), 0
        return run


class BestFitPacker:
    """Packs the documents of one lane and domain in groups; documents that fit into a sample are not cut."""

    def __init__(self, documents: LaneDocuments, domain_index: int, cursor: Cursor) -> None:
        self._documents, self._domain_index = documents, domain_index
        self._group_start, self._history = cursor[:2], list(zip(cursor[2::2], cursor[3::2], strict=True))
        self._loose: list[tuple[DocumentSpan, TokenArray]] = []
        """Pieces of the group that are in no bin."""
        self._bins: list[list[tuple[DocumentSpan, TokenArray]]] | None = None

    def next_sample(self, sequence_length: int, spans: list[DocumentSpan] | None = None) -> Sample:
        """Return the next sample; add its document spans to `spans`."""
        if self._bins is None:
            self._replay()
        if self._history and self._history[-1][0] != sequence_length:  # a stage with another length has begun
            self._empty_bins()
        if not self._bins:
            if not self._loose:
                self._group_start, self._history = [self._documents.block, self._documents.position], []
            self._history.append((sequence_length, 0))
            self._bins = self._make_bins(sequence_length)
        content = self._bins.pop(0)
        length, used = self._history[-1]
        self._history[-1] = (length, used + 1)
        if spans is not None:
            spans.extend(span for span, _ in content)
        return self._as_sample(content, sequence_length)

    def cursor(self) -> Cursor:
        if self._bins is not None and not self._bins:  # the group is used up: the next one begins here
            return [self._documents.block, self._documents.position]
        return [*self._group_start, *(number for pair in self._history for number in pair)]

    def _replay(self) -> None:
        """After a resume: packs the current group again and drops the samples that were used."""
        for number, (length, used) in enumerate(self._history):
            if number:
                self._empty_bins()
            self._bins = self._make_bins(length)[used:]
        self._bins = self._bins or []

    def _empty_bins(self) -> None:
        self._loose = [entry for content in self._bins or [] for entry in content]
        self._bins = []

    def _make_bins(self, sequence_length: int) -> list[list[tuple[DocumentSpan, TokenArray]]]:
        """Add documents to the loose pieces up to a full group, cut those that are too long, and packs all."""
        entries, total = self._loose, sum(span.end - span.start for span, _ in self._loose)
        self._loose = []
        full = SAMPLES_PER_GROUP * sequence_length
        while total < full or takes_rest(self._documents.left_in_part, sequence_length):
            tokens = self._documents.tokens()
            begin, end = self._documents.part(len(tokens))
            if begin < end:
                entries.append((self._documents.span(0, begin, end), tokens))
            total += end - begin
            self._documents.advance()
            if self._documents.begins_part and total >= SMALLEST_PART * sequence_length:
                break
        cut = [
            (span._replace(start=start, end=min(start + sequence_length, span.end)), tokens)
            for span, tokens in entries
            for start in range(span.start, span.end, sequence_length)
        ]
        bins = best_fit([span.end - span.start for span, _ in cut], sequence_length)
        return [[cut[number] for number in content] for content in bins]

    def _as_sample(self, content: list[tuple[DocumentSpan, TokenArray]], sequence_length: int) -> Sample:
        tokens = np.zeros(sequence_length + 1, dtype=np.int32)
        filled, lengths = 0, []
        for span, document in content:
            lengths.append(span.end - span.start)
            tokens[filled : filled + lengths[-1]] = document[span.start : span.end]
            filled += lengths[-1]
        last, document = content[-1]
        padding = sequence_length - filled
        continues = last.end < len(document) and not padding
        if continues:
            tokens[-1] = document[last.end]
        if padding:
            tokens[filled:-1] = document[-1]  # <|endoftext|>
            lengths.append(padding)
        return Sample(tokens, lengths, self._domain_index, continues, padding)


def takes_rest(left_in_part: int, sequence_length: int) -> bool:
    """Return whether a full group takes the rest of the part, too."""
    return 0 < left_in_part < SMALLEST_REST * sequence_length


def padding_of(documents: npt.NDArray[np.int64], sequence_length: int) -> int:
    """Return the padding of "best_fit" in a lane's part of an epoch with documents of these sizes.

    Exact for samples of one length and a part of at least SMALLEST_PART samples.
    """
    ends = np.cumsum(documents)
    first = padding = before = 0
    while first < len(documents):
        end = int(np.searchsorted(ends, before + SAMPLES_PER_GROUP * sequence_length)) + 1
        if end >= len(documents) or takes_rest(int(ends[-1] - ends[end - 1]), sequence_length):
            end = len(documents)
        whole, rest = np.divmod(documents[first:end], sequence_length)
        num_bins = int(whole.sum()) + len(best_fit(rest[rest > 0].tolist(), sequence_length))
        padding += num_bins * sequence_length - (int(ends[end - 1]) - before)
        first, before = end, int(ends[end - 1])
    return padding


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack pieces of the given lengths (none above `capacity`) into bins by best-fit decreasing.

    Return the piece numbers of each bin, with bins and pieces in the order of the input: in packing order, the long
    documents would come first and all lanes would begin with them.

    One integer has a bit for each amount of free space, so two integer operations find the fullest bin that fits.
    """
    bins: list[list[int]] = []
    bins_by_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set if some bin has s tokens free
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        need = lengths[piece]
        enough = spaces >> need
        if enough:
            space = need + (enough & -enough).bit_length() - 1
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        left = space - need
        bins_by_space.setdefault(left, []).append(chosen)
        spaces |= 1 << left
    return sorted(sorted(pieces) for pieces in bins)
