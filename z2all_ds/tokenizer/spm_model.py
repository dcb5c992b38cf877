"""Reads a SentencePiece .model file and converts it into a `tokenizers` backend with the same ids.

The file is one protobuf message. Only the fields below matter, so a small reader of the wire format is enough, and
neither SentencePiece nor protobuf needs to be installed.

SentencePiece writes a space as U+2581 and cannot distinguish the two. Here the vocabulary and the merges have real
spaces and the text is not changed: a literal U+2581 is an ordinary character, and every text is reproduced exactly. For
text without that character the ids are those of SentencePiece (the tests compare them).
"""

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from z2all_ds.base.errors import DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.tokenizer.spm_rules import START, differing_rules, parse_rules, rule_steps

SPACE_MARK = "\u2581"
BEFORE_SPACES = "\n| *[^ \n]+| +"
"""Splits where a space follows another character, and around line ends."""
NEVER_BEST = -1000.0
"""Added to the lowest score: any other segmentation is better."""
LONGEST_PIECE_BYTES = 512
"""SentencePiece writes up to 16 characters by default. The time for the merges grows with the square of the length."""
_CROSSES_SPLIT = re.compile("[^ ] |\n")


class PieceKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MODEL_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class SpmPiece:
    """One entry of the vocabulary; its index in the list is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SpmModel:
    """The content of a .model file. Missing flags have SentencePiece's defaults."""

    pieces: tuple[SpmPiece, ...]
    kind: str
    charsmap: bytes
    """Compiled normalization rules such as NFKC; may be empty."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    space_after_word: bool
    """Spaces end a piece instead of beginning one."""

    @property
    def has_all_bytes(self) -> bool:
        return sum(piece.kind is PieceKind.BYTE for piece in self.pieces) == 256


def parse_spm_model(data: bytes, where: str) -> SpmModel:
    """Parse the bytes of a .model file; `where` names it in errors."""
    pieces: list[SpmPiece] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                if len(value) > LONGEST_PIECE_BYTES:
                    raise ValueError(f"piece {len(pieces)} has {len(value):,} of at most {LONGEST_PIECE_BYTES} bytes")
                score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
                pieces.append(SpmPiece(piece.get(1, b"").decode("utf-8"), score, PieceKind(piece.get(3, 1))))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                rules = dict(_fields(value))
        if not pieces:
            raise ValueError("it has no pieces")
        return SpmModel(
            pieces=tuple(pieces),
            kind=MODEL_KINDS[trainer.get(3, 1)],
            charsmap=rules.get(2, b""),
            add_dummy_prefix=bool(rules.get(3, 1)),
            remove_extra_whitespaces=bool(rules.get(4, 1)),
            space_after_word=bool(trainer.get(24, 0)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        rule = f"not a SentencePiece model ({error or type(error).__name__})"
        raise DataError(where, rule, "Give a file that SentencePiece wrote, or a tokenizer.json.") from None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a message: integers as int, all others as bytes."""
    position = 0
    while position < len(data):
        key, position = _integer(data, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _integer(data, position)
            yield field, value
            continue
        if wire == 2:
            length, position = _integer(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + length > len(data):
            raise ValueError("unexpected end")
        yield field, data[position : position + length]
        position += length


def _integer(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError(f"endless number at byte {position}")


def spm_to_backend(model: SpmModel, where: str) -> Tokenizer:
    """Return a backend that gives the same ids; `where` names the model in errors."""
    vocabulary: dict[str, int] = {}
    for number, piece in enumerate(model.pieces):
        text = _with_spaces(piece.text) if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) else piece.text
        # A space and its mark may both be pieces; the later one is never used, but keeps its id.
        vocabulary[text if text not in vocabulary else f"<unreachable {number}>"] = number
    if model.kind == "bpe":
        backend = Tokenizer(_bpe(model, vocabulary))
        if model.has_all_bytes and not any(_CROSSES_SPLIT.search(text) for text in _mergeable(model)):
            # No piece and no unknown text crosses a split, so splitting changes no id. One text of 1.5 MB is encoded
            # at 2.9 to 3.8 MB/s instead of 1.3 to 1.9, texts of 3 kB at 2.3 to 2.9 instead of 3.2 to 4.1; long texts
            # matter more.
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(BEFORE_SPACES), behavior="isolated")
    elif model.kind == "unigram":
        unknown = next((n for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.UNKNOWN), None)
        names = sorted(vocabulary, key=vocabulary.__getitem__)
        # Only normal pieces may occur in text; `tokenizers` searches for all, so the others get a very low score.
        floor = min(piece.score for piece in model.pieces) + NEVER_BEST
        normal = [piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) for piece in model.pieces]
        pairs = [(text, model.pieces[n].score if normal[n] else floor) for n, text in enumerate(names)]
        backend = Tokenizer(models.Unigram(pairs, unk_id=unknown, byte_fallback=model.has_all_bytes))
    else:
        rule = f"SentencePiece models of kind {model.kind!r} are not supported"
        raise DataError(where, rule, "Give a bpe or unigram model.")
    with explain_content(DataError, where, "its normalization rules are damaged", "Use a complete copy."):
        if steps_before := _normalizers(model):
            backend.normalizer = normalizers.Sequence(steps_before)
    steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        ends = {"left": 0, "right": 1} if model.space_after_word else {"left": 1, "right": 0}
        steps.append(decoders.Strip(content=" ", **ends))
    backend.decoder = decoders.Sequence(steps)
    for piece in model.pieces:
        # With byte fallback nothing is unknown, and no text gives <unk>.
        if piece.kind is PieceKind.CONTROL or (piece.kind is PieceKind.UNKNOWN and not model.has_all_bytes):
            backend.add_special_tokens([AddedToken(piece.text, special=True, normalized=False)])
        elif piece.kind is PieceKind.USER_DEFINED:
            symbol = _with_spaces(piece.text)
            if not (backend.normalizer.normalize_str(symbol) if backend.normalizer else symbol):
                rule = f"its rules remove the user-defined piece {symbol!r} from texts"
                raise DataError(where, rule, "Give a model without that piece.")
            # Searched for after the steps of the whole text; before them, each part would get its own space.
            backend.add_tokens([AddedToken(symbol, normalized=True)])
    return backend


def differences(model: SpmModel) -> list[str]:
    """Return a warning for each kind of text to which the backend gives other ids than SentencePiece."""
    found = []
    if differing := differing_rules(model.charsmap) if model.charsmap else ():
        examples = ", ".join(" ".join(f"U+{ord(char):04X}" for char in key) for key, _ in differing[:3])
        found.append(
            f"{len(differing):,} of its normalization rules have no effect here, because they are not in the Unicode "
            f"version that `tokenizers` knows; text with these sequences gets other ids: {examples}"
        )
    symbols = _symbols(model)
    if symbols and model.add_dummy_prefix:
        found.append(
            f"a text that consists only of a user-defined piece such as {symbols[0]!r} gets no additional space"
        )
    steps = normalizers.Sequence(_normalizers(model))
    for symbol in symbols:
        if (changed := steps.normalize_str(symbol)) != symbol:
            found.append(f"text that its rules turn into {changed!r} becomes the user-defined piece {symbol!r}")
            break
    return found


def _with_spaces(text: str) -> str:
    return text.replace(SPACE_MARK, " ")


def _symbols(model: SpmModel) -> tuple[str, ...]:
    """Return the texts of the user-defined pieces."""
    return tuple(_with_spaces(piece.text) for piece in model.pieces if piece.kind is PieceKind.USER_DEFINED)


def _mergeable(model: SpmModel) -> list[str]:
    """Return the texts of the normal pieces, best first."""
    normal = [(piece, n) for n, piece in enumerate(model.pieces) if piece.kind is PieceKind.NORMAL]
    return [_with_spaces(piece.text) for piece, _ in sorted(normal, key=lambda one: (-one[0].score, one[1]))]


def _bpe(model: SpmModel, vocabulary: dict[str, int]) -> models.BPE:
    """Return a BPE model with a merge for every split of a piece into two pieces, the best piece first: SentencePiece
    merges any two adjacent pieces whose joined text is a piece."""
    best_first = _mergeable(model)
    known = set(best_first)
    merges = [
        (text[:cut], text[cut:])
        for text in best_first
        # The longer left part first, which is the same as taking the leftmost pair in runs of one character.
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in known and text[cut:] in known
    ]
    unknown = next((piece.text for piece in model.pieces if piece.kind is PieceKind.UNKNOWN), None)
    return models.BPE(
        vocab=vocabulary,
        merges=merges,
        byte_fallback=model.has_all_bytes,
        fuse_unk=not model.has_all_bytes,
        unk_token=None if model.has_all_bytes else unknown,
    )


def _normalizers(model: SpmModel) -> list[Any]:
    """Return the steps of SentencePiece in its order; the only white space it knows is U+0020."""
    if model.charsmap:
        return _with_rules(model)
    steps: list[Any] = []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        end = r"(?<=[\s\S])\z" if model.space_after_word else rf"\A{_except(_symbols(model))}(?=[\s\S])"
        steps.append(normalizers.Replace(Regex(end), " "))
    return steps


def _except(symbols: Iterable[str]) -> str:
    """Return a pattern that fails before a user-defined piece which is all of the text: `tokenizers` searches for its
    normalized form, which must not begin with the additional space."""
    own = "|".join(map(re.escape, symbols))
    return rf"(?!(?:{own})\z)" if own else ""


def _with_rules(model: SpmModel) -> list[Any]:
    """Return the steps of a model with normalization rules; START stays until the last one."""
    symbols = _symbols(model)
    steps: list[Any] = [normalizers.Prepend(START), *rule_steps(model.charsmap, symbols)]
    dummy_before = model.add_dummy_prefix and not model.space_after_word
    dummy_after = model.add_dummy_prefix and model.space_after_word
    if model.remove_extra_whitespaces:
        if dummy_after:
            # A text of characters that are removed has the dummy space, a text of spaces has not.
            blanks = [key for key, value in parse_rules(model.charsmap).items() if value == " "]
            spaces = "|".join(map(re.escape, (" ", *blanks)))
            steps.insert(0, normalizers.Replace(Regex(rf"\A(?:{spaces})+\z"), ""))
        # In one pass: after the beginning, before the end, after another space, and the beginning of an empty text.
        empty = rf"|\A{START}(?= *\z)" if dummy_before else ""
        steps.append(normalizers.Replace(Regex(rf"(?<=\A{START}) +| +\z|(?<= ) +{empty}"), ""))
    if dummy_after:
        steps.append(normalizers.Replace(Regex(r"(?!\A)\z"), " "))
    if dummy_before:
        so_far = normalizers.Sequence(steps)
        own = _except(so_far.normalize_str(symbol).removeprefix(START) for symbol in symbols)
        steps.append(normalizers.Replace(Regex(rf"\A{START}{own}"), " "))
    if symbols or not dummy_before:
        steps.append(normalizers.Replace(Regex(rf"\A{START}"), ""))
    return steps
